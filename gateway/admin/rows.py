"""What the fleet is, as the admin API shows it: one row a thing."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from gateway.core.dispatcher import ReplicaView
from gateway.state.prices import NANO
from gateway.state.quota import LimitLine
from gateway.state.tenants import Key
from shared.messages import AdapterState, AdapterStatus, Tier


def key_row(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "prefix": key.prefix,
        "created": key.created,
        "expires": key.expires,
    }


def limit_row(line: LimitLine) -> dict[str, Any]:
    """Money in units, not in nano-units."""
    row = asdict(line)
    row["reset_s"] = line.reset_s if math.isfinite(line.reset_s) else None
    if line.name.startswith("spend"):
        row |= {"limit": line.limit / NANO, "remaining": line.remaining / NANO}
    return row


def replica_row(view: ReplicaView, now: float) -> dict[str, Any]:
    row = asdict(view)
    del row["adapters"], row["reported_at"], row["ejected_until"]
    until = view.ejected_until
    row["ejected_s_left"] = None if until is None else max(0.0, until - now)
    row["reported_s_ago"] = None if view.reported_at is None else now - view.reported_at
    row["resident"] = view.by_tier()[Tier.GPU]
    row["adapters"] = sum(s.status is not AdapterStatus.FAILED for s in view.adapters)
    return row


def adapter_row(name: str, places: list[tuple[ReplicaView, AdapterState]]) -> dict[str, Any]:
    """One adapter over all replicas; `status` is the best of them: READY somewhere is routable."""
    if not places:
        nowhere = {"status": "absent", "routable": False, "digest": "", "rank": 0, "size_bytes": 0}
        return {"adapter": name, **nowhere, "replicas": [], "places": []}
    order = list(AdapterStatus)
    best = min((state for _, state in places), key=lambda state: order.index(state.status))
    rows = [{"replica": view.replica, **asdict(state)} for view, state in places]
    for row in rows:
        del row["adapter"]
    return {
        "adapter": name,
        "status": best.status,
        "routable": best.status is not AdapterStatus.FAILED,
        "digest": best.digest,
        "rank": best.rank,
        "size_bytes": best.size_bytes,
        "replicas": [view.replica for view, _ in places],
        "places": rows,
    }
