"""One record a finished request: what it says, and how the store is told of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import orjson

from gateway.store.redis import Word
from shared.ids import ReplicaId, RequestId, TenantId

HOUR_S: Final = 3600
HOURS_MAX: Final = 24 * 93
"""Hours that one usage question may span, and for how long hours are kept."""

STREAM: Final = "records"
STREAM_MAX: Final = 200_000
"""Records kept one by one; older ones are in the sums of their hours alone."""

_VERSION_CHARS: Final = 12
_MARK_S: Final = 86_400  # a record that comes again later than this would count twice

Outcome = Literal["ok", "cut", "failed", "refused"]
OUTCOMES: Final[tuple[str, ...]] = get_args(Outcome)
"""ok: the reply is complete. cut: the client left. failed: we could not finish it. refused: it
never reached a replica."""


@dataclass  # not frozen and no slots: made and encoded a request, at a third of the cost
class Record:
    request: RequestId
    tenant: TenantId
    adapter: str  # or the base's name
    digest: str  # the adapter's version; "" for the base
    replica: ReplicaId | Literal[""]  # "" when none was reached
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float
    outcome: Outcome
    estimated: bool  # the tokens were counted by us, not by the engine
    at: float  # wall seconds when it finished
    spend: int = 0  # nano-units of money, by the price of that moment
    boot: str = ""  # which life of the replica it was; "" when it is not known


class Entry(NamedTuple):
    """A line of the spool, as the store takes it."""

    hour: int
    request: str
    line: bytes
    sums: dict[tuple[str, str], int]  # by key and field


def entry_of(line: bytes) -> Entry:
    record = orjson.loads(line)
    version = record["digest"].removeprefix("sha256:")[:_VERSION_CHARS]
    who = orjson.dumps([record["tenant"], record["adapter"], version, record["replica"]]).decode()
    counts = {
        "requests": 1,
        "prompt_tokens": record["prompt_tokens"],
        "cached_tokens": record["cached_tokens"],
        "completion_tokens": record["completion_tokens"],
        "estimated": int(record["estimated"]),
        "spend": record.get("spend", 0),
        record["outcome"]: 1,
    }
    hour = int(record["at"] // HOUR_S)
    # an absent field is a zero that takes no memory
    sums = {(hour_key(hour), f"{name} {who}"): count for name, count in counts.items() if count}
    if record.get("boot"):
        key = boot_key(record["replica"], record["boot"])
        part = "estimated" if record["estimated"] else "counted"
        sums[key, f"{part}_requests"] = 1
        sums[key, f"{part}_tokens"] = record["completion_tokens"]
    return Entry(hour, record["request"], line, sums)


def script_call(entries: Sequence[Entry]) -> tuple[list[str], list[Word]]:
    """One call for entries of one hour: a busy second has many requests, and few adapters."""
    sums: dict[tuple[str, str], int] = {}
    for entry in entries:
        for where, count in entry.sums.items():
            sums[where] = sums.get(where, 0) + count
    words: list[Word] = [_MARK_S, STREAM_MAX, HOURS_MAX * HOUR_S, len(entries)]
    words += [entry.request for entry in entries]
    words += [entry.line for entry in entries]
    keys = {STREAM: 1, f"recorded:{entries[0].hour}": 2}
    for (key, field), count in sums.items():
        words += (keys.setdefault(key, len(keys) + 1), field, count)
    return [*keys], words


def hour_key(hour: int) -> str:
    """Where the store keeps the sums of an hour."""
    return f"usage:{hour}"


def boot_key(replica: str, boot: str) -> str:
    """Where it keeps what one life of a replica was billed for."""
    return f"served:{boot}:{replica}"
