"""One simulated replica: the production Scheduler and AdapterCache, and a price list for an engine.

Loads take disk_load_s and host_load_s, beside the steps; what is fetched ahead is read one after
another, as the replica does. What is left out: loads that requests wait for do not share a disk,
and an adapter takes no pages of the key-value pool. So who waits for whom is right, and absolute
times are as good as the prices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.core.orders import Order
from loadtests.job import BASE, Job
from loadtests.prices import Prices
from replica.core.adapter_cache import AdapterCache, EvictHost, Load
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler, Step
from replica.core.sequence import Sampling, Sequence
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import AdapterState, ReplicaReport, Tier

DIGEST = "0" * 64
STORE = "store"
SIZE_BYTES = 1 << 24
_PAGE_TOKENS = 16
_AHEAD = "ahead "  # begins the name of who wants an adapter in a slot before anybody asks


@dataclass(frozen=True, slots=True)
class Read:
    """An adapter reaches host memory; for a load, or fetched ahead (None)."""

    adapter: AdapterId
    load: Load | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter reaches its slot."""

    load: Load


@dataclass(frozen=True, slots=True)
class Stepped:
    step: Step


@dataclass(frozen=True, slots=True)
class ReportDue:
    pass


Event = Read | Loaded | Stepped | ReportDue
"""What the replica asks to be told later, as (time, event)."""

Coming = list[tuple[float, Event]]


@dataclass(slots=True)
class _Live:
    job: Job
    tier: Tier | None = None  # where its adapter was when it came; None: the base, or not known yet
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's last token."""

    job: Job
    tier: Tier | None
    first_token_at: float


class SimReplica:
    def __init__(self, *, name: ReplicaId, prices: Prices, boot: int = 1) -> None:
        self.name = name
        self.loads: dict[Tier, int] = {Tier.HOST: 0, Tier.DISK: 0}  # that a request waited for
        self.fetched = 0  # ahead
        self.served = 0
        self.slowness = 1.0  # its steps take so many times as long
        self._boot = str(boot)
        self._prices = prices
        pool = PagePool(pages=prices.pages, page_tokens=_PAGE_TOKENS)
        self._cache = AdapterCache(slots=prices.slots, host_max=prices.host_max, pool=pool)
        self._scheduler = Scheduler(
            pool=pool,
            cache=self._cache,
            max_running=prices.capacity,
            max_step_tokens=max(prices.step_tokens_max, prices.capacity),
            eos_ids=frozenset(),
            max_model_len=prices.pages * _PAGE_TOKENS,
        )
        self._live: dict[RequestId, _Live] = {}
        self._stepping = False
        self._loading: dict[AdapterId, Tier] = {}
        self._ahead: dict[AdapterId, None] = {}  # to be fetched, in order
        self._fetching: tuple[AdapterId, float] | None = None  # which, and until when
        self._copies: set[AdapterId] = set()  # in host memory
        self._fell = False  # an adapter is farther than was last said
        self._seq = 0
        self._reported_at = float("-inf")
        self._report_due_at: float | None = None

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def jobs(self) -> list[tuple[Job, bool]]:
        """What runs and waits here, and whether its first token is out."""
        return [(live.job, live.first_token_at is not None) for live in self._live.values()]

    def submit(self, job: Job, now: float) -> tuple[list[Ended], Coming]:
        live = self._live[job.request] = _Live(job)
        if job.adapter is not None:
            self._know(job.adapter)
            if self._cache.slot_of(job.adapter) is not None:
                live.tier = Tier.GPU
            else:
                live.tier = self._loading.get(job.adapter)
        sampling = Sampling(max_tokens=job.output_tokens, ignore_eos=True)
        self._scheduler.add(
            Sequence(str(job.request), job.adapter, _prompt(job), sampling, now), now
        )
        return self._go_on([], now)

    def bring(self, order: Order, now: float) -> tuple[list[Ended], Coming]:
        """What the gateway orders: in host memory, or in a slot while one is free."""
        free = self._prices.slots - self._cache.slots_used
        for adapter in order.adapters:
            self._know(adapter)
            if order.tier is Tier.GPU:
                if free > 0:
                    self._cache.want(adapter, _AHEAD + adapter, now)
                free -= 1
            elif adapter in self._copies:
                self._cache.read(adapter, DIGEST)  # wanted now
            else:
                self._ahead[adapter] = None
        return self._go_on([], now)

    def handle(self, event: Read | Loaded | Stepped, now: float) -> tuple[list[Ended], Coming]:
        ended: list[Ended] = []
        match event:
            case Read(adapter, load):
                if load is None:
                    self._fetching = None
                    self.fetched += 1
                self._keep(adapter)
            case Loaded(load):
                del self._loading[load.adapter]
                self._cache.loaded(load.adapter, load.digest, load.slot)
                self._cache.release(_AHEAD + load.adapter)
            case Stepped(step):
                self._stepping = False
                ended = self._commit(step, now)
        return self._go_on(ended, now)

    def start(self, now: float) -> Coming:
        """The first report: until it is heard, nothing is sent here."""
        return self._report_by(now)

    def report(self, now: float) -> tuple[ReplicaReport | None, Coming]:
        """A snapshot, and the heartbeat after it; None when an earlier report took its place."""
        if self._report_due_at != now:
            return None, []
        self._seq += 1
        self._reported_at, self._report_due_at = now, None
        prices = self._prices
        snapshot = ReplicaReport(
            replica=self.name,
            boot=self._boot,
            seq=self._seq,
            base=BASE,
            slots=prices.slots,
            capacity=prices.capacity,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            pages_total=prices.pages,
            pages_free=prices.pages,
            max_model_len=1 << 20,
            heartbeat_s=prices.heartbeat_s,
            adapters=tuple(state for state in self._cache.states() if _is_near(state)),
            host_max=prices.host_max,
            store=STORE,
        )
        return snapshot, self._report_by(now + prices.heartbeat_s)

    def check(self) -> None:
        self._scheduler.check()
        assert len(self._live) == self._scheduler.running + self._scheduler.waiting

    def _keep(self, adapter: AdapterId) -> None:
        self._copies.add(adapter)
        self._cache.read(adapter, DIGEST)

    def _know(self, adapter: AdapterId) -> None:
        """The store has it; the cache is told when it first matters: there may be very many."""
        self._cache.offer(adapter, DIGEST, 16, SIZE_BYTES, pages=0)  # slots are what is scarce here

    def _commit(self, step: Step, now: float) -> list[Ended]:
        ended = []
        for seq, _, finish, _ in self._scheduler.commit(step, _drawn(step), now):
            live = self._live[RequestId(seq)]
            if live.first_token_at is None:
                live.first_token_at = now
            if finish is not None:
                del self._live[live.job.request]
                self.served += 1
                ended.append(Ended(live.job, live.tier, live.first_token_at))
        return ended

    def _go_on(self, ended: list[Ended], now: float) -> tuple[list[Ended], Coming]:
        """Begin the loads that are wanted and the next step, and say so."""
        coming = self._load(now) + self._fetch(now)
        if not self._stepping and (step := self._scheduler.plan(now)) is not None:
            self._stepping = True
            coming.append((now + self._takes_s(step), Stepped(step)))
        due = now if self._fell else self._reported_at + self._prices.report_interval_s
        self._fell = False
        return ended, coming + self._report_by(max(now, due))

    def _takes_s(self, step: Step) -> float:
        prompt = step.total_tokens - sum(len(row.tokens) == 1 for row in step.rows)
        adapters = len({row.slot for row in step.rows if row.slot >= 0})
        rows = len(step.rows)
        took_s = self._prices.step_takes_s(rows=rows, prompt_tokens=prompt, adapters=adapters)
        return self.slowness * took_s

    def _load(self, now: float) -> Coming:
        coming: Coming = []
        for command in self._cache.poll(now):
            if not isinstance(command, Load):
                self._fell = True  # it takes no time, and is said at once
                if isinstance(command, EvictHost):
                    self._copies.discard(command.adapter)
                continue
            waiting = [live for live in self._live.values() if live.job.adapter == command.adapter]
            self.loads[command.tier] += bool(waiting)
            self._loading[command.adapter] = command.tier
            in_host_at = now
            if command.tier is Tier.DISK:
                self._ahead.pop(command.adapter, None)
                in_host_at += self._prices.disk_load_s
                if self._fetching is not None and self._fetching[0] == command.adapter:
                    in_host_at = self._fetching[1]  # it is being read already
                else:
                    coming.append((in_host_at, Read(command.adapter, command)))
            coming.append((in_host_at + self._prices.host_load_s, Loaded(command)))
            for live in waiting:
                live.tier = live.tier or command.tier
        return coming

    def _fetch(self, now: float) -> Coming:
        while self._ahead and self._fetching is None:
            adapter = next(iter(self._ahead))
            del self._ahead[adapter]
            if adapter not in self._loading and adapter not in self._copies:
                until = now + self._prices.disk_load_s
                self._fetching = (adapter, until)
                return [(until, Read(adapter, None))]
        return []

    def _report_by(self, at: float) -> Coming:
        """Ask for a report at `at`, unless an earlier one is coming."""
        if self._report_due_at is not None and self._report_due_at <= at:
            return []
        self._report_due_at = at
        return [(at, ReportDue())]


def listing(adapters: list[AdapterId]) -> list[AdapterState]:
    """What the store says that it has."""
    state = AdapterState(AdapterId(""), DIGEST, Tier.DISK, rank=16, size_bytes=SIZE_BYTES)
    return [replace(state, adapter=adapter) for adapter in adapters]


def _prompt(job: Job) -> tuple[int, ...]:
    """Begins with the request's name, so that none is found in the pages of another."""
    name = tuple(job.request.encode())[: job.prompt_tokens]
    return name + (0,) * (job.prompt_tokens - len(name))


def _drawn(step: Step) -> dict[str, int]:
    return {row.seq: 1 for row in step.rows if row.samples}


def _is_near(state: AdapterState) -> bool:
    return state.tier is not Tier.DISK or state.status == "loading"
