"""The codec of `messages`, and the names both processes use on HTTP.

Decoding keeps what it knows and ignores what it does not, so an older gateway reads a newer
replica's report; encoding of a value and decoding give the value back.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import orjson

from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier, Usage

REPORTS_PATH: Final = "/reports"
ADAPTERS_PATH: Final = "/v1/adapters"
DRAIN_PATH: Final = "/drain"
PIN_PATH: Final = "/pin"
PREFETCH_PATH: Final = "/prefetch"
LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"

JOIN_PATH: Final = "/fleet/v1/replicas"
"""Of the gateway: POST `{id, url}` joins the fleet or renews that, and is answered with `lease_s`;
DELETE, as `JOIN_PATH/{id}?url=`, leaves it. Both want the fleet token."""

# Reply headers of the gateway (DESIGN.md §2).
REQUEST_ID: Final = "x-request-id"
REPLICA: Final = "x-loraplex-replica"
PLACEMENT: Final = "x-loraplex-placement"
QUEUE_MS: Final = "x-loraplex-queue-ms"
ADAPTER_VERSION: Final = "x-loraplex-adapter-version"

FLEET_TOKEN: Final = "x-loraplex-fleet-token"
"""Request header that proves to a replica that the caller runs the fleet."""

CACHE_SALT: Final = "x-loraplex-cache-salt"
"""Request header of the fleet: cached keys are shared only among requests that have the same. A
gateway lets no `x-loraplex-*` of a client pass, and a replica that has a fleet token wants it."""


class WireError(ValueError):
    """Bytes that are not the message they should be; the text names the field."""


def encode_report(report: ReplicaReport) -> bytes:
    """One NDJSON line, newline included."""
    return orjson.dumps(asdict(report), option=orjson.OPT_APPEND_NEWLINE)


def decode_report(line: bytes) -> ReplicaReport:
    """Raises WireError when a known field is missing or of the wrong type."""
    try:
        raw = orjson.loads(line)
        return ReplicaReport(
            replica=ReplicaId(_str(raw, "replica")),
            boot=_str(raw, "boot"),
            seq=_int(raw, "seq"),
            base=_str(raw, "base"),
            slots=_int(raw, "slots"),
            capacity=_int(raw, "capacity"),
            running=_int(raw, "running"),
            waiting=_int(raw, "waiting"),
            pages_total=_int(raw, "pages_total"),
            pages_free=_int(raw, "pages_free"),
            max_model_len=_int(raw, "max_model_len"),
            heartbeat_s=float(raw["heartbeat_s"]),
            draining=bool(raw.get("draining", False)),
            merged=AdapterId(_str(raw, "merged")) if raw.get("merged") is not None else None,
            adapters=tuple(_adapter(item) for item in raw.get("adapters", ())),
            pages_cached=int(raw.get("pages_cached", 0)),
            pages_adapters=int(raw.get("pages_adapters", 0)),
            max_rank=int(raw.get("max_rank", 0)),
            host_max=int(raw.get("host_max", 0)),
            host_bytes=int(raw.get("host_bytes", 0)),
            copy_bytes_per_s=float(raw.get("copy_bytes_per_s", 0)),
            read_bytes_per_s=float(raw.get("read_bytes_per_s", 0)),
            store=_str(raw, "store") if "store" in raw else "",
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"not a replica report: {error!r}") from error


def decode_usage(raw: Any) -> Usage | None:
    """An OpenAI `usage` object, or None when `raw` is not one."""
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt_tokens"), int):
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    completion = raw.get("completion_tokens")
    return Usage(
        prompt_tokens=raw["prompt_tokens"],
        completion_tokens=completion if isinstance(completion, int) else 0,
        cached_tokens=cached if isinstance(cached, int) else 0,
    )


def _adapter(raw: dict[str, Any]) -> AdapterState:
    return AdapterState(
        adapter=AdapterId(_str(raw, "adapter")),
        digest=_str(raw, "digest"),
        tier=Tier(raw["tier"]),
        status=AdapterStatus(raw.get("status", AdapterStatus.READY)),
        rank=int(raw.get("rank", 0)),
        size_bytes=int(raw.get("size_bytes", 0)),
        pinned=bool(raw.get("pinned", False)),
        running=int(raw.get("running", 0)),
        reason=str(raw.get("reason", "")),
        inferred=bool(raw.get("inferred", False)),
    )


def _str(raw: dict[str, Any], field: str) -> str:
    value = raw[field]
    if not isinstance(value, str):
        raise WireError(f"{field}: expected a string, got {value!r}")
    return value


def _int(raw: dict[str, Any], field: str) -> int:
    value = raw[field]
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{field}: expected an integer, got {value!r}")
    return value
