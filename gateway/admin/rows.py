"""What the fleet is, as the admin API shows it: one row a thing."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from gateway.core.dispatcher import ReplicaView
from gateway.fleet.names import is_version
from gateway.state.adapter_records import AdapterRecord
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


def adapter_row(
    name: str, places: list[tuple[ReplicaView, AdapterState]], record: AdapterRecord | None
) -> dict[str, Any]:
    """One adapter over all replicas, as its plain name means it: in the version on record.

    `status` is the best of that version's: READY somewhere is routable, FAILED was refused by all
    that were asked. Other versions that are there serve as `NAME@VERSION`, and are in `others`.
    """
    meant = "" if record is None else record.current
    states = [state for _, state in places]
    now = [state for state in states if _is_meant(state, meant)]
    order = list(AdapterStatus)
    best = min(now, key=lambda state: order.index(state.status), default=None)
    rows = [{"replica": view.replica, **asdict(state)} for view, state in places]
    for row in rows:
        del row["adapter"]
    served = {state.digest for state in states if state.status is not AdapterStatus.FAILED}
    return {
        "adapter": name,
        "status": "absent" if best is None else best.status,
        "routable": best is not None and best.status is not AdapterStatus.FAILED,
        "digest": "" if best is None else best.digest,
        "rank": 0 if best is None else best.rank,
        "size_bytes": 0 if best is None else best.size_bytes,
        "others": sorted(digest for digest in served if meant and not is_version(digest, meant)),
        "replicas": list(dict.fromkeys(view.replica for view, _ in places)),
        "places": rows,
        "record": None if record is None else asdict(record),
    }


def _is_meant(state: AdapterState, version: str) -> bool:
    """What failed without a digest, nobody knows to be another version."""
    unknown = state.status is AdapterStatus.FAILED and not state.digest
    return unknown or is_version(state.digest, version)
