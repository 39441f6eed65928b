"""The gateway's parts that follow from its configuration alone."""

from __future__ import annotations

from gateway.completion.forward import Timeouts
from gateway.completion.journal import Journal
from gateway.config import ForwardConfig, GatewayConfig, ReplicaEntry
from gateway.edge.upstream import Upstream
from shared.ids import ReplicaId
from shared.logs import RequestLines
from shared.settings import BadSettings
from shared.tracing import tracer_of


def entries_of(config: GatewayConfig) -> dict[ReplicaId, ReplicaEntry]:
    """The replicas of the file. Raises BadSettings for two of one name, or an address that is
    none."""
    found: dict[ReplicaId, ReplicaEntry] = {}
    for entry in config.fleet.replicas:
        if entry.id in found:
            raise BadSettings(f"fleet.replicas: two replicas are named {entry.id!r}")
        upstream_of(entry, connect_timeout_s=config.forward.connect_timeout_s)
        found[ReplicaId(entry.id)] = entry
    if len(found) > config.discovery.members_max:
        raise BadSettings(
            f"fleet.replicas: {len(found)} are more than discovery.members_max allows"
        )
    return found


def upstream_of(entry: ReplicaEntry, *, connect_timeout_s: float) -> Upstream:
    """Raises BadSettings for an address that is none."""
    try:
        return Upstream(entry.url, connect_timeout_s=connect_timeout_s)
    except ValueError as error:
        raise BadSettings(f"fleet.replicas: {entry.id}: {error}") from error


def journal_of(config: GatewayConfig) -> Journal:
    """Raises BadSettings where spans are wanted and OpenTelemetry is not installed."""
    tracer = tracer_of(config.tracing, service="loraplex-gateway")
    return Journal(config.log_requests, tracer, RequestLines())


def timeouts_of(entry: ReplicaEntry, usual: ForwardConfig) -> Timeouts:
    """Its own, where it has any."""
    return Timeouts(
        entry.first_byte_timeout_s or usual.first_byte_timeout_s,
        entry.idle_timeout_s or usual.idle_timeout_s,
    )
