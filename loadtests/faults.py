"""What happens to a fleet while a trace runs: replicas lost, added, drained, slow.

Written as KIND:REPLICA@SECONDS, and for `slow` with the factor behind: `lost:replica-2@30`,
`added:replica-6@40`, `drained:replica-1@50`, `slow:replica-3@20:4`. Seconds from the trace's start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast

from shared.ids import ReplicaId

FaultKind = Literal["lost", "added", "drained", "slow"]

_FORM: Final = re.compile(
    r"(?P<kind>lost|added|drained|slow):(?P<replica>[^@]+)@(?P<at>\d+(\.\d+)?)(:(?P<factor>\d+(\.\d+)?))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    replica: ReplicaId
    factor: float = 1.0  # of `slow`: its steps take so many times as long


def parse(text: str) -> Fault:
    """Raises ValueError, saying what the form is."""
    found = _FORM.fullmatch(text)
    if found is None or (found["factor"] is not None) != (found["kind"] == "slow"):
        raise ValueError(
            f"{text!r} is no fault: lost:REPLICA@SECONDS, added:…, drained:…, slow:…@SECONDS:FACTOR"
        )
    kind = cast(FaultKind, found["kind"])
    return Fault(float(found["at"]), kind, ReplicaId(found["replica"]), float(found["factor"] or 1))
