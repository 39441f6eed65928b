"""Quota taken ahead: a small block of a busy tenant's limits, for this gateway to spend by itself.

Why: a call of the store for each request costs the two processes more than routing it. Decided:

- A block is one reservation in the store like any other: one atomic call of the same script over
  all the tenant's limits, at the cost of many requests. A request is granted out of a block only,
  never on a guess, so however many gateways there are, together they grant what the store has let
  go and no more. What is new is that a grant may come later than its reservation, by at most two
  lives of a block. So in any t seconds at most burst + rate * (t + 2 * LIFE_S) is granted.
- Blocks are for who is busy and far from every limit: at most SHARE of each, and only while FAR of
  it is left. Nearer, every request asks the store, so a refusal and its wait are as exact as ever.
  The rests in other gateways' hands can make a refusal come early by SHARE of the limit each, and
  for LIFE_S at most.
- A rest that is not spent in LIFE_S goes back; that of a gateway which was killed has refilled
  after 60 s * SHARE.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.limits import Answer, Line, answer_of
from gateway.store.redis import Store, StoreAway, Word
from gateway.tenants import Limits, Tenant, bucket_key
from shared.clock import Clock
from shared.ids import TenantId

LIFE_S: Final = 0.5
SHARE: Final = 0.01  # of a limit, at most
FAR: Final = 0.5  # of a limit, at least, must be left
LEAST: Final = 8  # requests: a smaller block is not worth its bookkeeping
MOST: Final = 256
_BUSY: Final = 4  # requests in LIFE_S
_ROOM: Final = 1.25  # requests differ: tokens of a block over those of as many average ones
_UNLIMITED: Final = Answer((), ())

Saw = Callable[[Tenant, Answer, float], None]
GiveBack = Callable[[Tenant, Line], None]


@dataclass(slots=True)
class _Block:
    """What one tenant has ahead. First in, first out: the rest of one block is spent before the
    next, which is asked for when half is spent."""

    tenant: Tenant
    since: float  # the last block came; before any came: its requests are counted
    seen: int = 0  # requests that had to ask the store since then
    each: float = 1.0  # tokens a request costs, lately
    size: int = LEAST  # requests of the next block
    asked: bool = False  # for one that has not come
    requests: int = 0
    tokens: float = 0.0
    levels: Sequence[float] = field(default_factory=tuple)  # in the store, beside what we hold


class Ahead:
    def __init__(self, store: Store, *, saw: Saw, give_back: GiveBack, clock: Clock) -> None:
        """`saw` is told the store's answers; `give_back` takes a rest (its costs are negative)."""
        self._store = store
        self._saw = saw
        self._give_back = give_back
        self._clock = clock
        self._blocks: dict[TenantId, _Block] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, tenant: Tenant, tokens: int) -> Answer | None:
        """One request of so many tokens, or None: the store has to be asked."""
        limits = tenant.limits
        block = self._blocks.get(tenant.id)
        if block is None or not block.requests:
            free = limits.requests_per_min is None and limits.tokens_per_min is None
            return _UNLIMITED if free else None
        if limits.tokens_per_min is not None and tokens > limits.tokens_per_min:
            tokens = limits.tokens_per_min
        age_s = self._clock() - block.since
        if tokens > block.tokens or age_s > LIFE_S or limits != block.tenant.limits:
            return None
        block.requests -= 1
        block.tokens -= tokens
        block.each += (tokens - block.each) / 8
        if not block.asked and (2 * block.requests < block.size or block.tokens < 4 * block.each):
            if age_s < LIFE_S / 2:
                block.size = min(2 * block.size, MOST)
            self._want(block)
        return _answer(block, limits, tokens)

    def put_back(self, tenant: Tenant, answer: Answer) -> None:
        """What `take` gave was not needed after all."""
        block = self._blocks.get(tenant.id)
        if block is not None and answer.lines:
            block.requests += 1
            block.tokens += _tokens(answer.lines)

    def saw(self, tenant: Tenant, answer: Answer) -> None:
        """The store has granted one request by itself."""
        now = self._clock()
        block = self._blocks.get(tenant.id)
        if block is None or block.tenant.limits != tenant.limits:
            self._drop(block)
            block = self._blocks[tenant.id] = _Block(tenant, now)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LIFE_S, self.expire)
        block.seen += 1
        block.each = max(block.each, _tokens(answer.lines))
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
        lines = _cost(block.tenant.limits, block.size, block.each)
        if not lines:
            return
        block.asked = True
        words: list[Word] = [""]
        for line in lines:
            words += (line.name, line.limit, line.cost)
        came = partial(self._came, block.tenant, lines)
        self._store.ask("reserve", [bucket_key(block.tenant.id)], words, came)

    def _came(self, tenant: Tenant, lines: Sequence[Line], reply: list[bytes] | StoreAway) -> None:
        block = self._blocks.get(tenant.id)
        if block is not None and block.tenant is tenant:
            block.asked, block.seen = False, 0
        if isinstance(reply, StoreAway):
            return
        answer = answer_of(lines, reply)
        self._saw(tenant, answer, self._clock())
        if answer.refuses is not None:
            return
        if block is None or block.tenant is not tenant or not _far(answer):
            for line in answer.lines:
                self._give_back(tenant, line)
            return
        first, last = answer.lines[0], answer.lines[-1]
        block.requests += first.cost if first.name == "requests" else block.size
        block.tokens = block.tokens + last.cost if last.name == "tokens" else math.inf
        block.levels, block.since = answer.levels, self._clock()

    def _drop(self, block: _Block | None) -> None:
        if block is None:
            return
        del self._blocks[block.tenant.id]
        for line in _lines(block.tenant.limits, block.requests, block.tokens):
            self._give_back(block.tenant, line)


def _cost(limits: Limits, requests: int, each: float) -> Sequence[Line]:
    """Of a block for about so many requests; none, when SHARE of a limit is too little for one."""
    tokens = requests * each * _ROOM
    if limits.requests_per_min is not None:
        requests = min(requests, int(limits.requests_per_min * SHARE))
    if limits.tokens_per_min is not None:
        tokens = min(tokens, int(limits.tokens_per_min * SHARE))
    return _lines(limits, requests, tokens) if requests >= LEAST and tokens >= LEAST * each else ()


def _lines(limits: Limits, requests: int, tokens: float) -> list[Line]:
    lines = []
    if limits.requests_per_min is not None:
        lines.append(Line("requests", limits.requests_per_min, requests))
    if limits.tokens_per_min is not None:
        lines.append(Line("tokens", limits.tokens_per_min, int(tokens)))
    return lines


def _answer(block: _Block, limits: Limits, tokens: int) -> Answer:
    """As the store would say it: what it has left and what we hold is the tenant's."""
    if limits.tokens_per_min is None:
        assert limits.requests_per_min is not None
        lines = (Line("requests", limits.requests_per_min, 1),)
        return Answer(lines, (block.levels[0] + block.requests,))
    used = Line("tokens", limits.tokens_per_min, tokens)
    if limits.requests_per_min is None:
        return Answer((used,), (block.levels[0] + block.tokens,))
    one = Line("requests", limits.requests_per_min, 1)
    levels = (block.levels[0] + block.requests, block.levels[1] + block.tokens)
    return Answer((one, used), levels)


def _far(answer: Answer) -> bool:
    levels = zip(answer.lines, answer.levels, strict=True)
    return all(level >= FAR * line.limit for line, level in levels)


def _tokens(lines: Sequence[Line]) -> int:
    return lines[-1].cost if lines[-1].name == "tokens" else 0
