"""What Prometheus reads of the gateway's state at the moment it asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.core.dispatcher import ReplicaState
from gateway.fleet.fairness import Fairness
from gateway.fleet.pump import Pump
from gateway.members import Members
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.store.redis import Store


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

    def count(state: ReplicaState) -> float:
        return dispatcher.states()[state]

    gauges: list[tuple[str, str, Callable[[], float]]] = [
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
            partial(count, ReplicaState.UP),
        ),
        (
            "replicas_not_taken",
            "Replicas that were found, and are more than discovery.members_max.",
            lambda: members.crowded,
        ),
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
    for name, text, read in gauges:
        metrics.watch(name, text, read)
    metrics.count(
        "placement_moves",
        "Owners that adapters got in place of others, or beside them.",
        lambda: dispatcher.placement_moves,
    )
    for state in ReplicaState:
        metrics.watch("replicas", "Replicas, by state.", partial(count, state), state=state)
