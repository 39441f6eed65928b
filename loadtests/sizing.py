"""Sizing: replicas, host memory and slots of one pool, by arithmetic.

    replicas   rate / (utilisation * what one does when all its places are taken)
    host       `copies` of every adapter of the pool over its replicas' host tiers, which the
               gateway fills as one partitioned cache; fewer copies where memory is short
    slots      as many as a full batch has different adapters; more only when the host tier covers
               the working set, and loads into slots still cost too much

Laws: more rate never takes a replica away; slots grow only over a host tier that covers the
working set; slots, base and the keys and values of a full batch fit in GPU memory, if one slot
does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from loadtests.cache_law import distinct, hit_share
from loadtests.demand import AdapterDemand, Demand
from loadtests.machine import Machine
from loadtests.proposal import Pool, Wish

NEARLY_ALL: Final = 0.95
"""Of the adapters, whom the shared pool's rank cap lets in."""

CAPS: Final = (8, 16, 32, 64, 128, 256, 512)
_COPIES_BUSY: Final = 0.1  # of the time that copies into slots may take
_GAIN: Final = 0.01  # of the target: what a doubling of the slots must save a request
_SLOTS_STEP: Final = 8
_CONTEXTS: Final = 2.0  # keys and values of a batch over those of its mean requests, ended


def cap_of(rank: int) -> int:
    """The usual rank that lets this one in."""
    return next((cap for cap in CAPS if cap >= rank), rank)


def sized(name: str, demand: Demand, machine: Machine, wish: Wish) -> Pool:
    """One pool for all of a demand."""
    adapters = len(demand.adapters)
    needed = min(slots_needed(demand, machine), max(adapters, 1))
    replicas = wish.replicas or max(1, math.ceil(load(demand, machine) / wish.utilisation - 1e-9))
    cap = cap_of(demand.max_rank)
    slot_bytes = _slot_bytes(demand, cap, machine)
    room = machine.free_bytes(batch_tokens(demand, machine))
    slots_max = max(int(room / slot_bytes), 0) if slot_bytes else max(adapters, 1)
    host_slots, covers = _host(demand, replicas, machine, wish)
    pool = Pool(
        name=name,
        replicas=replicas,
        slots=max(1, min(needed, slots_max)),
        slots_max=slots_max,
        host_slots=host_slots,
        host_covers=covers,
        max_rank=cap,
        slot_bytes=slot_bytes,
        demand=demand,
    )
    slots = wish.slots or (_grown(pool, machine, wish) if covers else pool.slots)
    return replace(pool, slots=slots)


def with_replicas(pool: Pool, replicas: int, machine: Machine, wish: Wish) -> Pool:
    """The same pool with host tiers for so many."""
    return sized(pool.name, pool.demand, machine, replace(wish, replicas=replicas))


def load(demand: Demand, machine: Machine) -> float:
    """In replicas whose places are all taken all the time."""
    rate = machine.requests_per_s(
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
        adapters=distinct(demand.shares, machine.capacity),
    )
    return demand.rate_per_s / rate


def service_s(demand: Demand, machine: Machine) -> float:
    """From dispatch to the last token, in a full batch."""
    adapters = distinct(demand.shares, machine.capacity)
    step_s = machine.step_s + machine.row_s * machine.capacity + machine.adapter_s * adapters
    return demand.output_tokens * step_s + demand.prompt_tokens * machine.prompt_token_s


def batch_tokens(demand: Demand, machine: Machine) -> float:
    """Whose keys and values must be there beside the slots."""
    mean = _CONTEXTS * machine.capacity * (demand.prompt_tokens + demand.output_tokens)
    return max(mean, demand.longest_tokens)


def hits(pool: Pool, slots: int) -> float:
    """Of the requests for the pool's adapters: who finds theirs in a slot of its home."""
    return hit_share(pool.demand.shares, slots * pool.replicas)


def slots_needed(demand: Demand, machine: Machine) -> int:
    """Slots of a full batch, in whole steps."""
    different = math.ceil(distinct(demand.shares, machine.capacity))
    return max(1, _SLOTS_STEP * math.ceil(different / _SLOTS_STEP))


def _grown(pool: Pool, machine: Machine, wish: Wish) -> int:
    slots, most = pool.slots, min(pool.slots_max, max(len(pool.demand.adapters), 1))
    copy_s = machine.copy_s(pool.demand.mean_bytes)
    per_replica = pool.demand.rate_per_s / pool.replicas
    while slots < most:
        more = min(2 * slots, most)
        found, then = hits(pool, slots), hits(pool, more)
        busy = (1 - found) * per_replica * copy_s
        if busy <= _COPIES_BUSY and (then - found) * copy_s <= _GAIN * wish.ttft_p99_s:
            break
        slots = more
    return slots


def _host(demand: Demand, replicas: int, machine: Machine, wish: Wish) -> tuple[int, bool]:
    """Places of each replica, and whether all of them together hold every adapter."""
    adapters, size = len(demand.adapters), demand.mean_bytes
    room = int(machine.host_bytes / size) if size else adapters
    if wish.host_slots is not None:
        enough = min(adapters, places_for(adapters, 1, replicas, wish))
        return wish.host_slots, wish.host_slots >= enough
    for copies in range(min(wish.copies, replicas), 0, -1):
        places = places_for(adapters, copies, replicas, wish)
        if places <= room:
            return places, True
    return max(1, room), False


def places_for(adapters: int, copies: int, replicas: int, wish: Wish) -> int:
    """On each replica, for so many copies in the part of its host tier that the gateway plans."""
    return max(1, math.ceil(min(copies, replicas) * adapters / (replicas * wish.host_share)))


def _slot_bytes(demand: Demand, cap: int, machine: Machine) -> float:
    """What one slot takes of GPU memory: its adapter's own bytes, or always those of the cap."""
    if not demand.adapters:
        return 0.0
    if machine.padded:
        return max(a.size_bytes * cap / max(a.rank, 1) for a in demand.adapters)
    share = math.fsum(demand.shares)
    asked = math.fsum(a.share * a.size_bytes for a in demand.adapters) / share if share else 0.0
    return max(asked, demand.mean_bytes)


def own_load(adapter: AdapterDemand, demand: Demand, machine: Machine, wish: Wish) -> float:
    """Of one adapter, in merged replicas that are as busy as is wished."""
    rate = machine.requests_per_s(
        prompt_tokens=demand.prompt_tokens, output_tokens=demand.output_tokens, adapters=0
    )
    return demand.rate_per_s * adapter.share / (wish.utilisation * rate)
