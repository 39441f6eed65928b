"""The shapes of the fleet's own call: an entry of `fleet.replicas`, as the configuration has it.

Taken from the configuration's model, so that what the file may say of a replica is what a replica
may say of itself; beside that only what travels in addresses and headers is narrower.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.config import ReplicaEntry
from gateway.edge.json_shapes import NUMBER, TEXT, Schema, record

NAME: Final = r"^[!-.0-~]{1,128}$"
URL: Final = r"^https?://[!-?A-~]{1,1016}$"
"""An address with a user in it holds a secret, and would be shown."""

NAMED: Final[Schema] = {"type": "string", "pattern": NAME}
AT: Final[Schema] = {"type": "string", "pattern": URL}


def _entry() -> Schema:
    model: dict[str, Any] = ReplicaEntry.model_json_schema()
    del model["title"]
    fields: dict[str, Schema] = model["properties"]
    for field in fields.values():
        del field["title"]
    for name, narrower in (("id", NAMED), ("url", AT), ("api_key", {"const": ""})):
        fields[name] = narrower | {"description": fields[name]["description"]}
    return model


JOIN_SCHEMAS: Final[dict[str, Schema]] = {
    "NewReplica": _entry(),
    "Lease": record({"id": TEXT, "lease_s": NUMBER}),
}
