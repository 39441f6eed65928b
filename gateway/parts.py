"""The gateway's parts that follow from its configuration alone."""

from __future__ import annotations

from gateway.completion.forward import Timeouts
from gateway.config import ForwardConfig, GatewayConfig, ReplicaEntry
from gateway.edge.upstream import Upstream
from shared.ids import ReplicaId
from shared.settings import BadSettings


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


def timeouts_of(entry: ReplicaEntry, usual: ForwardConfig) -> Timeouts:
    """Its own, where it has any."""
    return Timeouts(
        entry.first_byte_timeout_s or usual.first_byte_timeout_s,
        entry.idle_timeout_s or usual.idle_timeout_s,
    )
