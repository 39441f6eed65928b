"""What Prometheus reads of the gateway's state at the moment it asks."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.dispatcher import ReplicaState
from gateway.fleet.pump import Pump
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota


def add_gauges(metrics: Metrics, *, pump: Pump, quota: Quota, ledger: Ledger) -> None:
    dispatcher, clock = pump.dispatcher, pump.clock

    def up() -> float:
        return sum(one.state is ReplicaState.UP for one in dispatcher.view(clock()))

    gauges: list[tuple[str, str, Callable[[], float]]] = [
        ("in_flight", "Requests at replicas.", lambda: dispatcher.in_flight),
        ("queued", "Requests that wait for a replica.", lambda: dispatcher.queued),
        (
            "fairness_gap",
            "Service between the tenants that wait, least to most, in weighted tokens.",
            lambda: dispatcher.fairness_gap,
        ),
        ("replicas_up", "Replicas that report and take requests.", up),
        ("store_degraded", "1: quotas are decided locally.", lambda: quota.degraded),
        (
            "ledger_backlog_bytes",
            "Ledger records not yet in the store.",
            lambda: ledger.backlog_bytes,
        ),
        ("ledger_lost", "Ledger records that neither store nor disk took.", lambda: ledger.lost),
    ]
    for name, text, read in gauges:
        metrics.watch(name, text, read)
