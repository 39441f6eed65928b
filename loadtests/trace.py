"""A trace: who asked for which adapter, when, and how long it was.

JSON lines, one row an arrival, ordered by `at_s`; an `adapter` of null is the base model. A trace
says what came, never what a server made of it, so the same file is replayed against a fleet
(`locustfile`) and against the cores under virtual time (`simulator`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.ids import AdapterId, TenantId


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds from the start of the trace, and its lengths in tokens."""

    at_s: float
    tenant: TenantId
    adapter: AdapterId | None  # None: the base model
    prompt_tokens: int
    output_tokens: int
    session: str | None = None  # requests of one conversation, in order


Trace = tuple[Arrival, ...]


class BadTrace(ValueError):
    """The text names the line and what was wrong with it."""


def write(trace: Iterable[Arrival], path: Path) -> None:
    path.write_bytes(encode(trace))


def read(path: Path) -> Trace:
    """Raises BadTrace; the message begins with the file and the line."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
    except BadTrace as error:
        raise BadTrace(f"{path}:{error}") from error


def encode(trace: Iterable[Arrival]) -> bytes:
    return b"".join(orjson.dumps(_row(a), option=orjson.OPT_APPEND_NEWLINE) for a in trace)


def _row(arrival: Arrival) -> dict[str, Any]:
    row = asdict(arrival)
    if arrival.session is None:
        del row["session"]
    return row


def decode(data: bytes) -> Trace:
    trace: list[Arrival] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        arrival = _arrival(number, line)
        if trace and arrival.at_s < trace[-1].at_s:
            raise BadTrace(
                f"{number}: at_s: {arrival.at_s} comes after {trace[-1].at_s}: sort the rows"
            )
        trace.append(arrival)
    return tuple(trace)


def _arrival(number: int, line: bytes) -> Arrival:
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadTrace(f"{number}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadTrace(f"{number}: expected an object, got {line[:40]!r}")
    fields = Arrival.__dataclass_fields__
    if unknown := raw.keys() - fields:
        raise BadTrace(
            f"{number}: unknown field {min(unknown)}; the fields are {', '.join(fields)}"
        )
    adapter = raw.get("adapter")
    if adapter is not None and (not isinstance(adapter, str) or not adapter):
        raise BadTrace(f"{number}: adapter: a name, or null for the base; got {adapter!r}")
    tenant = raw.get("tenant")
    if not isinstance(tenant, str) or not tenant:
        raise BadTrace(f"{number}: tenant: a name; got {tenant!r}")
    session = raw.get("session")
    if session is not None and (not isinstance(session, str) or not session):
        raise BadTrace(f"{number}: session: a name, or nothing; got {session!r}")
    at_s = raw.get("at_s")
    if not isinstance(at_s, int | float) or isinstance(at_s, bool) or at_s < 0:
        raise BadTrace(f"{number}: at_s: seconds from the start, at least 0; got {at_s!r}")
    return Arrival(
        at_s=float(at_s),
        tenant=TenantId(tenant),
        adapter=None if adapter is None else AdapterId(adapter),
        prompt_tokens=_count(number, raw, "prompt_tokens"),
        output_tokens=_count(number, raw, "output_tokens"),
        session=session,
    )


def _count(number: int, raw: dict[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadTrace(f"{number}: {field}: a whole number of tokens, at least 1; got {value!r}")
    return value
