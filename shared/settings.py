"""Configuration read once at the edge: YAML, then environment, then pydantic; unknown keys refused.

`LORAPLEX_<SECTION>__<FIELD>` overrides one field (`LORAPLEX_STORE__URL=redis://…`). The example a
process prints is made from the models themselves, so that it cannot drift from them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

ENV_PREFIX = "LORAPLEX_"


class Settings(BaseModel):
    """Base of every configuration section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


S = TypeVar("S", bound=Settings)


class BadSettings(ValueError):
    """The text names the file, the key and what was wrong, one line each."""


def load(
    kind: type[S],
    path: Path | None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
) -> S:
    """Read `path` (or defaults), lay the environment over it, then `flags`; validate.

    Raises BadSettings with one line per fault.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise BadSettings(f"{path}: {error}") from error
        if not isinstance(raw, dict):
            raise BadSettings(f"{path}: expected a mapping of sections")
    for keys, value in _overrides(kind, environ):
        _lay(raw, keys, value)
    raw.update(flags or {})
    return parse(kind, raw, origin=str(path or "configuration"))


def parse(kind: type[S], raw: Mapping[str, Any], *, origin: str) -> S:
    """Validate a mapping; the error says which keys of which `origin` are wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{origin}: {'.'.join(map(str, fault['loc'])) or '(top)'}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise BadSettings("\n".join(lines)) from error


def example(kind: type[Settings]) -> str:
    """A commented YAML of every field with its default; it loads as it is."""
    return "\n".join(_example_lines(kind, indent=0)) + "\n"


def _overrides(kind: type[Settings], environ: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    for name in sorted(environ):
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        if name.startswith(ENV_PREFIX) and keys[0] in kind.model_fields:
            text = environ[name]
            # A key of digits is still text, and an empty one is not null.
            yield keys, text if _is_text(kind, keys) else yaml.safe_load(text)


def _is_text(kind: type[Settings], keys: list[str]) -> bool:
    field = kind.model_fields.get(keys[0])
    if field is None or len(keys) == 1:
        return field is not None and field.annotation in (str, Path)
    section = _section(field)
    return section is not None and _is_text(section, keys[1:])


def _lay(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = raw.setdefault(key, {})
        if not isinstance(inner, dict):
            raise BadSettings(f"{ENV_PREFIX}{'__'.join(keys).upper()}: {key} is not a section")
        raw = inner
    raw[keys[-1]] = value


def _example_lines(kind: type[Settings], indent: int) -> Iterator[str]:
    pad = "  " * indent
    for name, field in kind.model_fields.items():
        for line in (field.description or "").splitlines():
            yield f"{pad}# {line}".rstrip()
        section = _section(field)
        if section is not None:
            yield f"{pad}{name}:"
            yield from _example_lines(section, indent + 1)
        else:
            value = _default(field)
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
            yield f"{pad}{name}: {text.removesuffix('...').strip()}"


def _section(field: FieldInfo) -> type[Settings] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        example_value = (field.examples or [None])[0]
        return example_value
    value = field.get_default(call_default_factory=True)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
