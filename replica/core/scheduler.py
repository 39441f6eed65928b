"""Scheduler: which sequences compute what in the next forward pass.

Continuous batching with chunked prefill: every plan takes one token of each decoding sequence, then
chunks of prompts, oldest first, then admits from the waiting, oldest first. Laws:

- A step has at most `max_step_tokens` tokens and `max_running` rows, and only slots that are
  resident and held by the row's sequence. Rows of one slot are adjacent.
- While somebody decodes, prompts lengthen a step to about `mixed_step_ratio` times its time.
- Every sequence ends. Order is by arrival and never changes: when pages run out and idle adapters
  have left (`room.py`) the newest gives way, back to the front of the waiting, its output and its
  slot kept, its pages freed (preemption by recompute). So the oldest always moves on.
- A sequence waits for pages in line: no younger one slips in. It waits for its adapter, and for a
  prompt that another is just computing (`sharing.py`), aside: younger ones pass. The base waits for
  no adapter.
- An adapter gets a slot within `adapter_wait_s` plus what `turns.py` shows to be finite.
- However a sequence ends, its pages and its lease are given back in that moment, once.

Protocol, all on one thread: `plan`, run the step, `commit` it; `add` and `abort` may fall anywhere
between, and `collect` follows each `plan`. A plan that is not committed only moves pages: after a
crash abort the culprits and plan again. A driver whose device works on its own plans the next step
between `advance`, as one gets under way, and `settle`, as its tokens are known: the halves of
`commit`. What that one computes for a sequence that ends in the first is void.

Costs: plan and commit are O(running + adapters that wait). The shell bounds how many may wait.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from operator import attrgetter

from replica.core.adapter_cache import AdapterCache
from replica.core.audit import audit
from replica.core.live import Live, tokens_left
from replica.core.pages import PagePool
from replica.core.sequence import Finish, Sequence
from replica.core.sharing import Sharing
from replica.core.step import Progress, Row, Step
from replica.core.step_times import StepTimes
from replica.core.turns import Turns
from replica.core.waiting_line import WaitingLine
from shared.ids import AdapterId

__all__ = ["Progress", "Row", "Scheduler", "Step"]


class Scheduler:
    """`max_model_len` is the longest sequence that fits both the model and the pool."""

    def __init__(
        self,
        *,
        pool: PagePool,
        cache: AdapterCache,
        max_running: int,
        max_step_tokens: int,
        eos_ids: frozenset[int],
        max_model_len: int,
        adapter_wait_s: float = 0.5,
        mixed_step_ratio: float | None = None,
    ) -> None:
        if max_running < 1 or max_step_tokens < max_running:
            raise ValueError(
                f"raise max_step_tokens ({max_step_tokens}) to max_running ({max_running}), >= 1"
            )
        self.max_model_len = pool.longest(max_model_len, max_step_tokens, pool.pages)
        self._pool = pool
        self._cache = cache
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._eos_ids = eos_ids
        self.times = StepTimes(ratio=mixed_step_ratio)
        self._turns = Turns(wait_s=adapter_wait_s)
        self._sharing = Sharing(pool=pool, step_tokens=max_step_tokens)
        self._live: dict[str, Live] = {}
        self._running: list[Live] = []  # by order
        self._line = WaitingLine()
        self._ended: list[Progress] = []
        self._planned: Step | None = None
        self._under_way: deque[tuple[Step, list[tuple[Live, Row]]]] = deque()
        self._arrivals = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._live) - len(self._running)

    def waiting_adapters(self) -> tuple[AdapterId, ...]:
        return tuple(sorted({e.seq.adapter for e in self._line if e.seq.adapter is not None}))

    def next_wakeup(self, now: float) -> float | None:
        """`now` when a plan would do something; None when only an event can bring work."""
        if self._running or self._line.preempted or self._ended:
            return now
        ready = (
            adapter is None
            or self._cache.slot_of(adapter) is not None
            or self._cache.refusal(adapter) is not None
            for adapter in self._line.adapters()
        )
        return now if any(ready) else None

    def add(self, seq: Sequence, now: float) -> None:
        """Queue a new sequence. Raises ValueError, with what to do, when it can never run."""
        if seq.id in self._live:
            raise ValueError(f"sequence {seq.id!r} is here already: give each an id of its own")
        seq.require_fit(self.max_model_len)
        self._arrivals += 1
        longest = min(len(seq.prompt) + seq.sampling.max_tokens, self.max_model_len)
        entry = Live(seq, self._arrivals, now, len(seq), longest)
        self._live[seq.id] = entry
        self._line.push(entry)
        if seq.adapter is not None:
            self._cache.want(seq.adapter, seq.id, now)

    def abort(self, seq_id: str, finish: Finish = Finish.ABORT, now: float = 0.0) -> bool:
        """End it wherever it is, without Progress; False when it is not here any more."""
        entry = self._live.get(seq_id)
        if entry is None:
            return False
        leave = self._running.remove if entry.table.pages else self._line.remove
        leave(entry)
        self._end(entry, finish, now)
        return True

    def collect(self) -> list[Progress]:
        """Ends that no step brought: their adapter failed or left while they waited."""
        return [self._ended.pop(0) for _ in tuple(self._ended)]

    def plan(self, now: float) -> Step | None:
        """The next step; None when nothing can run before an event."""
        self._pool.headroom = len(self._running)
        self._end_refused(now)
        rows: list[Row] = []
        preempted = self._decode(rows)
        decode = bool(rows) or any(e.waits and e.length < e.length_max for e in self._running)
        budget = self.times.limit(self._max_step_tokens - len(rows), decode=decode, now=now)
        if len(rows) < len(self._running):
            budget = self._prefill(rows, budget)
        if not preempted and self.waiting:
            self._admit(rows, budget, now)
        rows.sort(key=attrgetter("slot"))
        self._planned = Step(tuple(rows)) if rows else None
        return self._planned

    def _end_refused(self, now: float) -> None:
        for adapter in self._line.adapters():
            if adapter is not None and (reason := self._cache.refusal(adapter)) is not None:
                for entry in self._line.clear(adapter):
                    self._end(entry, Finish.ERROR, now)
                    self._ended.append(Progress(entry.seq.id, None, Finish.ERROR, reason))

    def _decode(self, rows: list[Row]) -> bool:
        """Pages for all who run, and a row for each with one token to feed; whether any of them was
        preempted for it."""
        preempted, at = False, 0
        while at < len(self._running):
            entry, at = self._running[at], at + 1
            if entry.waits:
                continue
            while lacking := self._sharing.cover(entry):
                if not self._cache.make_room(lacking):
                    preempted = True
                    if self._preempt_newest() is entry:
                        return True
            if entry.to_feed == 1:
                rows.append(entry.row(1))
        return preempted

    def _preempt_newest(self) -> Live:
        entry = self._running.pop()
        self._sharing.end(entry)
        entry.seq.preemptions += 1
        self._line.push_front(entry)
        return entry

    def _prefill(self, rows: list[Row], budget: int) -> int:
        """A chunk for each sequence with more tokens to feed; what is left of the budget."""
        for entry in self._running:
            if entry.to_feed > 1 and budget > 0:
                tokens = min(entry.to_feed, budget)
                rows.append(entry.row(tokens))
                budget -= tokens
        return budget

    def _admit(self, rows: list[Row], budget: int, now: float) -> None:
        """Start who waits while there are places, tokens and pages."""
        self._turns.update(
            self._cache, lambda: tokens_left((*self._running, *self._line.preempted)), now
        )
        if budget <= 0 or len(self._running) >= self._max_running:
            return
        for entry in self._line.candidates(self._may_start):
            if entry.pending or not self._take_pages(entry):
                return
            self._start(entry, now)
            tokens = min(entry.to_feed, budget)
            rows.append(entry.row(tokens))
            budget -= tokens
            if budget <= 0 or len(self._running) >= self._max_running:
                return

    def _may_start(self, entry: Live) -> bool:
        slot = self._slot_for(entry)
        if slot is None or self._turns.closed(slot, entry.queued_at):
            return False
        return not self._sharing.waits(entry, self._cache.digest_in(slot))

    def _slot_for(self, entry: Live) -> int | None:
        """Where it would run; None when its adapter is not there."""
        if entry.admitted or entry.seq.adapter is None:
            return entry.slot
        return self._cache.slot_of(entry.seq.adapter)

    def _take_pages(self, entry: Live) -> bool:
        """All it needs now, and one is left for each that runs: else it would not stay long."""
        slot, running = self._slot_for(entry), len(self._running)
        assert slot is not None, "it may start"
        return self._sharing.begin(
            entry,
            self._cache.digest_in(slot),
            lambda missing: self._cache.make_room(missing + running, keep=slot),
        )

    def _start(self, entry: Live, now: float) -> None:
        self._line.remove(entry)
        insort(self._running, entry, key=attrgetter("order"))
        if entry.admitted:
            return
        entry.admitted = True
        seq = entry.seq
        seq.admitted_at, seq.cached = now, seq.computed
        if seq.adapter is not None:
            slot = self._cache.acquire(seq.adapter, seq.id, now)
            assert slot is not None, f"{seq.adapter!r} was resident a moment ago"
            entry.slot = slot
            seq.digest = self._cache.digest_in(slot)

    def commit(self, step: Step, tokens: Mapping[str, int], now: float) -> list[Progress]:
        """Take in what the step drew. A sequence whose token is missing ends with ERROR."""
        self.advance(step)
        return self.settle(step, tokens, now)

    def advance(self, step: Step) -> None:
        """The step is under way: plan as if it were done, and its tokens drawn."""
        if step is not self._planned:
            raise ValueError("commit the step that the last plan gave, once")
        self._planned = None
        entries = []
        for row in step.rows:
            entry = self._live.get(row.seq)
            if entry is not None and entry.table.pages:  # else aborted since
                entry.advance(row)
                entries.append((entry, row))
        self._under_way.append((step, entries))
        self.times.begin()

    def settle(self, step: Step, tokens: Mapping[str, int], now: float) -> list[Progress]:
        """Take in what the oldest step under way drew, as `commit` does."""
        if not self._under_way or step is not self._under_way[0][0]:
            raise ValueError("settle the steps under way in the order they were planned, once")
        self.times.end(step, now)
        progress = []
        for entry, row in self._under_way.popleft()[1]:
            if entry.seq.finish is None:
                self._sharing.publish(entry, row.end)
                if row.samples:
                    progress.append(self._draw(entry, tokens.get(row.seq), now))
        if any(item.finish is not None for item in progress):
            self._running = [entry for entry in self._running if entry.seq.finish is None]
        return progress

    def _draw(self, entry: Live, token: int | None, now: float) -> Progress:
        finish = Finish.ERROR if token is None else entry.take(token, self._eos_ids)
        reason = "the engine drew no token for this sequence" if token is None else ""
        if finish is not None:
            if not entry.table.pages:  # preempted since
                self._line.remove(entry)
            self._end(entry, finish, now)
        return Progress(entry.seq.id, token, finish, reason)

    def _end(self, entry: Live, finish: Finish, now: float) -> None:
        """The one exit: whoever calls has taken it out of running or line, or does so at once."""
        seq = entry.seq
        del self._live[seq.id]
        self._sharing.end(entry, distrust=finish is Finish.ERROR)
        self._cache.release(seq.id)
        seq.finish, seq.ended_at = finish, now

    def check(self) -> None:
        self._cache.check()
        self._line.check()
        self._sharing.check(self._running)
        assert len(self._running) <= self._max_running
        audit(self._running, list(self._line), self._live, pool=self._pool, cache=self._cache)
