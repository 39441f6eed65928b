"""Advice for a fleet that runs: what its reports and its ledger say is wrong, and which knob.

Pure: facts in, lines out. The limits are those of the alerts in `helm/alerts.yaml`, so that both
speak up of the same thing.

    thrash      adapters leave slots more than 0.3 times a request: slots, replicas, or a replica
                for the busiest adapter
    host        adapters that were asked for lie on no replica's host memory, or more than 2 % of
                the requests were placed cold: host memory, before more slots
    dominating  an adapter has a replica's worth of the work: merge or dedicate it
    places      more than `BUSY` of the fleet's places are taken, or requests wait: replicas
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loadtests.proposal import Advice, Level

THRASH: Final = 0.3  # evictions from slots a request
COLD: Final = 0.02  # of the requests, placed where the adapter was on disk
BUSY: Final = 0.85  # of the places
WAIT_S: Final = 1.0  # in the queue, 99th percentile
DOMINATES: Final = 0.7  # of one replica's share of the work
_REQUESTS: Final = 10
_NAMED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    replica: str
    base: str
    slots: int
    capacity: int
    busy: float  # mean requests there while it was watched
    waiting: float
    max_resident: int  # most adapters in slots at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    adapter: str
    requests: int  # in the ledger's window
    tokens: int
    rank: int
    size_bytes: int
    in_slots: int  # replicas
    in_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    watched_s: float
    requests: int  # placed while it was watched
    evictions: int  # seen to leave a slot meanwhile, at least
    placed: dict[str, int]  # by kind, meanwhile
    queue_p99_s: float | None  # of the ledger's latest records
    first_token_p99_s: float | None
    ledger_s: float  # how far the ledger was read back
    replicas: tuple[ReplicaFacts, ...]
    adapters: tuple[AdapterFacts, ...]  # most asked for first


def advise(facts: FleetFacts) -> tuple[Advice, ...]:
    if not facts.replicas:
        return (
            Advice(
                "replicas",
                Level.WARNING,
                "no replica is up",
                "the gateway hears none",
                "every request is refused; `loraplex replica-set list` says why",
            ),
        )
    return (*_host(facts), *_thrash(facts), *_places(facts), *_dominating(facts), *_ranks(facts))


def _host(facts: FleetFacts) -> Iterator[Advice]:
    used = [one for one in facts.adapters if one.requests]
    far = [one for one in used if not one.in_slots and not one.in_memory]
    cold = facts.placed.get("cold", 0) + facts.placed.get("spill", 0)
    share = cold / facts.requests if facts.requests else 0.0
    size = sum(one.size_bytes for one in used)
    told = (
        f"the {len(used)} adapters of the last {facts.ledger_s / 3600:.0f} h are "
        f"{size / 1e9:.2f} GB; {len(far)} of them lie on disk only"
    )
    if far or (share > COLD and facts.requests >= _REQUESTS):
        each = size / len(facts.replicas)
        yield Advice(
            "host",
            Level.WARNING,
            f"raise host_bytes (max_cpu_loras) to {each / 1e9:.2f} GB or more on each of "
            f"{len(facts.replicas)} replicas, before any GPU slot",
            f"{told}, and {100 * share:.1f} % of the requests were placed cold",
            "those requests wait for the disk, and more GPU slots change nothing about it",
        )
    else:
        yield Advice(
            "host",
            Level.OK,
            "host memory holds the working set",
            f"{told}; {100 * share:.1f} % of the requests were placed cold",
            "",
        )


def _thrash(facts: FleetFacts) -> Iterator[Advice]:
    if facts.requests < _REQUESTS:
        yield Advice(
            "slots",
            Level.OK,
            "too few requests to judge the slots by",
            f"{facts.requests} in {facts.watched_s:.0f} s; watch it longer (--watch), under load",
            "",
        )
        return
    each = facts.evictions / facts.requests
    full = [one for one in facts.replicas if one.max_resident >= one.slots]
    told = (
        f"{facts.evictions} adapters left a slot for {facts.requests} requests ({each:.2f} each; "
        f"{THRASH:g} is where an alert begins)"
    )
    if each <= THRASH:
        yield Advice("slots", Level.OK, "slots are as many as are needed", told, "")
        return
    top = facts.adapters[0].adapter if facts.adapters else "the busiest adapter"
    more = 2 * max((one.slots for one in full), default=facts.replicas[0].slots)
    yield Advice(
        "slots",
        Level.WARNING,
        f"thrash: raise max_loras to {more} on {', '.join(one.replica for one in full[:_NAMED])}"
        if full
        else "thrash: adapters take each other's pages: raise `pages`, or lower max_running",
        told,
        f"each of those requests waits for a copy; add a replica, or give {top} one of its own "
        "(--merged), where GPU memory has no room for more slots",
    )


def _places(facts: FleetFacts) -> Iterator[Advice]:
    places = sum(one.capacity for one in facts.replicas)
    taken = sum(one.busy for one in facts.replicas)
    share = taken / places if places else 1.0
    waits = facts.queue_p99_s or 0.0
    told = f"{taken:.1f} of {places} places are taken, on average over {facts.watched_s:.0f} s"
    if facts.queue_p99_s is not None:
        told += f"; 99 % of the recorded requests queued for less than {1e3 * waits:.0f} ms"
    if share > BUSY or waits > WAIT_S:
        enough = math.ceil(taken / (0.75 * places) * len(facts.replicas))
        wanted = max(len(facts.replicas) + 1, enough)
        yield Advice(
            "replicas",
            Level.WARNING,
            f"{wanted} replicas instead of {len(facts.replicas)}",
            told,
            "the queue grows with every burst; lower the quotas of who floods it meanwhile",
        )
    else:
        yield Advice("replicas", Level.OK, f"{len(facts.replicas)} replicas are enough", told, "")


def _dominating(facts: FleetFacts) -> Iterator[Advice]:
    tokens = sum(one.tokens for one in facts.adapters)
    if not tokens:
        return
    top = max(facts.adapters, key=lambda one: (one.tokens, one.adapter))
    busy = sum(one.busy for one in facts.replicas)
    capacity = sum(one.capacity for one in facts.replicas) / len(facts.replicas)
    work = top.tokens / tokens * busy / capacity
    told = (
        f"it has {100 * top.tokens / tokens:.0f} % of the tokens, which keeps "
        f"{work:.2f} replicas' places taken"
    )
    if work >= DOMINATES:
        yield Advice(
            "merge",
            Level.DO,
            f"give {top.adapter} a replica of its own with its weights merged in (--merged)",
            told,
            "it and everybody else compete for slots, and each of its tokens pays for the "
            "adapter product",
        )
    else:
        yield Advice(
            "merge",
            Level.OK,
            f"no adapter fills a replica; {top.adapter} is first",
            told,
            "a replica of its own would stand idle most of the time",
        )


def _ranks(facts: FleetFacts) -> Iterator[Advice]:
    ranks = sorted(one.rank for one in facts.adapters if one.rank)
    if not ranks:
        return
    usual = ranks[len(ranks) // 2]
    high = [one.adapter for one in facts.adapters if one.rank > 4 * usual]
    if high:
        yield Advice(
            "ranks",
            Level.DO,
            f"a pool with a higher max_lora_rank for {', '.join(high[:_NAMED])}, or train them "
            f"again at rank {2 * usual} or below",
            f"the usual rank is {usual}, theirs more than four times that",
            "each takes the room of several in slots and host memory, and as much longer to load",
        )
