"""Convert: other people's traces and logs into ours.

A format is known by the fields of its first row. What a source does not say (tenant, adapter,
session) is drawn: popularity over `adapters`, one draw a session, else one a row, from a seed of
its own. Times begin at zero and rows are sorted. Sources and their columns: Azure LLM inference
2023 (Patel et al., Splitwise, ISCA 2024), Mooncake (FAST 2025), ServeGen (Alibaba), Chatbot Arena
as VTC resampled it (OSDI 2024), a vLLM- or OpenAI-style access log, and `loraplex usage`'s records.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson

from loadtests.popularity import Popularity, shares
from loadtests.trace import Arrival, BadTrace, Trace
from shared.ids import AdapterId, TenantId

Fields = Mapping[str, Any]
_ROWS_MAX: Final = 20_000_000
_BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Format:
    """How one kind of source is recognised and read. Raises KeyError, TypeError, ValueError."""

    name: str
    marks: frozenset[str]  # fields that a row of it has
    at_s: Callable[[Fields], float]
    prompt: str | tuple[str, str]  # a field, or a field inside a field
    output: str | tuple[str, str]
    tenant: str | None = None
    adapter: str | None = None
    session: str | None = None
    quantum_s: float = 0.0  # arrivals were rounded to this: they are spread over it again


def _field(name: str, per_s: float = 1.0) -> Callable[[Fields], float]:
    return lambda row: float(row[name]) / per_s


def _stamp(name: str) -> Callable[[Fields], float]:
    def at_s(row: Fields) -> float:
        value = row[name]
        if isinstance(value, int | float):
            return float(value)
        return datetime.fromisoformat(str(value)[:26].rstrip("Z")).timestamp()

    return at_s


_ARRIVAL: Final = _field("arrival_s")
FORMATS: Final = (
    Format("replay", frozenset({"arrival_s", "tenant_id", "adapter_id"}), _ARRIVAL,
           "input_tokens", "output_tokens", "tenant_id", "adapter_id", "session_id"),
    Format("arena", frozenset({"arrival_s", "adapter_id"}), _ARRIVAL,
           "input_tokens", "output_tokens", None, "adapter_id"),
    Format("servegen", frozenset({"arrival_s", "client_id"}), _ARRIVAL,
           "input_tokens", "output_tokens", "client_id", "client_id"),
    Format("azure", frozenset({"arrival_s", "input_tokens"}), _ARRIVAL,
           "input_tokens", "output_tokens"),
    Format("azure-original", frozenset({"TIMESTAMP", "ContextTokens"}), _stamp("TIMESTAMP"),
           "ContextTokens", "GeneratedTokens"),
    Format("mooncake", frozenset({"timestamp", "input_length"}), _field("timestamp", 1000),
           "input_length", "output_length", quantum_s=3.0),
    Format("ledger", frozenset({"at", "tenant", "prompt_tokens"}), _stamp("at"),
           "prompt_tokens", "completion_tokens", "tenant", "adapter"),
    Format("access-log", frozenset({"model", "usage"}), _stamp("created"),
           ("usage", "prompt_tokens"), ("usage", "completion_tokens"), "user", "model"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is done to the rows on the way."""

    adapters: int = 100  # drawn where the source names none
    tenants: int = 10
    popularity: Popularity = Popularity.ZIPF
    skew: float | None = 1.1
    seed: int = 1
    base: str | None = None  # this model is the base, not an adapter
    start_s: float = 0.0  # the slice of the source that is kept
    duration_s: float | None = None
    speed: float = 1.0  # times are divided by it
    prompt_scale: float = 1.0  # token counts are multiplied, for a model smaller than the source's
    output_scale: float = 1.0
    tokens_max: int = 1 << 20  # of a prompt, and of an output

    def __post_init__(self) -> None:
        if self.adapters < 1 or self.tenants < 1 or self.tokens_max < 1:
            raise ValueError("adapters, tenants and tokens_max: at least 1")
        if min(self.speed, self.prompt_scale, self.output_scale) <= 0:
            raise ValueError("speed and the scales of tokens are above 0")


def convert(path: Path, how: Conversion, *, form: str | None = None) -> Trace:
    """Raises BadTrace that names the file and the line."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise BadTrace(f"{path}: no rows")
    known = _recognise(path, first[1], form)
    dice = Random(how.seed)
    fill = _Fill(how, dice)
    arrivals: list[Arrival] = []
    for number, row in (first, *rows):
        try:
            arrivals.append(fill(_arrival(known, row, dice)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else error
            raise BadTrace(f"{path}:{number}: as {known.name}: {what}") from error
        if len(arrivals) > _ROWS_MAX:
            raise BadTrace(f"{path}: more than {_ROWS_MAX:,} rows; convert a part of it")
    arrivals.sort(key=lambda row: row.at_s)
    return tuple(_scaled(arrivals, how))


def _recognise(path: Path, row: Fields, form: str | None) -> Format:
    names = ", ".join(known.name for known in FORMATS)
    for known in FORMATS:
        if known.name == form or (form is None and known.marks <= row.keys()):
            return known
    if form is not None:
        raise BadTrace(f"no format {form}; there are {names}")
    raise BadTrace(
        f"{path}: a row with {', '.join(sorted(row))} is of no format known here: {names}"
    )


def _arrival(known: Format, row: Fields, dice: Random) -> Arrival:
    jitter = dice.random() * known.quantum_s if known.quantum_s else 0.0
    return Arrival(
        at_s=known.at_s(row) + jitter,
        tenant=TenantId(_name(row, known.tenant) or ""),
        adapter=AdapterId(name) if (name := _name(row, known.adapter)) else None,
        prompt_tokens=_count(row, known.prompt),
        output_tokens=_count(row, known.output),
        session=_name(row, known.session),
    )


def _name(row: Fields, field: str | None) -> str | None:
    value = None if field is None else row.get(field)
    return None if value is None or value == "" else str(value)


def _count(row: Fields, field: str | tuple[str, str]) -> int:
    value = row[field] if isinstance(field, str) else row[field[0]][field[1]]
    return max(int(value), 1)


class _Fill:
    """Names what the source leaves open: the adapter by popularity, the tenant that owns it."""

    def __init__(self, how: Conversion, dice: Random) -> None:
        self._how = how
        self._dice = dice
        self._ranks = list(accumulate(shares(how.popularity, how.adapters, how.skew)))
        self._sessions: dict[str, int] = {}

    def __call__(self, row: Arrival) -> Arrival:
        how = self._how
        if row.adapter is None:
            number = self._draw(row.session)
            width = len(str(how.adapters - 1))
            row = replace(row, adapter=AdapterId(f"adapter-{number:0{width}d}"))
        owner = zlib.crc32(str(row.adapter).encode()) % how.tenants
        tenant = row.tenant or TenantId(f"tenant-{owner}")
        adapter = None if row.adapter == how.base else row.adapter
        return replace(row, tenant=tenant, adapter=adapter)

    def _draw(self, session: str | None) -> int:
        if session is not None and session in self._sessions:
            return self._sessions[session]
        drawn = bisect_left(self._ranks, self._dice.random())
        number = min(drawn, self._how.adapters - 1)
        if session is not None:
            self._sessions[session] = number
        return number


def _scaled(arrivals: list[Arrival], how: Conversion) -> Iterator[Arrival]:
    begin = arrivals[0].at_s + how.start_s
    end = float("inf") if how.duration_s is None else begin + how.duration_s
    for row in arrivals:
        if begin <= row.at_s < end:
            prompt, output = row.prompt_tokens * how.prompt_scale, row.output_tokens
            yield replace(
                row,
                at_s=round((row.at_s - begin) / how.speed, 6),
                prompt_tokens=min(max(round(prompt), 1), how.tokens_max),
                output_tokens=min(max(round(output * how.output_scale), 1), how.tokens_max),
            )


def _rows(path: Path) -> Iterator[tuple[int, Fields]]:
    """Line number and fields; CSV with a header, JSON lines or one JSON array; gzip or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_BYTES_MAX)
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(f"{path}: {error}") from error
    head = data[:1024].lstrip()
    if head[:1] == b"[":
        yield from enumerate(_objects(path, 1, data, list), start=1)
    elif head[:1] == b"{":
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield number, _objects(path, number, line, dict)
    else:
        text = io.StringIO(data.decode("utf-8", errors="replace"), newline=None)
        try:
            yield from enumerate(csv.DictReader(text, restkey="(more)"), start=2)
        except csv.Error as error:
            raise BadTrace(f"{path}: {error}") from error


def _objects(path: Path, number: int, data: bytes, kind: type) -> Any:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadTrace(f"{path}:{number}: not JSON: {error}") from error
    inner: Iterable[Any] = value if kind is list else [value]
    if not all(isinstance(one, dict) for one in inner):
        raise BadTrace(f"{path}:{number}: rows are objects")
    return value
