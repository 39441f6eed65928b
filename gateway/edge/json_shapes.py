"""JSON Schema in few words: objects, lists, what may be null."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def listing(of: Schema, **more: Schema) -> Schema:
    fields: dict[str, Schema] = {
        "object": {"const": "list"},
        "data": {"type": "array", "items": of},
        **more,
    }
    return record(fields)


def record(fields: dict[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """An object that has these fields and no others; those of an answer are all there."""
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    }


def change(fields: dict[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    """A body: what it leaves out stays as it is."""
    found = {"type": "object", "properties": fields, "additionalProperties": False}
    return found | ({"required": [*required]} if required else {})


INT: Final[Schema] = {"type": "integer"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
TEXT: Final[Schema] = {"type": "string"}
BOOL: Final[Schema] = {"type": "boolean"}
