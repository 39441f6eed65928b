"""`loraplex plan --live`: what a running fleet says through its gateway's admin API.

Residency is looked at once a second for a while: an adapter that was in a slot and is not any more
has left it, so what is counted are at least the evictions there were. Placements are the gateway's
own counters (`/metrics`), popularity and waits the ledger's.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx
import typer

from gateway.cli.client import Address, Admin, admin_address, unreachable
from gateway.cli.failure import Failure
from loadtests.fleet_advice import AdapterFacts, FleetFacts, ReplicaFacts, advise
from loadtests.plan_page import advice_text
from loadtests.stats import percentile
from loadtests.usage import note, show, usage
from shared.clock import monotonic, wall

LEDGER_S: Final = 24 * 3600.0
"""How far back the ledger says who is popular."""

_RECENT_S: Final = 900.0
_EVERY_S: Final = 1.0
_WATCH_MAX_S: Final = 3600.0
_RECORDS: Final = 5000
_PLACED: Final = re.compile(
    r'^loraplex_gateway_placements_total\{kind="([^"]+)"\} ([0-9.e+]+)$', re.MULTILINE
)

Row = dict[str, Any]


def live_plan(gateway: str, watch_s: float, json: bool) -> None:
    """Look, then print. Ends the program as a command of the gateway's does."""
    if not 0 <= watch_s <= _WATCH_MAX_S:
        usage(f"--watch {watch_s:g}: from 0 to {_WATCH_MAX_S:g} seconds")
    try:
        address = admin_address(gateway)
        note(f"watching {address.url} for {watch_s:g} s")
        facts = look(address, watch_s)
    except Failure as failure:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(failure.code) from failure
    lines = advise(facts)
    if json:
        show({"facts": asdict(facts), "advice": [asdict(one) for one in lines]}, json)
    else:
        print(advice_text(lines))


def look(address: Address, watch_s: float) -> FleetFacts:
    """Raises Failure."""
    seen = _Seen()
    with Admin(address) as api:
        before, begun = _placed(address), monotonic()
        while True:
            seen.take(api.get("replicas")["data"], api.get("residency")["data"])
            left = begun + watch_s - monotonic()
            if left <= 0:
                break
            time.sleep(min(_EVERY_S, left))
        placed = Counter(_placed(address))
        placed.subtract(before)
        now = wall()
        day = {"from": str(now - LEDGER_S), "to": str(now)}
        rows = api.get("usage", by="adapter", **day)["data"]
        recent = {"from": str(now - _RECENT_S), "limit": str(_RECORDS)}
        records = api.get("usage/records", **recent)["data"]
    return FleetFacts(
        watched_s=monotonic() - begun,
        requests=placed.total(),
        evictions=seen.evictions,
        placed=dict(placed),
        queue_p99_s=_p99(records, "queue_s"),
        first_token_p99_s=_p99(records, "first_token_s"),
        ledger_s=LEDGER_S,
        replicas=seen.replicas(),
        adapters=seen.adapters(rows),
    )


@dataclass(slots=True)
class _Seen:
    """What several looks at a fleet add up to."""

    looks: int = 0
    evictions: int = 0
    _rows: dict[str, Row] = field(default_factory=dict)  # of the last look
    _busy: Counter[str] = field(default_factory=Counter)
    _waiting: Counter[str] = field(default_factory=Counter)
    _resident: dict[str, set[str]] = field(default_factory=dict)
    _most: dict[str, int] = field(default_factory=dict)
    _states: dict[str, list[Row]] = field(default_factory=dict)  # adapter -> where it is now

    def take(self, replicas: Sequence[Row], residency: Sequence[Row]) -> None:
        self.looks += 1
        self._rows = {row["replica"]: row for row in replicas if row["state"] == "up"}
        self._states = {}
        for row in self._rows.values():
            self._busy[row["replica"]] += row["load"]
            self._waiting[row["replica"]] += row["waiting"]
        for row in residency:
            name = row["replica"]
            if name not in self._rows:
                continue
            now = {s["adapter"] for s in row["adapters"] if s["tier"] == "gpu"}
            self.evictions += len(self._resident.get(name, set()) - now)
            self._resident[name] = now
            self._most[name] = max(self._most.get(name, 0), len(now))
            for state in row["adapters"]:
                self._states.setdefault(state["adapter"], []).append(state)

    def replicas(self) -> tuple[ReplicaFacts, ...]:
        return tuple(
            ReplicaFacts(
                replica=name,
                base=row["base"],
                slots=row["slots"],
                capacity=row["capacity"],
                busy=self._busy[name] / self.looks,
                waiting=self._waiting[name] / self.looks,
                max_resident=self._most.get(name, 0),
            )
            for name, row in sorted(self._rows.items())
        )

    def adapters(self, used: Sequence[Row]) -> tuple[AdapterFacts, ...]:
        """Those with a place in the fleet; what the ledger knows of the base is none."""
        counts = {row["adapter"]: row for row in used}
        found = []
        for adapter, states in self._states.items():
            row = counts.get(adapter, {})
            tiers = Counter(state["tier"] for state in states)
            found.append(
                AdapterFacts(
                    adapter=adapter,
                    requests=row.get("requests", 0),
                    tokens=row.get("prompt_tokens", 0) + row.get("completion_tokens", 0),
                    rank=max(state["rank"] for state in states),
                    size_bytes=max(state["size_bytes"] for state in states),
                    in_slots=tiers["gpu"],
                    in_memory=tiers["host"],
                )
            )
        return tuple(sorted(found, key=lambda one: (-one.requests, one.adapter)))


def _placed(address: Address) -> dict[str, int]:
    """The gateway's placements by kind. Raises Failure."""
    try:
        reply = httpx.get(f"{address.url}/metrics", timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        raise unreachable(address.url, error) from error
    if not reply.is_success:
        raise Failure(f"{address.url}/metrics: HTTP {reply.status_code}: {reply.text[:200]}")
    return {kind: int(float(count)) for kind, count in _PLACED.findall(reply.text)}


def _p99(records: Sequence[Row], name: str) -> float | None:
    values = sorted(row[name] for row in records if row.get(name) is not None)
    return percentile(values, 99) if values else None
