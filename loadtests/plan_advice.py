"""The decision chart: each line of a plan with its reason and what happens otherwise.

The order is the order in which to follow them: host memory for the working set comes before GPU
slots, and where it is short nothing is said for more slots. Then replicas, ranks, adapters that
dominate, pins, what to bring ahead, tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from loadtests.cache_law import distinct, hit_share
from loadtests.demand import Demand
from loadtests.machine import Machine
from loadtests.proposal import Advice, Level, Pool, Quota, Wish
from loadtests.sizing import NEARLY_ALL, cap_of, hits, load, own_load, places_for, service_s

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
        yield slots(pool, machine, wish)
    for pool in many:
        yield replicas(pool, machine, wish)
    yield ranks(demand, pools, machine)
    yield dominating(demand, pools, machine, wish)
    if pinned:
        yield _pins(pinned, shared, machine)
    yield from _prefetch(demand, shared)
    if quotas:
        yield _tenants(quotas, demand, machine, wish, shared)


def host(pool: Pool, machine: Machine, wish: Wish) -> Advice:
    """First of all: does the fleet's host memory hold what is asked for?"""
    size, adapters = pool.demand.mean_bytes, len(pool.demand.adapters)
    if not adapters:
        return Advice(
            "host", Level.OK, "no host memory for adapters", "no adapter is asked for", ""
        )
    copy_ms, read_ms = 1e3 * machine.copy_s(size), 1e3 * machine.read_s(size)
    where = f"on each of {pool.replicas} replicas" if pool.replicas > 1 else "on the replica"
    told = f"max_cpu_loras {pool.host_slots}, host_bytes {pool.host_bytes / 1e9:.1f}e9"
    slow = f"what is not there is read from disk, {read_ms:.0f} ms instead of {copy_ms:.1f} ms"
    if pool.host_covers:
        half = 1 - hit_share(pool.demand.shares, adapters / 2)
        places = pool.replicas * pool.host_slots
        return Advice(
            "host",
            Level.DO,
            f"{pool.host_slots} host slots {where} ({told})",
            f"the working set is {adapters} adapters, {pool.demand.bytes / 1e9:.1f} GB; the fleet "
            f"has {places} places, {places / adapters:.1f} an adapter, filled as one partitioned "
            "cache",
            f"{slow}; with room for half of them {_percent(half)} of the requests wait for it",
        )
    need = places_for(adapters, 1, pool.replicas, wish) * size
    enough = -(-pool.demand.bytes // (machine.host_bytes * wish.host_share))
    miss = 1 - hit_share(pool.demand.shares, pool.replicas * pool.host_slots)
    return Advice(
        "host",
        Level.WARNING,
        f"host memory first: {need / 1e9:.1f} GB {where}, or {enough:.0f} replicas with what there "
        f"is; until then {told}",
        f"the working set, {adapters} adapters of {pool.demand.bytes / 1e9:.1f} GB, does not fit "
        f"in {pool.replicas} x {pool.host_bytes / 1e9:.1f} GB",
        f"{slow}, for {_percent(miss)} of the requests, and no GPU slot changes that",
    )


def slots(pool: Pool, machine: Machine, wish: Wish) -> Advice:
    adapters, size = len(pool.demand.adapters), pool.demand.mean_bytes
    different = distinct(pool.demand.shares, machine.capacity)
    if not adapters:
        return Advice("slots", Level.OK, "one slot", "no adapter is asked for", "")
    say = f"{pool.slots} GPU slots a replica (max_loras {pool.slots})"
    takes = (
        f"{pool.slots} x {pool.slot_bytes / 1e6:.0f} MB beside the base "
        f"({machine.base_bytes / 1e9:.1f} GB) and keys and values of {machine.capacity} sequences"
    )
    if pool.slots > pool.slots_max:
        return Advice(
            "slots",
            Level.WARNING,
            f"{say}: GPU memory has room for {pool.slots_max}",
            takes,
            "sequences are preempted or refused for want of pages: take an FP8 base, fewer "
            "sequences at once, a lower rank cap, or a larger GPU",
        )
    if pool.slots < min(different, adapters):
        return Advice(
            "slots",
            Level.WARNING,
            f"{say}; a full batch wants {different:.0f}",
            f"{machine.capacity} sequences name {different:.0f} different adapters: {takes}",
            "sequences wait for a slot while places for sequences are free",
        )
    found = hits(pool, pool.slots)
    because = (
        f"a full batch of {machine.capacity} names {different:.0f} different adapters; "
        f"{_percent(found)} of the requests then find theirs in a slot: {takes}"
    )
    if not pool.host_covers:
        because += ". No more of them before host memory holds the working set"
    double = hits(pool, 2 * pool.slots)
    saved = 1e3 * (double - found) * machine.copy_s(size)
    return Advice(
        "slots",
        Level.DO,
        say,
        because,
        f"with half of them a batch must wait for its adapters; twice as many would save a request "
        f"{saved:.2f} ms on average ({_percent(double)} found in a slot)",
    )


def replicas(pool: Pool, machine: Machine, wish: Wish) -> Advice:
    work = load(pool.demand, machine)
    one = pool.demand.rate_per_s / work if work else 0.0
    busy = work / pool.replicas
    say = f"{pool.replicas} replica{'s' if pool.replicas > 1 else ''} in the {pool.name} pool"
    because = (
        f"{pool.demand.rate_per_s:.1f} requests/s of {pool.demand.prompt_tokens:.0f} + "
        f"{pool.demand.output_tokens:.0f} tokens; one does {one:.1f}/s with all "
        f"{machine.capacity} places taken, so they are {_percent(busy)} busy"
    )
    lost = f"{_percent(work / (pool.replicas - 1))} busy" if pool.replicas > 1 else "gone"
    if busy > wish.utilisation + 1e-9:
        enough = int(-(-work // wish.utilisation))
        return Advice(
            "replicas",
            Level.WARNING,
            f"{say}; {enough} would be {_percent(work / enough)} busy",
            because,
            "requests queue in the gateway" if busy < 1 else "the queue grows until it refuses",
        )
    spare = f"{pool.replicas + 1} stay within {_percent(wish.utilisation)} when one is lost"
    return Advice(
        "replicas",
        Level.DO,
        say,
        because,
        f"with one less the rest is {lost}; {spare}",
    )


def ranks(demand: Demand, pools: Sequence[Pool], machine: Machine) -> Advice:
    shared, size = pools[0], pools[0].demand.mean_bytes
    high = next((pool for pool in pools if pool.name == "high-rank"), None)
    if high is not None:
        each = high.demand.mean_bytes
        return Advice(
            "ranks",
            Level.DO,
            f"cap ranks at {shared.max_rank} in the shared pool (max_lora_rank {shared.max_rank}); "
            f"{high.replicas} replica{'s' if high.replicas > 1 else ''} with max_lora_rank "
            f"{high.max_rank} for the {len(high.demand.adapters)} above: {_names(high.demand)}",
            f"they are {each / 1e6:.0f} MB each, the others {size / 1e6:.0f} MB",
            f"each takes the room of {each / size:.0f} others in slots and host memory, and is as "
            "much slower to load",
        )
    usual, odd = _odd(demand)
    if odd:
        return Advice(
            "ranks",
            Level.DO,
            f"max_lora_rank {shared.max_rank}; no pool of their own for the {len(odd)} adapters "
            f"above rank {usual}: {', '.join(odd[:_NAMED])}{', …' if len(odd) > _NAMED else ''}",
            "they fill no replica of their own, and with their true rank in pages they crowd out "
            "nobody",
            "a pool of their own would stand idle; train them again at a lower rank to save "
            "host memory",
        )
    return Advice(
        "ranks",
        Level.OK,
        f"max_lora_rank {shared.max_rank}, one pool for all ranks",
        "no adapter's rank is far above the others'",
        "a higher cap than needed costs memory where slots are padded to it (vLLM)",
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
    say = f"give no adapter its own replica; {top.name} is first with {_percent(top.share)}"
    if level is Level.WARNING:
        say = f"{top.name} would fill a merged replica (--merged) by itself"
    elif top.share >= _DOMINATES:
        say += ": it stays in a slot everywhere"
    return Advice(
        "merge",
        level,
        say,
        f"it would keep a merged replica {_percent(work * wish.utilisation)} busy; "
        f"{_percent(wish.merge_share * wish.utilisation)} is where one pays",
        f"{len(demand.adapters)} dedicated replicas would be "
        f"{_percent(load(demand, machine) / len(demand.adapters))} busy each, on average",
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
    quotas: Sequence[Quota], demand: Demand, machine: Machine, wish: Wish, shared: Pool
) -> Advice:
    promised = sum(quota.requests_per_min for quota in quotas) / 60
    work = load(demand, machine)
    does = shared.replicas * demand.rate_per_s / work if work else 0.0
    return Advice(
        "tenants",
        Level.DO,
        f"quotas and weights of {len(quotas)} tenants, in the table below",
        f"{wish.headroom:g} times the fullest minute of each; together {promised:.1f} requests/s, "
        f"{promised / does:.1f} times what the shared pool does"
        if does
        else f"{wish.headroom:g} times the fullest minute of each",
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


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
