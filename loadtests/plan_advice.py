"""The decision chart: each line of a plan with its reason and what happens otherwise.

The order is the order in which to follow them: host memory for the working set comes before GPU
slots, and where it is short nothing is said for more slots. Then replicas, ranks, adapters that
dominate, pins, what to bring ahead, tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from loadtests.demand import Demand
from loadtests.machine import Machine
from loadtests.pool_advice import host, percent, replicas, slots
from loadtests.proposal import Advice, Level, Pool, Quota, Wish
from loadtests.sizing import NEARLY_ALL, cap_of, load, own_load, service_s

_NAMED: Final = 5
_DOMINATES: Final = 0.25  # of all requests


def advise(
    demand: Demand,
    pools: Sequence[Pool],
    machine: Machine,
    wish: Wish,
    *,
    pinned: Sequence[str],
    quotas: Sequence[Quota],
) -> tuple[Advice, ...]:
    return tuple(_lines(demand, pools, machine, wish, pinned, quotas))


def _lines(
    demand: Demand,
    pools: Sequence[Pool],
    machine: Machine,
    wish: Wish,
    pinned: Sequence[str],
    quotas: Sequence[Quota],
) -> Iterator[Advice]:
    shared = pools[0]
    many = [pool for pool in pools if pool.shared]
    for pool in many:
        yield host(pool, machine, wish)
    for pool in many:
        yield slots(pool, machine)
    for pool in many:
        yield replicas(pool, machine, wish)
    yield ranks(demand, pools, machine)
    yield dominating(demand, pools, machine, wish)
    if pinned:
        yield _pins(pinned, shared, machine)
    yield from _prefetch(demand, shared)
    if quotas:
        yield _tenants(quotas, pools, machine, wish)


def ranks(demand: Demand, pools: Sequence[Pool], machine: Machine) -> Advice:
    shared, size = pools[0], pools[0].demand.mean_bytes
    high = next((pool for pool in pools if pool.name == "high-rank"), None)
    if high is not None:
        each = high.demand.mean_bytes
        return Advice(
            "ranks",
            Level.DO,
            f"--max-lora-rank {shared.max_rank} in the shared pool; "
            f"{high.replicas} replica{'s' if high.replicas > 1 else ''} with --max-lora-rank "
            f"{high.max_rank} for the {len(high.demand.adapters)} above: {_names(high.demand)}",
            f"they are {each / 1e6:.0f} MB each, the others {size / 1e6:.0f} MB",
            f"each takes the room of {each / size:.0f} others in slots and host memory, and is as "
            "much slower to load",
        )
    usual, odd = _odd(demand)
    if odd:
        large = [one.size_bytes for one in demand.adapters if one.rank > usual]
        return Advice(
            "ranks",
            Level.DO,
            f"--max-lora-rank {shared.max_rank}; no pool of their own for the {len(odd)} adapters "
            f"above rank {usual}: {', '.join(odd[:_NAMED])}{', …' if len(odd) > _NAMED else ''}",
            f"they fill no replica of their own, but are {math.fsum(large) / 1e9:.1f} of the "
            f"{demand.bytes / 1e9:.1f} GB of all adapters",
            "a pool of their own would stand idle; trained again at a lower rank they would save "
            "most of that",
        )
    return Advice(
        "ranks",
        Level.OK,
        f"--max-lora-rank {shared.max_rank}, one pool for all ranks",
        "no adapter's rank is far above the others'",
        "a cap above what is needed costs memory where slots are padded to it (vLLM)",
    )


def dominating(demand: Demand, pools: Sequence[Pool], machine: Machine, wish: Wish) -> Advice:
    """Merge or dedicate who fills a replica; no one else."""
    merged = [pool for pool in pools if pool.merged]
    if merged:
        names = ", ".join(f"{pool.merged} ({pool.replicas})" for pool in merged)
        return Advice(
            "merge",
            Level.DO,
            f"replicas of their own, with the weights merged in (--merged), for {names}",
            "each of them fills so many by itself, and merged weights cost nothing a token; what "
            "exceeds them spills to the shared pool",
            "its load and everybody else's slots compete, and each of its tokens pays for the "
            "adapter product",
        )
    if not demand.adapters:
        return Advice("merge", Level.OK, "nothing to merge", "no adapter is asked for", "")
    top = demand.adapters[0]
    work = own_load(top, demand, machine, wish)
    level = Level.WARNING if work >= wish.merge_share else Level.OK
    say = f"give no adapter its own replica; {top.name} is first with {percent(top.share)}"
    if level is Level.WARNING:
        say = f"{top.name} would fill a merged replica (--merged) by itself"
    elif top.share >= _DOMINATES:
        say += ": it stays in a slot everywhere"
    return Advice(
        "merge",
        level,
        say,
        f"it would keep a merged replica {percent(work * wish.utilisation)} busy; "
        f"{percent(wish.merge_share * wish.utilisation)} is where one pays",
        f"{len(demand.adapters)} dedicated replicas would be "
        f"{percent(load(demand, machine) / len(demand.adapters))} busy each, on average",
    )


def _pins(pinned: Sequence[str], shared: Pool, machine: Machine) -> Advice:
    first = ", ".join(pinned[:_NAMED]) + (", …" if len(pinned) > _NAMED else "")
    rate, lasts = shared.demand.rate_per_s, service_s(shared.demand, machine)
    least = min(a.share for a in shared.demand.adapters if a.name in set(pinned)) * rate * lasts
    return Advice(
        "pin",
        Level.DO,
        f"pin {len(pinned)} adapters at their owners (POST /pin): {first}",
        f"each has {least:.1f} requests or more running at any time",
        "a burst of rare adapters can push one out between two of its requests, and the next "
        "waits for the copy",
    )


def _prefetch(demand: Demand, shared: Pool) -> Iterator[Advice]:
    if demand.visits:
        first = demand.visits[0]
        yield Advice(
            "prefetch",
            Level.DO,
            f"a line of placement.schedule for {len(demand.visits)} adapters that come at a time "
            f"of their own: {', '.join(visit.adapter for visit in demand.visits[:_NAMED])}",
            f"{first.adapter} is wanted from {first.starts_s:.0f} to {first.ends_s:.0f} s of the "
            f"trace, {first.rate_per_s:.2f} times a second, and hardly ever else",
            "its first requests find it as far away as what nobody uses",
        )
    if demand.adapters:
        told = (
            "all of them" if shared.host_covers else f"the {shared.host_slots} most wanted of each"
        )
        yield Advice(
            "prefetch",
            Level.OK,
            f"leave placement on (placement.enabled): it brings {told} to host memory ahead of use",
            "each adapter's first request then finds it a copy away",
            "every adapter's first request on a replica waits for the disk",
        )


def _tenants(
    quotas: Sequence[Quota], pools: Sequence[Pool], machine: Machine, wish: Wish
) -> Advice:
    promised = sum(quota.requests_per_min for quota in quotas) / 60
    does = math.fsum(
        pool.replicas * pool.demand.rate_per_s / load(pool.demand, machine)
        for pool in pools
        if pool.demand.rate_per_s
    )
    return Advice(
        "tenants",
        Level.DO,
        f"quotas and weights of {len(quotas)} tenants, in the table below",
        f"{wish.headroom:g} times the fullest minute of each; together {promised:.1f} requests/s, "
        f"{promised / does:.1f} times what the fleet does",
        "one tenant's loop takes the fleet; with equal weights the largest tenants wait first "
        "when it is full",
    )


def _odd(demand: Demand) -> tuple[int, list[str]]:
    """The cap that nearly all are within, and who is above it."""
    ordered = sorted(adapter.rank for adapter in demand.adapters)
    if not ordered:
        return 0, []
    cap = cap_of(ordered[math.ceil(NEARLY_ALL * len(ordered)) - 1])
    return cap, [adapter.name for adapter in demand.adapters if adapter.rank > cap]


def _names(demand: Demand) -> str:
    names = [adapter.name for adapter in demand.adapters]
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
