"""What Prometheus reads of the gateway's state at the moment it asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.core.dispatcher import Dispatcher, ReplicaState
from gateway.fleet.fairness import Fairness
from gateway.fleet.pump import Pump
from gateway.members import Members
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.store.redis import Store

Gauge = tuple[str, str, Callable[[], float]]
"""Name, text, and how to read it."""


def add_gauges(
    metrics: Metrics,
    *,
    pump: Pump,
    quota: Quota,
    ledger: Ledger,
    members: Members,
    store: Store,
    fairness: Fairness,
) -> None:
    dispatcher = pump.dispatcher
    for name, text, read in (
        *_of_fleet(dispatcher, members, fairness),
        *_of_state(store, quota, ledger),
    ):
        metrics.watch(name, text, read)
    metrics.count(
        "placement_moves",
        "Owners that adapters got in place of others, or beside them.",
        lambda: dispatcher.placement_moves,
    )
    for state in ReplicaState:
        count = partial(_count, dispatcher, state)
        metrics.watch("replicas", "Replicas, by state.", count, state=state)


def _of_fleet(dispatcher: Dispatcher, members: Members, fairness: Fairness) -> list[Gauge]:
    return [
        ("in_flight", "Requests at replicas.", lambda: dispatcher.in_flight),
        ("queued", "Requests that wait for a replica.", lambda: dispatcher.queued),
        (
            "fairness_gap",
            "Service between the tenants that wait, least to most, in weighted tokens.",
            lambda: dispatcher.fairness_gap,
        ),
        (
            "fairness_jain",
            "Jain's index of the service of tenants that wait, by weight: 1 is even.",
            lambda: fairness.jain,
        ),
        (
            "replicas_up",
            "Replicas that report and take requests.",
            partial(_count, dispatcher, ReplicaState.UP),
        ),
        (
            "replicas_not_taken",
            "Replicas that were found, and are more than discovery.members_max.",
            lambda: members.crowded,
        ),
    ]


def _of_state(store: Store, quota: Quota, ledger: Ledger) -> list[Gauge]:
    return [
        ("store_away", "1: the store does not answer in time.", lambda: store.away),
        ("store_degraded", "1: quotas are decided locally.", lambda: quota.degraded),
        (
            "ledger_backlog_bytes",
            "Ledger records not yet in the store.",
            lambda: ledger.backlog_bytes,
        ),
        (
            "ledger_lag_seconds",
            "Age of the oldest ledger record not yet in the store.",
            lambda: ledger.lag_s,
        ),
        ("ledger_lost", "Ledger records that neither store nor disk took.", lambda: ledger.lost),
    ]


def _count(dispatcher: Dispatcher, state: ReplicaState) -> float:
    return dispatcher.states()[state]
