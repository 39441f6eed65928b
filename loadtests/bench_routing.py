"""What one routing decision costs, and that it does not grow with the fleet.

`python -m loadtests.bench_routing -o FILE` makes a dispatcher as the gateway makes it, for each
`--replicas`: so many of 16 places and 16 slots on one store with `--adapters` for each of them.
Each adapter is in host memory (the first at each replica in a slot) of its first replicas on the
ring: as many as would be half full of its requests, as the planner has it, up to REACH. Requests
for adapters drawn by Zipf 1.1 are sent, as many as `--load` of all places; those that would have to
wait are left out, and `in_flight` says how many run. Then, one by one and with that many kept in
flight, microseconds of one core:

    pick      the router's decision alone: nothing is counted or sent
    place     the production path of a request that need not wait: that decision, its count, its
              tenant's charge
    refused   the same of one that has to wait: it is told so, and takes the queue's path
    finish    the end of another, which keeps the load where it is

    zipf      adapters drawn as the load was: the usual ones are remembered, in the ring's memory
              and in the processor's
    any       each adapter as likely as another: in a large fleet nearly none is remembered
              anywhere, so this is the price of a cold look

The clock is read twice a call, which is in the figures (`clock_us`). The collector of cycles is set
as the gateway sets it (gateway/app.py).
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, Any, Final

import orjson
import typer

from gateway.config import GatewayConfig
from gateway.core.dispatcher import Arrival, Dispatcher
from gateway.core.ring import AdapterRing
from gateway.fleet.deciding import dispatcher_of
from loadtests.stats import summarise
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, ReplicaReport, Tier

_PLACES: Final = 16
_HOST: Final = 128
_SKEW: Final = 1.1
_TENANTS: Final = 100
_STORE: Final = "store"
_FLEETS: Final = [10, 100, 1000]


class Bench:
    def __init__(self, *, replicas: int, adapters: int, load: float, seed: int) -> None:
        config = GatewayConfig()
        self.replicas = replicas
        self.adapters = adapters
        self._dice = Random(seed)
        self._names = [AdapterId(f"adapter-{number}") for number in range(adapters)]
        self._ranks = list(accumulate(rank**-_SKEW for rank in range(1, adapters + 1)))
        shares = [rank**-_SKEW / self._ranks[-1] for rank in range(1, adapters + 1)]
        half_full = load * replicas * _PLACES / (_PLACES / 2)
        owners = [max(1, math.ceil(share * half_full)) for share in shares]
        self._core = _fleet(config, replicas, dict(zip(self._names, owners, strict=True)))
        self._asked = 0
        self._flying: list[RequestId] = []
        for _ in range(int(load * replicas * _PLACES)):
            arrival = self._arrival(self.popular())
            if self._core.place(arrival, 0.0) is not None:
                self._flying.append(arrival.request)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def popular(self) -> AdapterId:
        drawn = self._dice.random() * self._ranks[-1]
        return self._names[bisect_left(self._ranks, drawn)]

    def any(self) -> AdapterId:
        return self._names[int(self._dice.random() * len(self._names))]

    def picks(self, adapters: list[AdapterId]) -> dict[str, float]:
        core = self._core
        took_s: list[float] = []
        for adapter in adapters:
            begun = perf_counter()
            core.choice(adapter, 0.0)
            took_s.append(perf_counter() - begun)
        return _us(took_s)

    def measure(self, adapters: list[AdapterId]) -> dict[str, Any]:
        core, flying = self._core, self._flying
        placed_s: list[float] = []
        refused_s: list[float] = []
        ends_s: list[float] = []
        for adapter in adapters:
            arrival = self._arrival(adapter)
            begun = perf_counter()
            dispatch = core.place(arrival, 0.0)
            took_s = perf_counter() - begun
            if dispatch is None:
                refused_s.append(took_s)
                continue
            placed_s.append(took_s)
            at = int(self._dice.random() * len(flying))
            ended, flying[at] = flying[at], arrival.request
            begun = perf_counter()
            core.finish(ended, None, None, 0.0)
            ends_s.append(perf_counter() - begun)
        return {"place": _us(placed_s), "refused": _us(refused_s), "finish": _us(ends_s)}

    def _arrival(self, adapter: AdapterId) -> Arrival:
        self._asked += 1
        tenant = TenantId(f"tenant-{self._asked % _TENANTS}")
        return Arrival(RequestId(str(self._asked)), tenant, 1.0, adapter, 100, 100)


def _fleet(config: GatewayConfig, replicas: int, adapters: dict[AdapterId, int]) -> Dispatcher:
    """Adapters with how many own each."""
    core, ring = dispatcher_of(config), AdapterRing(vnodes=config.router.vnodes)
    owned: dict[ReplicaId, list[AdapterState]] = {
        ReplicaId(f"replica-{number}"): [] for number in range(replicas)
    }
    for name in owned:
        ring.add(name)
    for adapter, owners in adapters.items():
        for name in ring.near(adapter)[:owners]:
            if len(owned[name]) < _HOST:
                tier = Tier.GPU if len(owned[name]) < _PLACES else Tier.HOST
                owned[name].append(_state(adapter, tier))
    core.listing(_STORE, [_state(adapter, Tier.DISK) for adapter in adapters], 0.0)
    for name, states in owned.items():
        core.replica_added(name, 0.0)
        core.report(_report(name, states), 0.0)
    return core


def _state(adapter: AdapterId, tier: Tier) -> AdapterState:
    return AdapterState(adapter, "0" * 64, tier, rank=16, size_bytes=1 << 24)


def _report(name: ReplicaId, states: list[AdapterState]) -> ReplicaReport:
    return ReplicaReport(
        replica=name,
        boot="1",
        seq=1,
        base="base",
        slots=_PLACES,
        capacity=_PLACES,
        running=0,
        waiting=0,
        pages_total=1,
        pages_free=1,
        max_model_len=1 << 20,
        heartbeat_s=1e9,
        adapters=tuple(states),
        host_max=_HOST,
        store=_STORE,
    )


def _us(seconds: list[float]) -> dict[str, float]:
    told = summarise(seconds or [0.0])
    return {
        "count": len(seconds),
        "mean_us": round(told.mean * 1e6, 2),
        "p50_us": round(told.p50 * 1e6, 2),
        "p99_us": round(told.p99 * 1e6, 2),
    }


def _clock_us(reads: int = 10_000) -> float:
    begun = perf_counter()
    for _ in range(reads):
        perf_counter()
    return round((perf_counter() - begun) / reads * 1e6, 3)


def main(
    replicas: Annotated[list[int], typer.Option(min=1, help="Of each fleet.")] = _FLEETS,
    adapters: Annotated[int, typer.Option(min=1, help="In the store, for each replica.")] = 100,
    load: Annotated[float, typer.Option(min=0, max=1, help="Sent before, of all places.")] = 0.25,
    decisions: Annotated[int, typer.Option(min=1, help="Measured, each way.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", help="JSON file.")] = None,
) -> None:
    """Time the production dispatcher on fleets that are kept at a load."""
    sizes = " ".join(f"--replicas {size}" for size in replicas)
    told = {
        "command": (
            f"python -m loadtests.bench_routing {sizes} --adapters {adapters} "
            f"--load {load} --decisions {decisions} --seed {seed}"
        ),
        "clock_us": _clock_us(),
        "fleets": [
            _fleet_told(Bench(replicas=n, adapters=n * adapters, load=load, seed=seed), decisions)
            for n in replicas
        ],
    }
    data = orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if output is not None:
        output.write_bytes(data)
    typer.echo(data)


def _fleet_told(bench: Bench, decisions: int) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    bench.measure([bench.popular() for _ in range(decisions // 2)])  # the interpreter warms up
    told: dict[str, Any] = {
        "replicas": bench.replicas,
        "adapters": bench.adapters,
        "in_flight": bench.in_flight,
    }
    for name, draw in (("zipf", bench.popular), ("any", bench.any)):
        picks = bench.picks([draw() for _ in range(decisions)])
        told[name] = {"pick": picks, **bench.measure([draw() for _ in range(decisions)])}
    return told


if __name__ == "__main__":
    typer.run(main)
