"""Planner: numbers in, a proposal out. Nothing is run here; `neighbours` puts it to the test.

In order, since each rests on the one before:

    pools      an adapter that fills a replica by itself gets one with its weights merged in; ranks
               far above the rest get their own pool where they fill a replica too, or crowd out
               the slots of the others
    sizes      replicas, host memory and slots of each pool (`sizing`)
    tenants    quotas with headroom over the fullest minute, weights by what is normally used
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from loadtests.demand import Demand
from loadtests.machine import Machine
from loadtests.plan_advice import advise
from loadtests.proposal import Pool, Proposal, Quota, Wish
from loadtests.sizing import NEARLY_ALL, cap_of, load, own_load, service_s, sized, slots_needed

_OWN_POOL: Final = 0.3  # of a replica's work, from which high ranks get a pool
_WEIGHT_MAX: Final = 10.0


def propose(demand: Demand, machine: Machine, wish: Wish) -> Proposal:
    """Raises ValueError when nothing is asked for."""
    if demand.rate_per_s <= 0:
        raise ValueError("the demand has no rate: a trace needs two arrivals, a recipe a --rate")
    merged = _merged(demand, machine, wish)
    rest = _spilled(demand, merged)
    if not rest.rate_per_s:  # they alone are the fleet: one pool, in which they may be anywhere
        merged, rest = [], demand
    high = _high_ranks(rest, machine, wish)
    pools = [sized("shared", rest.without(high), machine, wish)]
    if high:
        pools.append(sized("high-rank", rest.only(high), machine, wish))
    return proposal_of(demand, (*pools, *merged), machine, wish)


def proposal_of(demand: Demand, pools: tuple[Pool, ...], machine: Machine, wish: Wish) -> Proposal:
    """What these pools mean: the shared one first."""
    pinned = _pinned(pools[0], machine)
    quotas = _quotas(demand, machine, wish)
    return Proposal(
        pools=pools,
        advice=advise(demand, pools, machine, wish, pinned=pinned, quotas=quotas),
        pinned=pinned,
        quotas=quotas,
    )


# -- pools


def _merged(demand: Demand, machine: Machine, wish: Wish) -> list[Pool]:
    """Adapters that fill replicas of their own; none where the number of replicas is settled."""
    if wish.replicas is not None:
        return []
    pools = []
    for adapter in demand.adapters:
        work = own_load(adapter, demand, machine, wish)
        if work < wish.merge_share:
            break
        replicas = math.floor(work + 1 - wish.merge_share)
        alone = demand.only({adapter.name})
        part = min(1.0, replicas / work)
        pools.append(
            Pool(
                name=f"merged:{adapter.name}",
                replicas=replicas,
                slots=1,
                slots_max=1,
                host_slots=1,
                host_covers=True,
                max_rank=adapter.rank,
                slot_bytes=0.0,
                demand=replace(alone, rate_per_s=part * alone.rate_per_s),
                merged=adapter.name,
            )
        )
    return pools


def _spilled(demand: Demand, merged: Sequence[Pool]) -> Demand:
    """What merged replicas leave to the shared pool: of their adapters, what they have no room
    for."""
    kept = {pool.merged: pool.demand.rate_per_s / demand.rate_per_s for pool in merged}
    names = {adapter.name for adapter in demand.adapters}
    left = tuple(
        replace(a, share=max(a.share - kept.get(a.name, 0.0), 0.0)) for a in demand.adapters
    )
    return replace(demand, adapters=left).without(names - {a.name for a in left if a.share > 0})


def _high_ranks(demand: Demand, machine: Machine, wish: Wish) -> set[str]:
    ranks = sorted(adapter.rank for adapter in demand.adapters)
    if not ranks or wish.replicas is not None:
        return set()
    cap = cap_of(ranks[math.ceil(NEARLY_ALL * len(ranks)) - 1])
    high = {adapter.name for adapter in demand.adapters if adapter.rank > cap}
    if not high or len(high) == len(ranks):
        return set()
    together = sized("shared", demand, machine, wish)
    crowded = slots_needed(demand, machine) > together.slots_max
    fills = load(demand.only(high), machine) / wish.utilisation >= _OWN_POOL
    return high if fills or crowded else set()


# -- who is pinned, and what tenants may


def _pinned(pool: Pool, machine: Machine) -> tuple[str, ...]:
    """Never idle, on average: one request of theirs is always running."""
    rate, lasts = pool.demand.rate_per_s, service_s(pool.demand, machine)
    busy = [a.name for a in pool.demand.adapters if rate * a.share * lasts >= 1]
    return tuple(busy[: pool.replicas * pool.slots // 4])


def _quotas(demand: Demand, machine: Machine, wish: Wish) -> tuple[Quota, ...]:
    """Twice (`headroom`) the fullest minute; weights by what each normally uses."""
    if not demand.tenants:
        return ()
    lasts = service_s(demand, machine)
    tokens = sorted(tenant.tokens_per_min for tenant in demand.tenants)
    usual = tokens[len(tokens) // 2] or 1.0
    return tuple(
        Quota(
            tenant=tenant.name,
            requests_per_min=math.ceil(wish.headroom * tenant.peak_requests_per_min),
            tokens_per_min=math.ceil(wish.headroom * tenant.peak_tokens_per_min),
            concurrency=max(
                1, math.ceil(wish.headroom * tenant.peak_requests_per_min / 60 * lasts)
            ),
            weight=min(max(1.0, round(2 * tenant.tokens_per_min / usual) / 2), _WEIGHT_MAX),
        )
        for tenant in demand.tenants
    )
