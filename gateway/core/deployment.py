"""What one server is to be given next, so that it holds what is wanted: a reconciler's decisions.

Law: what the server lists is what it holds, whatever a call was answered. What is wanted and not
listed is loaded, at most `parallel` at a time and one call a name, again after `first_s`, then
twice as long, at most `most_s`; after `attempts` in a row it is left alone, until the server begins
a new life or the wish changes. What is to leave is unloaded in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

UNLISTED = "it said that it was done, and its list does not show it"


class Step(NamedTuple):
    name: str  # the server's own
    load: bool  # else unload


@dataclass(slots=True)
class _Tries:
    made: int = 0
    again_at: float = 0.0
    why: str = ""


class Deployment:
    """Of one server."""

    def __init__(
        self,
        *,
        parallel: int = 2,
        attempts: int = 8,
        first_s: float = 1.0,
        most_s: float = 60.0,
    ) -> None:
        self._parallel = parallel
        self._attempts = attempts
        self._first_s = first_s
        self._most_s = most_s
        self._tries: dict[Step, _Tries] = {}
        self._under_way: set[Step] = set()

    def due(
        self, wanted: Iterable[str], leaving: Iterable[str], held: Collection[str], now: float
    ) -> list[Step]:
        """Begin these, and tell each one's end. `leaving`: of what is held, what may go now."""
        steps = [Step(name, load=True) for name in wanted if name not in held]
        steps += [Step(name, load=False) for name in leaving if name in held]
        due = set(steps)
        self._tries = {step: one for step, one in self._tries.items() if step in due}
        busy = {step.name for step in self._under_way}
        begun: list[Step] = []
        for step in steps:
            if len(self._under_way) >= self._parallel:
                break
            tries = self._tries.setdefault(step, _Tries())
            if step.name in busy or tries.made >= self._attempts or now < tries.again_at:
                continue
            busy.add(step.name)
            self._under_way.add(step)
            begun.append(step)
        return begun

    def ended(self, step: Step, why: str, now: float) -> None:
        """`why`: it was not done; "" when the server says that it was."""
        self._under_way.discard(step)
        tries = self._tries.setdefault(step, _Tries())
        tries.made += 1
        tries.why = why or UNLISTED
        tries.again_at = now + min(self._most_s, self._first_s * 2.0 ** (tries.made - 1))

    def restarted(self) -> None:
        """The server was away: it has lost what it had, and what it refused it may take now."""
        self._tries.clear()

    def refused(self) -> Mapping[str, str]:
        """Of each load that has not come about: why the last attempt did not."""
        return {s.name: one.why for s, one in self._tries.items() if s.load and one.why}
