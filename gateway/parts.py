"""The gateway's parts that follow from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.completion.forward import Timeouts
from gateway.completion.journal import Journal
from gateway.config import GatewayConfig
from gateway.core.dispatcher import Dispatcher
from gateway.edge.upstream import Upstream
from shared.ids import ReplicaId
from shared.logs import RequestLines
from shared.settings import BadSettings
from shared.tracing import tracer_of


def upstreams(config: GatewayConfig) -> dict[ReplicaId, Upstream]:
    """Raises BadSettings for two replicas of one name, or an address that is none."""
    found: dict[ReplicaId, Upstream] = {}
    for entry in config.fleet.replicas:
        if entry.id in found:
            raise BadSettings(f"fleet.replicas: two replicas are named {entry.id!r}")
        try:
            found[ReplicaId(entry.id)] = Upstream(
                entry.url, connect_timeout_s=config.forward.connect_timeout_s
            )
        except ValueError as error:
            raise BadSettings(f"fleet.replicas: {entry.id}: {error}") from error
    return found


def journal_of(config: GatewayConfig) -> Journal:
    """Raises BadSettings where spans are wanted and OpenTelemetry is not installed."""
    tracer = tracer_of(config.tracing, service="loraplex-gateway")
    return Journal(config.log_requests, tracer, RequestLines())


def natives(
    config: GatewayConfig, found: Mapping[ReplicaId, Upstream]
) -> dict[ReplicaId, Upstream]:
    """Those of our own replicas."""
    names = [ReplicaId(entry.id) for entry in config.fleet.replicas if entry.kind == "native"]
    return {name: found[name] for name in names}


def bases_of(config: GatewayConfig, dispatcher: Dispatcher) -> int:
    """How many the replicas have between them; one that nobody knows yet is another."""
    entries = config.fleet.replicas
    return len({one.base or dispatcher.base_of(ReplicaId(one.id)) for one in entries})


def timeouts_of(config: GatewayConfig) -> dict[ReplicaId, Timeouts]:
    """Of every replica: its own, where it has any."""
    usual = config.forward
    return {
        ReplicaId(entry.id): Timeouts(
            entry.first_byte_timeout_s or usual.first_byte_timeout_s,
            entry.idle_timeout_s or usual.idle_timeout_s,
        )
        for entry in config.fleet.replicas
    }
