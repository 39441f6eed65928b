"""Outcome: how one arrival of a replayed trace went; and a run's outcomes as a file.

Times are seconds from when the request was due, which is what the trace promised its sender, and
not from when the generator got round to it: that delay is `late_s`, and counts against the run.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import orjson

from loadtests.trace import BadTrace

REPLICA: Final = "x-loraplex-replica"
PLACEMENT: Final = "x-loraplex-placement"
QUEUE_MS: Final = "x-loraplex-queue-ms"


@dataclass(slots=True)
class Outcome:
    number: int  # row of the trace
    due_s: float  # from the start of the run
    tenant: str
    adapter: str  # the model that was asked for
    late_s: float = 0.0
    first_s: float | None = None  # the first event with text
    itl_s: float | None = None  # mean gap between events with text
    total_s: float = 0.0
    events: int = 0
    completion_tokens: int | None = None
    status: int = 0  # HTTP; 0: no answer
    failure: str = ""  # empty: answered in full
    replica: str = ""
    placement: str = ""  # home, warm, spill, cold
    queue_ms: float | None = None

    def take_headers(self, headers: Mapping[str, str]) -> None:
        """What the gateway says of the way it went."""
        self.replica = headers.get(REPLICA, "")
        self.placement = headers.get(PLACEMENT, "")
        queue = headers.get(QUEUE_MS, "")
        self.queue_ms = float(queue) if queue else None

    def take_event(self, event: bytes, at_s: float) -> bool:
        """Count one SSE event that came `at_s` after the request was due; True when it is the end.

        The first and the latest event with text give TTFT and the mean gap.
        """
        if not event.startswith(b"data:"):
            return False  # a comment that keeps the connection open
        data = event[5:].strip()
        if data == b"[DONE]":
            self.failure = ""
            return True
        chunk = orjson.loads(data)
        if "error" in chunk:
            self.failure = f"error in the stream: {chunk['error'].get('message')}"
            return True
        if usage := chunk.get("usage"):
            self.completion_tokens = usage.get("completion_tokens")
        if any(_text(choice) for choice in chunk.get("choices", ())):
            self.events += 1
            if self.first_s is None:
                self.first_s = at_s
            else:
                self.itl_s = (at_s - self.first_s) / (self.events - 1)
        return False


def _text(choice: Mapping[str, Any]) -> str | None:
    delta = choice.get("delta")
    return delta.get("content") if delta else choice.get("text")


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """JSON lines."""
    rows = (orjson.dumps(asdict(row), option=orjson.OPT_APPEND_NEWLINE) for row in outcomes)
    path.write_bytes(b"".join(rows))


def read(path: Path) -> tuple[Outcome, ...]:
    """Raises BadTrace that names the file and the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
    rows: list[Outcome] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(Outcome(**orjson.loads(line)))
        except (TypeError, orjson.JSONDecodeError) as error:
            raise BadTrace(f"{path}:{number}: not an outcome: {error}") from error
    return tuple(rows)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    out = io.StringIO()
    names = [field.name for field in fields(Outcome)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in outcomes)
    return out.getvalue()
