"""EngineLoop: the engine thread, and the only place where two threads meet.

The thread owns scheduler, cache, pages, runner and roster: nothing else touches them. Into it goes
work, as functions on one queue (`post`); out of it come three things, each by a call on the asyncio
loop: what a step brought (one call a step, however many sequences), a report, and the end of the
thread if it crashes. Every method but `start`, `post` and `join` runs on the thread.

Laws: every sequence that was added ends, by an event or by `drop`; a disk delays no step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from replica.adapters import Adapters
from replica.canary import Canary
from replica.config import ReplicaConfig
from replica.core.adapter_cache import AdapterCache
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish, Sequence
from replica.core.step import Progress, Step
from replica.draft import Draft
from replica.engine.flight import StepRunner
from replica.engine.sampler import Drawn
from replica.engine.threads import team
from replica.errors import BadRequest
from replica.fault import fault_of
from replica.generation import Event, PromptScores
from replica.load_waits import LoadWaits
from replica.metrics import Metrics
from replica.pipeline import Pipeline
from replica.reports import Reports
from replica.source import Source
from shared.clock import Clock
from shared.ids import AdapterId
from shared.messages import AdapterState, ReplicaReport

_log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.002
"""Before a plan is tried again that found nothing to run."""


class Listener(Protocol):
    """Who hears from the engine, on the asyncio loop."""

    def delivered(self, events: list[Event]) -> None: ...
    def reported(self, report: ReplicaReport, waiting: tuple[AdapterId, ...]) -> None: ...
    def crashed(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that the thread drives. `source` may block and raise: it has its own threads."""

    scheduler: Scheduler
    cache: AdapterCache
    pool: PagePool
    runner: StepRunner
    source: Source
    readers: ThreadPoolExecutor
    downloads: ThreadPoolExecutor


class EngineLoop:
    def __init__(
        self,
        *,
        config: ReplicaConfig,
        engine: Engine,
        metrics: Metrics,
        clock: Clock,
        merged: AdapterState | None = None,
    ) -> None:
        """`merged` is the adapter that the base has become, if it has."""
        self._config = config
        self._scheduler = engine.scheduler
        self._cache = engine.cache
        self._pipeline = Pipeline(
            scheduler=engine.scheduler, runner=engine.runner, clock=clock,
            meanwhile=self._meanwhile, arriving=self._arriving,
        )  # fmt: skip
        self._metrics = metrics
        self._clock = clock
        self._merged = merged
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.adapters = Adapters(
            base_name=config.base_name,
            slots=config.max_loras,
            cache=engine.cache,
            runner=engine.runner,
            canary=Canary(runner=engine.runner, pool=engine.pool),
            source=engine.source,
            readers=engine.readers,
            downloads=engine.downloads,
            post=self.post,
            changed=self._changed,
            metrics=metrics,
            clock=clock,
        )
        self._draft = Draft(
            config=config,
            boot=uuid.uuid4().hex,
            scheduler=engine.scheduler,
            pool=engine.pool,
            cache=engine.cache,
            rates=self.adapters.rates,
            merged=merged,
        )
        self._reports = Reports(
            draft=self.draft,
            publish=self._publish,
            interval_s=config.report_interval_s,
            heartbeat_s=config.heartbeat_s,
        )
        self._live: dict[str, Sequence] = {}
        self._load_waits = LoadWaits(metrics)
        self._blocked = False  # the last plan found nothing, though it was thought to
        self._draining = False
        self._stopping = False
        self._step_began_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread

    def start(self, asyncio_loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._asyncio, self._listener = asyncio_loop, listener
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` between two launches, in order of posting."""
        self._inbox.put(work)

    def join(self, timeout_s: float) -> None:
        """Let the thread end; one that hangs in a step is left behind."""
        self.post(self._stop)
        self._thread.join(timeout_s)

    @property
    def step_age_s(self) -> float:
        """How long the step that runs now has been running; 0 between steps."""
        began_at = self._step_began_at
        return 0.0 if began_at is None else self._clock() - began_at

    # --- work for the thread

    def add(self, sequences: list[Sequence]) -> None:
        refused: list[Event] = []
        for seq in sequences:
            try:
                self._scheduler.add(seq, self._clock())
            except ValueError as error:
                refused.append(Event(seq.id, finish=Finish.ERROR, error=BadRequest(str(error))))
            else:
                self._live[seq.id] = seq
                if seq.adapter is not None:
                    tier = self._cache.tier_of(seq.adapter)
                    self._load_waits.began(seq.id, seq.adapter, tier, self._clock())
        if refused:
            self._tell(lambda: self._listener.delivered(refused))

    def drop(self, seq_id: str) -> None:
        """Nobody waits for it any more; harmless when it has ended."""
        if (seq := self._live.pop(seq_id, None)) is not None:
            self._scheduler.abort(seq_id, Finish.ABORT, self._clock())
            self._load_waits.ended(seq_id)
            self._metrics.ended(Finish.ABORT, len(seq.output))

    def drain(self, on: bool) -> None:
        self._draining = on
        self._reports.tick(self._clock(), urgent=True)

    def draft(self) -> ReplicaReport:
        """The replica as it is; `seq` is for `Reports` to set."""
        return self._draft.report(draining=self._draining)

    # --- the thread's own

    def _run(self) -> None:
        try:
            team(self._config.step_threads)
            while not self._stopping:
                self._take()
                self._work()
        except BaseException as error:
            _log.exception("engine crashed")
            reason = f"{type(error).__name__}: {error}"
            self._tell(lambda: self._listener.crashed(reason))

    def _stop(self) -> None:
        self._stopping = True

    def _take(self) -> None:
        """Everything that came in; with nothing to compute, wait for something to come."""
        now = self._clock()
        wait_s = max(self._reports.due() - now, 0.0)
        wakeup = now if self._pipeline.busy else self._scheduler.next_wakeup(now)
        if self.adapters.loading:  # on its way to the device, which tells nobody
            wait_s = min(wait_s, _PAUSE_S)
        if wakeup is not None:
            wait_s = min(wait_s, max(wakeup - now, _PAUSE_S if self._blocked else 0.0))
        self._receive(wait_s)

    def _receive(self, wait_s: float) -> bool:
        """Do what comes in within `wait_s`, and what is behind it; whether anything did."""
        came = False
        with suppress(queue.Empty):
            work = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while came := True:
                work()
                work = self._inbox.get_nowait()
        return came

    def _meanwhile(self, wait_s: float) -> None:
        """While a step is waited for: loads that newcomers wish for begin at once."""
        if self._receive(wait_s):
            self.adapters.begin()

    def _arriving(self) -> bool:
        self.adapters.carry_out()
        return self.adapters.loading

    def _work(self) -> None:
        self.adapters.carry_out()
        self._step_began_at = now = self._clock()
        self._load_waits.settle(lambda name: self._cache.slot_of(name) is not None, now)
        turn = self._pipeline.turn()
        self._step_began_at = None
        self._blocked = turn.started is None and turn.landed is None and not turn.progress
        events = []
        if turn.landed is not None:
            self._metrics.step(turn.landed, turn.seconds)
            events = self._prompts(turn.landed, turn.drawn)
        events += [
            self._event(item, turn.drawn.get(item.seq))
            for item in turn.progress
            if item.seq in self._live
        ]
        if events:
            self._tell(lambda: self._listener.delivered(events))
            self.adapters.carry_out()  # who has ended may have made room for a load
        self._reports.tick(self._clock())

    def _prompts(self, step: Step, drawn: Mapping[str, Drawn]) -> list[Event]:
        """What the step scored of prompts; before what it drew, for that may be the end."""
        events = []
        for row in step.rows:
            seq = self._live.get(row.seq) if row.targets else None
            if seq is not None:
                scores = PromptScores(row.start, drawn[row.seq].prompt)
                events.append(Event(row.seq, digest=self._version(seq), prompt=scores))
        return events

    def _event(self, item: Progress, drawn: Drawn | None) -> Event:
        seq = self._live[item.seq]
        if item.finish is not None:
            del self._live[item.seq]
            self._load_waits.ended(item.seq)
            self._metrics.ended(item.finish, len(seq.output))
        error = None
        if item.finish is Finish.ERROR:
            model = seq.adapter or self._config.merged or self._config.base_name
            error = fault_of(seq, item.reason, drawn, model=model)
        first = item.token is not None and len(seq.output) == 1
        scored = drawn if item.token is not None and drawn and drawn.logprob is not None else None
        event = Event(item.seq, item.token, item.finish, error=error, drawn=scored)
        if not first:
            return event
        seq.first_at = self._clock()
        if seq.adapter is not None:
            seq.load = self.adapters.load_of(seq.adapter, seq.digest)
        self._metrics.cached(seq.cached)
        return replace(event, digest=self._version(seq), cached=seq.cached)

    def _version(self, seq: Sequence) -> str:
        return seq.digest if self._merged is None else self._merged.digest

    def _changed(self) -> None:
        """What is servable changed: that is said at once."""
        self._reports.tick(self._clock(), urgent=True)

    def _publish(self, report: ReplicaReport) -> None:
        waiting = self._scheduler.waiting_adapters()
        self._tell(lambda: self._listener.reported(report, waiting))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._asyncio.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: there is nobody left to hear
            self._stopping = True
