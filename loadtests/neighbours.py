"""Neighbours: a proposal put to the test in the simulator, and what lies beside it.

The production cores run the busiest stretch on the proposed pool. If that misses the target for the
first token, the pool grows (slots first, where they fit and host memory covers the working set,
then replicas) until it meets it or a few tries are over. Then one replica less and more, half and
twice the slots, half and twice the host memory, and host memory for half of the adapters show which
way is worse, and what better would cost.
Trials are counted in CPU, so the trace is as long as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.config import GatewayConfig
from loadtests.contest import policy_of
from loadtests.demand import Demand
from loadtests.machine import Machine
from loadtests.proposal import Pool, Wish
from loadtests.simulator import simulate
from loadtests.sizing import load, places_for, with_replicas
from loadtests.trace import Trace
from shared.ids import AdapterId

PROPOSED: Final = "proposed"
TRIALS: Final = 8
"""So many are reckoned with: the proposal, its neighbours, a try or two before."""

_SKIP: Final = 0.1
_TRIES: Final = 4
_SAME: Final = 0.05  # of the 99th percentile, either way
_ARRIVALS: Final = (200, 5000)
_TOKEN_CPU_S: Final = 12e-6  # what a trial takes of a usual machine, roughly
_REQUEST_CPU_S: Final = 0.5e-3
_REPORT_CPU_S: Final = 6e-6  # of each adapter in it
_REPORTS_PER_S: Final = 20.0
_WARM_UP_S: Final = (10.0, 900.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a pool."""

    change: str  # against the proposal
    pool: Pool
    busy: float  # by arithmetic: the run is too short to see a queue grow slowly
    fits: bool  # its slots in GPU memory, its host slots in host memory
    meets: bool
    cost_per_hour: float
    figures: dict[str, Any]

    @property
    def p99_ms(self) -> float:
        return float(self.figures["ttft_p99_ms"])

    @property
    def found(self) -> dict[str, float]:
        return dict(self.figures["adapter_found_in"])

    @property
    def refused(self) -> int:
        return sum(self.figures["refused"].values())


class Trials:
    """Runs pools on one trace, each only once."""

    def __init__(
        self,
        *,
        rows: Trace,
        demand: Demand,
        machine: Machine,
        wish: Wish,
        config: GatewayConfig,
        said: Callable[[str], None],
    ) -> None:
        self._rows = rows
        self._demand = demand
        self._machine = machine
        self._wish = wish
        self._config = config
        self._said = said
        self._done: dict[tuple[str, int, int, int], Trial] = {}

    def run(self, pool: Pool, change: str) -> Trial:
        key = (pool.name, pool.replicas, pool.slots, pool.host_slots)
        if key not in self._done:
            self._said(
                f"{change}: {pool.replicas} replicas, {pool.slots} slots, {pool.host_slots} in host"
            )
            self._done[key] = self._trial(pool, change)
        return replace(self._done[key], change=change)

    def rows_of(self, pool: Pool) -> Trace:
        return part_of(self._rows, pool, self._demand)

    def _trial(self, pool: Pool, change: str) -> Trial:
        machine, wish = self._machine, self._wish
        prices = pool.prices(machine)
        done = simulate(
            self.rows_of(pool),
            policy=policy_of("loraplex", self._config),
            replicas=pool.replicas,
            prices=prices,
            stored=[AdapterId(a.name) for a in pool.demand.adapters if not pool.merged],
            warm_up_s=_within(1.5 * prices.disk_load_s * prices.host_max, _WARM_UP_S),
        )
        figures = done.figures(load_factor=self._config.router.load_factor, skip=_SKIP)
        busy = load(pool.demand, machine) / pool.replicas
        on_time = figures["ttft_p99_ms"] <= 1e3 * wish.ttft_p99_s
        return Trial(
            change=change,
            pool=pool,
            busy=busy,
            fits=pool.slots <= max(pool.slots_max, 1) and pool.host_bytes <= machine.host_bytes,
            meets=on_time and not figures["refused"] and busy < 1,
            cost_per_hour=pool.cost_per_hour(machine),
            figures=figures,
        )


def settled(pool: Pool, trials: Trials, machine: Machine, wish: Wish) -> Pool:
    """The pool itself where it meets the target or nothing beside it does, else a larger one."""
    if trials.run(pool, PROPOSED).meets:
        return pool
    tried = pool
    more = min(2 * pool.slots, pool.slots_max, len(pool.demand.adapters))
    if wish.slots is None and pool.host_covers and more > pool.slots:
        tried = replace(pool, slots=more)
        if trials.run(tried, "more slots").meets:
            return tried
    if wish.replicas is None:
        for number in range(pool.replicas + 1, pool.replicas + _TRIES):
            tried = with_replicas(pool, number, machine, wish)
            if trials.run(tried, "more replicas").meets:
                return tried
    return pool


def neighbours(pool: Pool, wish: Wish) -> Iterator[tuple[str, Pool]]:
    """Of the same kind of replica; a step that changes nothing is left out."""
    adapters = max(len(pool.demand.adapters), 1)
    most_slots = max(adapters, pool.slots)
    most_host = max(places_for(adapters, pool.replicas, pool.replicas, wish), pool.host_slots)
    few = places_for(adapters // 2, 1, pool.replicas, wish)  # no room for the rest, in no copy
    steps = (
        ("one replica less", replace(pool, replicas=pool.replicas - 1)),
        ("one replica more", replace(pool, replicas=pool.replicas + 1)),
        ("half the slots", replace(pool, slots=pool.slots // 2)),
        ("twice the slots", replace(pool, slots=min(2 * pool.slots, most_slots))),
        ("half the host memory", replace(pool, host_slots=-(-pool.host_slots // 2))),
        ("host for half", replace(pool, host_slots=min(few, pool.host_slots // 2))),
        ("twice the host memory", replace(pool, host_slots=min(2 * pool.host_slots, most_host))),
    )
    seen = [pool]
    for change, other in steps:
        if other not in seen and min(other.replicas, other.slots, other.host_slots) >= 1:
            seen.append(other)
            yield change, other


def verdict(trial: Trial, chosen: Trial, wish: Wish) -> str:
    """Why a neighbour is not taken, in a few words."""
    if trial.change == PROPOSED:
        return "taken" if trial.meets else "misses the target"
    if not trial.fits:
        large = "GPU" if trial.pool.slots > trial.pool.slots_max else "host"
        return f"does not fit in {large} memory"
    if not trial.meets:
        return "misses the target"
    if trial.busy > wish.utilisation + 1e-9 and trial.busy > chosen.busy:
        return f"{100 * trial.busy:.0f} % busy: no room for a burst"
    slower, dearer = trial.p99_ms - chosen.p99_ms, trial.cost_per_hour - chosen.cost_per_hour
    disk = trial.found["disk"] - chosen.found["disk"]
    if disk > 0.0005:
        return f"{100 * trial.found['disk']:.2g} % of the requests wait for a disk"
    if abs(slower) < _SAME * chosen.p99_ms:
        return _as_good(trial.pool, chosen.pool, wish)
    cost = f", {abs(dearer):.2f} an hour {'more' if dearer > 0 else 'less'}" if dearer else ""
    return f"{abs(slower):.0f} ms {'slower' if slower > 0 else 'faster'}{cost}"


def _as_good(pool: Pool, chosen: Pool, wish: Wish) -> str:
    """What a stretch that was run does not show."""
    adapters = len(pool.demand.adapters)
    if pool.slots < chosen.slots:
        return "as good here; a full batch would wait for slots"
    if pool.host_slots < chosen.host_slots:
        if pool.host_slots < places_for(adapters, 1, pool.replicas, wish):
            return "as good here; has no room for the rarest"
        return "as good here; a lost replica's adapters would come from disk"
    if pool.replicas < chosen.replicas:
        return "as good here; has no room for a burst"
    return "buys nothing"


def part_of(rows: Trace, pool: Pool, demand: Demand) -> Trace:
    """The rows that go to this pool. Of an adapter that shares its load with another pool every
    so-many-th one; a merged adapter is the replica's base."""
    whole = {a.name: a.share for a in demand.adapters}
    scale = pool.demand.rate_per_s / demand.rate_per_s
    kept = {a.name: min(1.0, a.share * scale / whole[a.name]) for a in pool.demand.adapters}
    owed = dict.fromkeys(kept, 0.5)
    base = pool.demand.base_share > 0
    part = []
    for row in rows:
        if row.adapter is None:
            if base:
                part.append(row)
            continue
        if row.adapter not in kept:
            continue
        owed[row.adapter] += kept[row.adapter]
        if owed[row.adapter] >= 1 - 1e-9:
            owed[row.adapter] -= 1
            part.append(replace(row, adapter=None) if pool.merged else row)
    return tuple(part)


def arrivals_for(budget_s: float, demand: Demand, pools: Sequence[Pool]) -> int:
    """How long a trace so many seconds of CPU allow, over all trials."""
    tokens = demand.prompt_tokens / 16 + demand.output_tokens
    reported = sum(pool.replicas * pool.host_slots for pool in pools)
    second = reported * _REPORTS_PER_S * _REPORT_CPU_S
    each = _REQUEST_CPU_S + tokens * _TOKEN_CPU_S + second / demand.rate_per_s
    return int(_within(math.floor(budget_s / TRIALS / each), _ARRIVALS))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
