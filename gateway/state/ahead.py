"""Quota taken ahead: a small block of a busy tenant's limits, for this gateway to spend by itself.

Why: a call of the store for each request costs the two processes more than routing it. Decided:

- A block is one reservation in the store like any other: one atomic call of the same script over
  all the tenant's limits, at the cost of many requests. A request is granted out of a block only,
  never on a guess, so however many gateways there are, together they grant what the store has let
  go and no more. What is new is that a grant may come later than its reservation, by at most two
  lives of a block. So in any t seconds at most burst + rate * (t + 2 * LIFE_S) is granted.
- Blocks are for who is busy and far from every limit: at most SHARE of each, and only while FAR of
  it is left. Nearer, every request asks the store, so a refusal and its wait are as exact as ever.
  The next block is asked for when half of one is spent, so the rests in other gateways' hands can
  make a refusal come early by 1.5 * SHARE of the limit each, and for LIFE_S at most. Concurrency
  has leases by name, so who has such a limit asks each time.
- A rest that is not spent in LIFE_S goes back; that of a gateway which was killed has refilled
  after 60 s * SHARE, or is lost to its day's or month's budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.state.limits import Answer, Line, Plan, answer_of
from gateway.store.redis import Store, StoreAway, Word
from shared.clock import Clock
from shared.ids import TenantId

LIFE_S: Final = 0.5
SHARE: Final = 0.01  # of a limit, at most
FAR: Final = 0.5  # of a limit, at least, must be left
LEAST: Final = 8  # requests: a smaller block is not worth its bookkeeping
MOST: Final = 1024  # about what one core does in a quarter of a second
_BUSY: Final = 4  # requests in LIFE_S
_ROOM: Final = 1.25  # requests differ: tokens of a block over those of as many average ones
_UNLIMITED: Final = Answer((), ())
_BLOCK: Final = "block"  # in place of a request's id

Saw = Callable[[Answer, TenantId, float], None]
GiveBack = Callable[[Line, float], None]


@dataclass(slots=True)
class _Block:
    """What one plan has ahead. First in, first out: the rest of one block is spent before the
    next, which is asked for when half is spent."""

    plan: Plan
    since: float  # the last block came; before any came: its requests are counted
    each: list[float]  # what a request costs, lately; a line each
    held: list[float]
    seen: int = 0  # requests that had to ask the store since then
    size: int = LEAST  # requests of the next block, if its SHARE is as much
    brought: tuple[int, Sequence[int]] = (0, ())  # requests and costs of the last one
    asked: bool = False  # for one that has not come
    requests: int = 0
    levels: Sequence[float] = field(default_factory=tuple)  # in the store, beside what we hold


class Ahead:
    def __init__(self, store: Store, *, saw: Saw, give_back: GiveBack, clock: Clock) -> None:
        """`saw` is told the store's answers; `give_back` takes a rest of a limit."""
        self._store = store
        self._saw = saw
        self._give_back = give_back
        self._clock = clock
        self._blocks: dict[Plan, _Block] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, plan: Plan, costs: Sequence[int]) -> Answer | None:
        """One request at these costs, or None: the store has to be asked."""
        if not plan.lines:
            return _UNLIMITED
        block = self._blocks.get(plan)
        if block is None or not block.requests:
            return None
        age_s, held, each = self._clock() - block.since, block.held, block.each
        if age_s > LIFE_S:
            return None
        for at, cost in enumerate(costs):
            if cost > held[at]:
                return None
        block.requests -= 1
        requests, brought = block.brought
        low = 2 * block.requests < requests
        for at, cost in enumerate(costs):
            held[at] -= cost
            each[at] += (cost - each[at]) / 8
            low = low or 2 * held[at] < brought[at]
        if low and not block.asked:
            if age_s < LIFE_S / 2:
                block.size = min(2 * block.size, MOST)
            self._want(block)
        # as the store would say it: what it has left and what we hold is the tenant's
        return Answer(
            plan.lines, [level + ours for level, ours in zip(block.levels, held, strict=True)]
        )

    def put_back(self, plan: Plan, costs: Sequence[int]) -> None:
        """What `take` gave was not needed after all."""
        block = self._blocks.get(plan)
        if block is not None:
            block.requests += 1
            for at, cost in enumerate(costs):
                block.held[at] += cost
        else:
            for line, cost in zip(plan.lines, costs, strict=True):
                self._give_back(line, cost)

    def saw(self, plan: Plan, answer: Answer, costs: Sequence[int]) -> None:
        """The store has granted one request by itself."""
        if not plan.lines or plan.leased:
            return
        block = self._blocks.get(plan)
        if block is None:
            block = _Block(plan, self._clock(), [0.0] * len(costs), [0.0] * len(costs))
            self._blocks[plan] = block
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LIFE_S, self.expire)
        block.seen += 1
        block.each = [max(pair) for pair in zip(block.each, costs, strict=True)]
        if block.seen >= _BUSY and not block.asked and _far(answer):
            self._want(block)

    def expire(self) -> None:
        """Give back what lies for too long; called by its own timer while there is anything."""
        now = self._clock()
        for block in list(self._blocks.values()):
            if now - block.since > LIFE_S and not block.asked:
                self._drop(block)
        self._timer = None
        if self._blocks:
            self._timer = asyncio.get_running_loop().call_later(LIFE_S, self.expire)

    def close(self) -> None:
        for block in list(self._blocks.values()):
            self._drop(block)
        if self._timer is not None:
            self._timer.cancel()

    def _want(self, block: _Block) -> None:
        """None, when SHARE of a limit is too little for LEAST requests."""
        plan, size, costs = block.plan, block.size, list[int]()
        for line, each in zip(plan.lines, block.each, strict=True):
            most = int(line.limit * SHARE)
            if line.name == "requests":
                size = min(size, most)
            elif most < LEAST * each:
                return
            costs.append(min(most, int(block.size * each * _ROOM)))
        if size < LEAST:
            return
        costs = [
            size if line.name == "requests" else cost
            for line, cost in zip(plan.lines, costs, strict=True)
        ]
        block.asked = True
        words: list[Word] = [*plan.words, _BLOCK, *costs]
        self._store.ask("reserve", plan.keys, words, partial(self._came, plan, size, costs))

    def _came(
        self, plan: Plan, size: int, costs: Sequence[int], reply: list[bytes] | StoreAway
    ) -> None:
        block = self._blocks.get(plan)
        if block is not None:
            block.asked, block.seen = False, 0
        if isinstance(reply, StoreAway):
            return
        answer = answer_of(plan.lines, reply)
        self._saw(answer, plan.tenant.id, self._clock())
        if answer.refuses is not None:
            return
        if block is None or not _far(answer):
            for line, cost in zip(plan.lines, costs, strict=True):
                self._give_back(line, cost)
            return
        block.requests += size
        block.brought = (size, costs)
        block.held = [sum(pair) for pair in zip(block.held, costs, strict=True)]
        block.levels, block.since = answer.levels, self._clock()

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.plan]
        for line, rest in zip(block.plan.lines, block.held, strict=True):
            self._give_back(line, rest)


def _far(answer: Answer) -> bool:
    levels = zip(answer.lines, answer.levels, strict=True)
    return all(level >= FAR * line.limit for line, level in levels)
