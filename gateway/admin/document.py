"""The admin API and the fleet's own call in OpenAPI 3.1: operations, bodies, every way to say no.

Written by hand beside the routes, since the handlers take plain JSON; a test holds the two equal,
and another lets a machine try the document against the server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.admin.call import ACTOR
from gateway.admin.join_schemas import AT, JOIN_SCHEMAS, NAMED
from gateway.admin.schemas import SCHEMAS
from gateway.edge.json_shapes import Schema, listing, ref
from gateway.state.ledger import DIMENSIONS
from shared.wire import FLEET_TOKEN

VERSION: Final = "1"
ADMIN: Final = "/admin/v1/"
FLEET: Final = "/fleet/v1/"

_VERB: Final = {"GET": "get", "POST": "create", "PATCH": "change", "PUT": "set", "DELETE": "delete"}
_TIME: Final[Schema] = {"type": "string", "description": "ISO 8601, or seconds since 1970."}
_ENTRY: Final[Schema] = {"type": "string", "pattern": "^[0-9]{1,15}-[0-9]{1,15}$"}
_PAGE: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 5000}
_PART: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 64}
_SCHEMAS: Final = SCHEMAS | JOIN_SCHEMAS


class Operation(NamedTuple):
    method: str
    path: str  # below `root`
    says: str
    answer: Schema | None = None  # None: 204
    body: str = ""
    status: int = 200
    query: dict[str, Schema] = {}  # noqa: RUF012  # never changed
    required: tuple[str, ...] = ()  # of the query
    versioned: bool = False  # takes If-Match
    tagged: bool = False  # gives an ETag
    root: str = ADMIN  # FLEET: with the fleet token
    part: Schema = _PART  # each name in the path


_WINDOW: Final[dict[str, Schema]] = {"from": _TIME, "to": _TIME}
_BY: Final[Schema] = {"type": "string", "description": f"Some of {', '.join(DIMENSIONS)}."}

OPERATIONS: Final[Sequence[Operation]] = (
    Operation("GET", "tenants", "Every tenant.", listing(ref("Tenant"))),
    Operation(
        "POST", "tenants", "Make a tenant.", ref("Tenant"), "NewTenant", status=201, tagged=True
    ),
    Operation("GET", "tenants/{tenant}", "One tenant.", ref("Tenant"), tagged=True),
    Operation(
        *("PATCH", "tenants/{tenant}", "Change what is named; the rest stays."),
        *(ref("Tenant"), "TenantChange"),
        versioned=True,
        tagged=True,
    ),
    Operation(
        "DELETE", "tenants/{tenant}", "Remove it with its keys; its usage stays.", versioned=True
    ),
    Operation("GET", "tenants/{tenant}/quota", "What is left of its limits.", ref("Left")),
    Operation(
        "GET", "tenants/{tenant}/keys", "Its keys, never their secrets.", listing(ref("Key"))
    ),
    Operation("POST", "tenants/{tenant}/keys", "Make a key.", ref("NewKey"), "KeyWish", status=201),
    Operation("DELETE", "tenants/{tenant}/keys/{key}", "Make a key worthless, at once."),
    Operation(
        *("POST", "tenants/{tenant}/keys/{key}/rotate", "Make a key in place of one."),
        *(ref("NewKey"), "Rotation"),
        status=201,
    ),
    Operation("GET", "adapters", "What is served, and what has a record.", listing(ref("Adapter"))),
    Operation("GET", "adapters/{adapter}", "One adapter.", ref("Adapter"), tagged=True),
    Operation(
        *("PATCH", "adapters/{adapter}", "Whose it is and who may use it."),
        *(ref("Adapter"), "AdapterChange"),
        versioned=True,
        tagged=True,
    ),
    Operation("DELETE", "adapters/{adapter}", "Remove its record.", versioned=True),
    Operation(
        *("POST", "adapters/{adapter}/versions", "Add a version, current from now on."),
        *(ref("Adapter"), "VersionWish"),
        status=201,
        versioned=True,
        tagged=True,
    ),
    Operation(
        *("POST", "adapters/{adapter}/rollback", "Go back to the version before, or to one named."),
        *(ref("Adapter"), "Rollback"),
        versioned=True,
        tagged=True,
    ),
    Operation("GET", "replicas", "Every replica of this gateway.", listing(ref("Replica"))),
    Operation("POST", "replicas/{replica}/drain", "Send it nothing new.", ref("Replica")),
    Operation("POST", "replicas/{replica}/resume", "Take it back into use.", ref("Replica")),
    Operation("GET", "residency", "Which replica holds what.", listing(ref("Residency"))),
    Operation(
        *("GET", "explain", "Where a request would go now, and why.", ref("Explanation")),
        query={"tenant": {"type": "string"}, "model": {"type": "string"}},
        required=("tenant", "model"),
    ),
    Operation(
        *("GET", "usage", "Sums of whole hours."),
        {
            "type": "object",
            "properties": {
                "from": {"type": "string"},
                "to": {"type": "string"},
                "by": {"type": "array", "items": {"enum": [*DIMENSIONS]}},
                "data": {"type": "array", "items": ref("UsageRow")},
            },
            "required": ["from", "to", "by", "data"],
        },
        query={**_WINDOW, "by": _BY},
    ),
    Operation(
        *("GET", "usage/records", "One record a request, in pages."),
        listing(ref("Record"), next={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        query={**_WINDOW, "after": _ENTRY, "limit": _PAGE},
    ),
    Operation("POST", "usage/trim", "Forget exported records.", ref("Trimmed"), "Trim"),
    Operation(
        *("GET", "usage/reconcile", "The bill against the replicas' own counters."),
        listing(ref("Reconciliation")),
    ),
    Operation("GET", "prices", "The price table.", listing(ref("Price"))),
    Operation(
        *("PUT", "prices/{tenant}/{model}", "A price; `*` is every tenant, or every model."),
        *(ref("Price"), "PriceChange"),
        tagged=True,
    ),
    Operation("DELETE", "prices/{tenant}/{model}", "No price of its own any more."),
    Operation(
        *("GET", "events", "Who changed what, newest first.", listing(ref("Event"))),
        query={"after": _ENTRY, "limit": _PAGE},
    ),
    Operation(
        *("POST", "replicas", "Join the fleet, or renew that: again before the lease ends."),
        *(ref("Lease"), "NewReplica"),
        root=FLEET,
    ),
    Operation(
        *("DELETE", "replicas/{replica}", "Leave the fleet; what it was named there is free."),
        query={"url": AT},
        required=("url",),
        root=FLEET,
        part=NAMED,
    ),
)


def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        at = paths.setdefault(operation.root + operation.path, {})
        at[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Loraplex admin API",
            "version": VERSION,
            "description": f"`{ACTOR}` names who asks, for the events.",
        },
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "admin_key": {"type": "http", "scheme": "bearer"},
                "fleet_token": {"type": "apiKey", "in": "header", "name": FLEET_TOKEN},
            },
        },
        "security": [{"admin_key": []}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.says,
        "operationId": _identifier(operation),
        "parameters": _parameters(operation),
        "responses": _responses(operation),
    }
    if operation.root == FLEET:
        described["security"] = [{"fleet_token": []}]
    if operation.body:
        schema = ref(operation.body)
        needed = bool(_SCHEMAS[operation.body].get("required"))
        described["requestBody"] = {"required": needed, "content": _json(schema)}
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": operation.part}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    for name, schema in operation.query.items():
        needed = name in operation.required
        found.append({"name": name, "in": "query", "required": needed, "schema": schema})
    if operation.versioned:
        found.append(
            {
                "name": "If-Match",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "pattern": r'^(\*|"[0-9]{1,15}")$'},
                "description": "The ETag that was read; without it the change wins anyhow.",
            }
        )
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        good: dict[str, Any] = {"204": {"description": "Done."}}
    else:
        headers = {"ETag": {"schema": {"type": "string"}}} if operation.tagged else {}
        said = {"description": "As asked.", "content": _json(operation.answer)}
        good = {str(operation.status): said | ({"headers": headers} if headers else {})}
    refusals = {"400": "A value is not allowed.", "401": "Not the admin key."}
    refusals["429"] = "Too many wrong keys from this address."
    refusals["503"] = "The store is away; the fate of a change is unknown."
    if operation.root == FLEET:
        refusals["401"] = "Not the fleet token."
        refusals["404"] = "Joining is off: the gateway has no fleet token."
    elif "{" in operation.path or operation.required:
        refusals["404"] = "There is no such thing."
    if operation.method != "GET":
        refusals["409"] = "It exists already, is full, or was changed meanwhile."
        refusals["413"] = "The body is too large."
    if operation.versioned:
        refusals["412"] = "It was changed since it was read."
    content = _json(ref("Error"))
    return good | {
        status: {"description": text, "content": content} for status, text in refusals.items()
    }


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _identifier(operation: Operation) -> str:
    words = re.sub(r"[^a-z]+", " ", operation.path).split()
    return "_".join([_VERB[operation.method], *words])
