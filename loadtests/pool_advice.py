"""What is said of one pool: its host memory, its slots, its replicas.

Where host memory does not hold the working set, that is a warning, and nothing is said for slots.
"""

from __future__ import annotations

import math

from loadtests.cache_law import distinct, hit_share
from loadtests.machine import Machine
from loadtests.proposal import Advice, Level, Pool, Wish
from loadtests.sizing import hits, load, places_for


def host(pool: Pool, machine: Machine, wish: Wish) -> Advice:
    """First of all: does the fleet's host memory hold what is asked for?"""
    size, adapters = pool.demand.mean_bytes, len(pool.demand.adapters)
    if not adapters:
        return Advice(
            "host", Level.OK, "no host memory for adapters", "no adapter is asked for", ""
        )
    copy_ms, read_ms = 1e3 * machine.copy_s(size), 1e3 * machine.read_s(size)
    where = f"on each of {pool.replicas} replicas" if pool.replicas > 1 else "on the replica"
    told = f"--max-cpu-loras {pool.host_slots} --host-bytes {math.ceil(pool.host_bytes)}"
    slow = f"what is not there is read from disk, {read_ms:.0f} ms instead of {copy_ms:.1f} ms"
    if pool.host_covers:
        half = 1 - hit_share(pool.demand.shares, adapters / 2)
        places = pool.replicas * pool.host_slots
        return Advice(
            "host",
            Level.DO,
            f"{pool.host_slots} host slots {where} ({told})",
            f"the working set is {adapters} adapters, {pool.demand.bytes / 1e9:.1f} GB; the "
            f"gateway fills {percent(wish.host_share)} of the fleet's {places} places as one "
            f"partitioned cache, {wish.host_share * places / adapters:.1f} an adapter",
            f"{slow}; with room for half of them {percent(half)} of the requests wait for it",
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
        f"{slow}, for {percent(miss)} of the requests, and no GPU slot changes that",
    )


def slots(pool: Pool, machine: Machine) -> Advice:
    adapters, size = len(pool.demand.adapters), pool.demand.mean_bytes
    different = distinct(pool.demand.shares, machine.capacity)
    if not adapters:
        return Advice("slots", Level.OK, "one slot", "no adapter is asked for", "")
    say = f"{pool.slots} GPU slots a replica (--max-loras {pool.slots})"
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
        f"{percent(found)} of the requests then find theirs in a slot: {takes}"
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
        f"{saved:.2f} ms on average ({percent(double)} found in a slot)",
    )


def replicas(pool: Pool, machine: Machine, wish: Wish) -> Advice:
    work = load(pool.demand, machine)
    one = pool.demand.rate_per_s / work if work else 0.0
    busy = work / pool.replicas
    say = f"{pool.replicas} replica{'s' if pool.replicas > 1 else ''} in the {pool.name} pool"
    because = (
        f"{pool.demand.rate_per_s:.1f} requests/s of {pool.demand.prompt_tokens:.0f} + "
        f"{pool.demand.output_tokens:.0f} tokens; one does {one:.1f}/s with all "
        f"{machine.capacity} places taken, so they are {percent(busy)} busy"
    )
    lost = f"{percent(work / (pool.replicas - 1))} busy" if pool.replicas > 1 else "gone"
    if busy > wish.utilisation + 1e-9:
        enough = int(-(-work // wish.utilisation))
        return Advice(
            "replicas",
            Level.WARNING,
            f"{say}; {enough} would be {percent(work / enough)} busy",
            because,
            "requests queue in the gateway" if busy < 1 else "the queue grows until it refuses",
        )
    spare = f"{pool.replicas + 1} stay within {percent(wish.utilisation)} when one is lost"
    return Advice(
        "replicas",
        Level.DO,
        say,
        because,
        f"with one less the rest is {lost}; {spare}",
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
