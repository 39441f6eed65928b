"""The shapes of the admin API's bodies, as JSON Schema: what the OpenAPI document refers to."""

from __future__ import annotations

from typing import Final

from gateway.core.dispatcher import ReplicaState
from gateway.edge.json_shapes import (
    BOOL,
    COUNT,
    INT,
    NUMBER,
    TEXT,
    Schema,
    change,
    nullable,
    record,
    ref,
)
from gateway.state.ledger import DIMENSIONS
from gateway.state.prices import PRICE_MAX
from gateway.state.records import OUTCOMES
from gateway.state.registry import GRACE_MAX_S
from gateway.state.tenants import (
    ADAPTER_LIMITS_MAX,
    LIMIT_MAX,
    MODELS_MAX,
    NAME_BYTES_MAX,
    SECRET_MAX,
    SECRET_MIN,
    SPEND_MAX,
    WEIGHT_MAX,
    Limits,
)
from shared.messages import AdapterStatus, Tier

# no control characters (nor half of a surrogate pair); its length in UTF-8 is bounded
_NAME: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": NAME_BYTES_MAX,
    "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$",
}
_TENANT_NAME: Final[Schema] = {**_NAME, "pattern": r"^(?!\.{1,2}$)[^/\x00-\x1f\x7f-\x9f]+$"}
_NAMES: Final[Schema] = {"type": "array", "items": _NAME, "maxItems": MODELS_MAX}
_DIGEST: Final[Schema] = {"type": "string", "pattern": "^(sha256:)?[0-9A-Fa-f]{12,64}$"}
_WEIGHT: Final[Schema] = {"type": "number", "exclusiveMinimum": 0, "maximum": WEIGHT_MAX}


def _limit(name: str) -> Schema:
    money = name.startswith("spend")
    kind = {"type": "number" if money else "integer", "minimum": 0}
    return nullable({**kind, "maximum": SPEND_MAX if money else LIMIT_MAX})


_LIMITS: Final = {name: _limit(name) for name in Limits.__slots__}
_PRICE: Final[Schema] = {
    "type": "number",
    "minimum": 0,
    "maximum": PRICE_MAX,
    "multipleOf": 0.001,
    "description": "Units of money for a million tokens.",
}
_ERROR: Final = {"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)}
_KEY: Final = {"id": TEXT, "prefix": TEXT, "created": NUMBER, "expires": nullable(NUMBER)}
_VERSION: Final = {"digest": TEXT, "path": TEXT, "note": TEXT, "created": NUMBER}
_STATE: Final = {
    "digest": TEXT,
    "tier": {"enum": [tier.value for tier in Tier]},
    "status": {"enum": [status.value for status in AdapterStatus]},
    "rank": COUNT,
    "size_bytes": COUNT,
    "pinned": BOOL,
    "inferred": BOOL,
    "running": COUNT,
    "reason": TEXT,
}
_STATE_OPEN: Final[Schema] = {  # a newer replica's state may say more
    "type": "object",
    "properties": _STATE,
    "required": [*_STATE],
}
_COUNTED: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "estimated")

SCHEMAS: Final[dict[str, Schema]] = {
    "Error": record({"error": record(_ERROR)}),
    "Limits": record(_LIMITS),
    "LimitsChange": change(_LIMITS),
    "Key": record(_KEY),
    "NewKey": record(
        {
            **_KEY,
            "tenant": TEXT,
            "secret": {"type": "string", "description": "Shown now and never again."},
            "replaces": TEXT,
        },
        optional=("replaces",),
    ),
    "Tenant": record(
        {
            "id": TEXT,
            "weight": NUMBER,
            "models": {"type": "array", "items": TEXT},
            "limits": ref("Limits"),
            "adapter_limits": {"type": "object", "additionalProperties": ref("Limits")},
            "shadow": BOOL,
            "created": NUMBER,
            "version": INT,
            "keys": {"type": "array", "items": ref("Key")},
        }
    ),
    "TenantChange": change(
        {
            "weight": _WEIGHT,
            "models": _NAMES,
            "limits": ref("LimitsChange"),
            "adapter_limits": {
                "type": "object",
                "additionalProperties": nullable(ref("LimitsChange")),
                "propertyNames": _NAME,
                "maxProperties": ADAPTER_LIMITS_MAX,
            },
            "shadow": BOOL,
        }
    ),
    "KeyWish": change(
        {
            "secret": {
                "type": "string",
                "minLength": SECRET_MIN,
                "maxLength": SECRET_MAX,
                "pattern": "^[!-~]+$",
                "description": "One that clients already hold; else one is made.",
            }
        }
    ),
    "Rotation": change({"grace_s": {"type": "number", "minimum": 0, "maximum": GRACE_MAX_S}}),
    "Left": record(
        {
            "tenant": TEXT,
            "degraded": BOOL,
            "limits": {
                "type": "array",
                "items": record(
                    {
                        "name": TEXT,
                        "model": TEXT,
                        "limit": NUMBER,
                        "remaining": NUMBER,
                        "reset_s": nullable(NUMBER),
                    }
                ),
            },
        }
    ),
    "AdapterRecord": record(
        {
            "name": TEXT,
            "owner": TEXT,
            "access": {"type": "array", "items": TEXT},
            "versions": {"type": "array", "items": record(_VERSION)},
            "current": TEXT,
            "previous": TEXT,
            "created": NUMBER,
            "version": INT,
        }
    ),
    "Adapter": record(
        {
            "adapter": TEXT,
            "status": {"enum": ["absent", *[status.value for status in AdapterStatus]]},
            "routable": BOOL,
            "digest": TEXT,
            "rank": COUNT,
            "size_bytes": COUNT,
            "others": {"type": "array", "items": TEXT},
            "replicas": {"type": "array", "items": TEXT},
            "places": {"type": "array", "items": _STATE_OPEN},
            "record": nullable(ref("AdapterRecord")),
        }
    ),
    "AdapterChange": change({"owner": {"anyOf": [_NAME, {"const": ""}]}, "access": _NAMES}),
    "VersionWish": change(
        {
            "digest": _DIGEST,
            "path": {"type": "string", "maxLength": 4096, "pattern": "^[ -~]*$"},
            "note": {"type": "string", "maxLength": 500, "pattern": "^[ -~]*$"},
        },
        required=("digest",),
    ),
    "Rollback": change({"digest": {"type": "string", "pattern": "^[0-9a-f]{1,64}$"}}),
    "Replica": {
        "type": "object",
        "properties": {
            "replica": TEXT,
            "state": {"enum": [state.value for state in ReplicaState]},
            "in_flight": COUNT,
            "load": COUNT,
            "running": COUNT,
            "waiting": COUNT,
            "capacity": COUNT,
            "adapters": COUNT,
            "resident": {"type": "array", "items": TEXT},
            "reported_s_ago": nullable(NUMBER),
            "ejected_s_left": nullable(NUMBER),
            "found_by": TEXT,
        },
        "required": ["replica", "state", "in_flight", "capacity", "adapters"],
    },
    "Residency": record(
        {
            "replica": TEXT,
            "state": TEXT,
            "slots": COUNT,
            "adapters": {"type": "array", "items": _STATE_OPEN},
        }
    ),
    "Explanation": record(
        {
            "tenant": TEXT,
            "model": TEXT,
            "chosen": nullable(TEXT),
            "candidates": {"type": "array", "items": {"type": "object"}},
        }
    ),
    "UsageRow": record(
        {
            **{name: TEXT for name in DIMENSIONS},
            **{name: INT for name in (*_COUNTED, *OUTCOMES)},
            "spend": NUMBER,
        },
        optional=DIMENSIONS,
    ),
    "Record": {
        "type": "object",
        "properties": {
            "id": TEXT,
            "request": TEXT,
            "tenant": TEXT,
            "adapter": TEXT,
            "outcome": {"enum": [*OUTCOMES]},
            "prompt_tokens": COUNT,
            "cached_tokens": COUNT,
            "completion_tokens": COUNT,
            "spend": NUMBER,
            "at": NUMBER,
        },
        "required": ["id", "request", "tenant", "adapter", "outcome", "at"],
    },
    "Trim": change(
        {"through": {"type": "string", "pattern": "^[0-9]{1,15}-[0-9]{1,15}$"}},
        required=("through",),
    ),
    "Trimmed": record({"trimmed": COUNT, "through": TEXT}),
    "Reconciliation": record(
        {
            "replica": TEXT,
            "boot": TEXT,
            "generated": nullable(INT),
            "billed": INT,
            "counted_requests": INT,
            "counted_tokens": INT,
            "estimated_requests": INT,
            "estimated_tokens": INT,
            "running": COUNT,
            "difference": nullable(INT),
            "verdict": {"enum": ["equal", "explained", "differs", "running", "unknown"]},
            "reason": TEXT,
        }
    ),
    "Price": record(
        {
            "tenant": TEXT,
            "model": TEXT,
            "input": NUMBER,
            "cached_input": NUMBER,
            "output": NUMBER,
            "version": INT,
        }
    ),
    "PriceChange": change(
        {"input": _PRICE, "cached_input": nullable(_PRICE), "output": _PRICE},
        required=("input", "output"),
    ),
    "Event": record(
        {
            "id": TEXT,
            "at": NUMBER,
            "actor": TEXT,
            "action": TEXT,
            "subject": TEXT,
            "detail": {"type": "object"},
        }
    ),
}
SCHEMAS["NewTenant"] = {
    **SCHEMAS["TenantChange"],
    "properties": {"id": _TENANT_NAME, **SCHEMAS["TenantChange"]["properties"]},
    "required": ["id"],
}
