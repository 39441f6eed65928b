"""Front: the asyncio side of the engine. Requests in, tokens and reports out; it never blocks.

What it shows (`report`, `adapters`, `failed`) is the newest that the engine said. Laws: a request
is taken whole or refused; all that were taken hear of it when the engine crashes; an awaited change
(`load`, `unload`, `scanned`, `pin`) is visible in `adapters` when it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from replica.adapters import Trial
from replica.config import ReplicaConfig
from replica.core.sequence import Sequence
from replica.engine.host_adapter import HostAdapter
from replica.errors import Draining, EngineFailed, Overloaded, UnknownAdapter
from replica.generation import Event, Generation
from replica.loop import EngineLoop
from replica.roster import Offered, Refused
from shared.ids import AdapterId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

T = TypeVar("T")

CANARY_S: Final = 10.0
"""A load call waits this long for a slot, so that its answer can tell of the canary."""


class Front:
    def __init__(self, *, config: ReplicaConfig, loop: EngineLoop) -> None:
        self._config = config
        self._loop = loop
        self._generations: dict[str, Generation] = {}  # by sequence
        self._replies: set[asyncio.Future[Any]] = set()
        self._news = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.report: ReplicaReport = loop.draft()
        self.adapters: dict[str, AdapterState] = {
            each.adapter: each for each in self.report.adapters
        }
        self.waiting_adapters: tuple[AdapterId, ...] = ()
        self.draining = False
        self.closing = False
        self.failed = ""  # why the engine stopped

    # --- life

    def start(self) -> None:
        self._loop.start(asyncio.get_running_loop(), self)

    def drain(self, on: bool) -> None:
        """Take nothing new; what runs goes on."""
        self.draining = on
        self._loop.post(lambda: self._loop.drain(on))

    async def quiet(self) -> None:
        """Returns once no request is open."""
        await self._quiet.wait()

    async def close(self) -> None:
        """End what still runs, with an error; then the engine."""
        self.draining = self.closing = True
        for generation in set(self._generations.values()):
            generation.fail(Draining("This replica is closing."))
        self._news.set()
        await asyncio.to_thread(self._loop.join, 5.0)

    def ailment(self) -> str:
        """Why this replica is not healthy; empty when it is."""
        if self.failed:
            return self.failed
        age_s = self._loop.step_age_s
        stalled = age_s > self._config.stall_s
        return f"a forward pass has been running for {age_s:.0f} s" if stalled else ""

    # --- requests

    def generate(self, sequences: list[Sequence]) -> Generation:
        """Admit all of them or none. Raises EngineFailed, Draining or Overloaded."""
        if self.failed:
            raise EngineFailed(self.failed)
        if self.draining:
            raise Draining("This replica is draining and takes nothing new.")
        limit = self._config.max_running + self._config.max_waiting
        if len(self._generations) + len(sequences) > limit:
            raise Overloaded(
                f"This replica has its limit of {limit} sequences, running or waiting."
            )
        ids = [seq.id for seq in sequences]
        generation = Generation(ids, abort=self._abort, closed=self._closed)
        self._generations |= dict.fromkeys(ids, generation)
        self._quiet.clear()
        self._loop.post(lambda: self._loop.add(sequences))
        return generation

    def _abort(self, seq_id: str) -> None:
        self._loop.post(lambda: self._loop.drop(seq_id))

    def _closed(self, seq_ids: tuple[str, ...]) -> None:
        for seq_id in seq_ids:
            self._generations.pop(seq_id, None)
        if not self._generations:
            self._quiet.set()

    # --- what the engine says

    def delivered(self, events: list[Event]) -> None:
        for event in events:
            generation = self._generations.get(event.seq)
            if generation is not None:
                generation.push(event)

    def reported(self, report: ReplicaReport, waiting: tuple[AdapterId, ...]) -> None:
        if report.adapters is not self.report.adapters:
            self.adapters = {state.adapter: state for state in report.adapters}
        self.report, self.waiting_adapters = report, waiting
        news, self._news = self._news, asyncio.Event()
        news.set()

    def crashed(self, reason: str) -> None:
        self.failed = f"The engine of this replica stopped: {reason}"
        for generation in set(self._generations.values()):
            generation.fail(EngineFailed(self.failed))
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(EngineFailed(self.failed))
        self._news.set()

    async def next_report(self, seen: int, timeout_s: float) -> ReplicaReport:
        """A report newer than `seen`; the newest there is after `timeout_s` or at the end."""
        if self.report.seq <= seen and not self.failed and not self.closing:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        return self.report

    def goodbye(self) -> ReplicaReport:
        """The last report of this life: the engine may have ended before it told of the drain."""
        return replace(self.report, seq=self.report.seq + 1, draining=True)

    # --- adapters

    def servable(self, name: str) -> bool:
        """Whether a request may name it."""
        state = self.adapters.get(name)
        return state is not None and state.status is not AdapterStatus.FAILED

    async def scanned(self, found: Mapping[AdapterId, Offered | Refused]) -> None:
        await self._ask(lambda: self._loop.adapters.scanned(found))

    async def check_load(self, name: AdapterId, folder: AdapterId, *, in_place: bool) -> None:
        """Raises BadAdapterRequest before anything is read."""
        await self._ask(lambda: self._loop.adapters.check_load(name, folder, in_place=in_place))

    async def load(
        self,
        name: AdapterId,
        folder: AdapterId,
        host: HostAdapter,
        *,
        in_place: bool,
        pinned: bool | None,
    ) -> Trial:
        return await self._ask(
            lambda: self._loop.adapters.load(name, folder, host, in_place=in_place, pinned=pinned)
        )

    async def outcome(self, trial: Trial) -> Exception | None:
        """What its canary died of; None when it lives, or found no slot within `CANARY_S`."""
        done, _ = await asyncio.wait({asyncio.wrap_future(trial)}, timeout=CANARY_S)
        return done.pop().result() if done else None

    def canary_of(self, state: AdapterState) -> str:
        return self._loop.adapters.canary_of(state)

    async def unload(self, name: AdapterId) -> None:
        await self._ask(lambda: self._loop.adapters.unload(name))

    async def pin(self, name: AdapterId, on: bool) -> None:
        self._known(name)
        await self._ask(lambda: self._loop.adapters.pin(name, on))

    async def prefetch(self, names: list[AdapterId], tier: Tier = Tier.HOST) -> None:
        """Begin to bring them to host memory, or into free slots. Raises UnknownAdapter, and then
        begins none."""
        versions = [(name, self._known(name).digest) for name in names]
        if tier is Tier.GPU:
            await self._ask(lambda: self._loop.adapters.warm(names))
        else:
            await self._ask(lambda: self._loop.adapters.prefetch(versions))

    def _known(self, name: AdapterId) -> AdapterState:
        state = self.adapters.get(name)
        if state is None or state.status is AdapterStatus.FAILED:
            raise UnknownAdapter(f"The adapter '{name}' cannot be found.", param="adapter")
        return state

    async def _ask(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread between two steps; its result or its exception."""
        if self.failed:
            raise EngineFailed(self.failed)
        asyncio_loop = asyncio.get_running_loop()
        reply: asyncio.Future[T] = asyncio_loop.create_future()
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)

        def answer() -> None:
            try:
                result = work()
            except Exception as error:
                asyncio_loop.call_soon_threadsafe(_fail, reply, error)
            else:
                asyncio_loop.call_soon_threadsafe(_succeed, reply, result)

        self._loop.post(answer)
        return await reply


def _succeed(reply: asyncio.Future[T], result: T) -> None:
    if not reply.done():
        reply.set_result(result)


def _fail(reply: asyncio.Future[Any], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
