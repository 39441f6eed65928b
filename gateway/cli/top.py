"""`loraplex top`: the fleet as the gateway sees it, redrawn until Ctrl-C."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gateway.cli.client import Admin, GatewayOption, admin
from gateway.cli.output import JsonFlag, show_json, table

Row = dict[str, Any]

_TIERS: Final = ("gpu", "host", "disk")
_ADAPTERS_SHOWN: Final = 12


def top(
    gateway: GatewayOption = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Live view: who is up, how busy, what is in slots and host memory, which adapters run."""
    with admin(gateway) as api:
        if as_json:
            show_json(_look(api))
        elif once or not sys.stdout.isatty():
            print(frame(_look(api)))
        else:
            _follow(api, every)


def frame(seen: Row) -> str:
    """One look, as text."""
    replicas, adapters = seen["replicas"], seen["adapters"]
    up = sum(row["state"] == "up" for row in replicas)
    running = sum(row["running"] for row in replicas)
    parts = [
        f"{up} of {len(replicas)} replicas up, {running} running, {len(adapters)} adapters",
        "",
        table([_replica(row) for row in replicas], _REPLICA) if replicas else "no replicas",
    ]
    if adapters:
        parts += ["", table(adapters[:_ADAPTERS_SHOWN], _ADAPTER)]
        if len(adapters) > _ADAPTERS_SHOWN:
            parts.append(f"and {len(adapters) - _ADAPTERS_SHOWN} more")
    return "\n".join(parts)


_REPLICA: Final = ("replica", "state", "in_flight", "running", "waiting", "slots", "host", "pages")
_ADAPTER: Final = ("adapter", "running", "in_slots", "in_memory", "loading", "pinned")


def _follow(api: Admin, every: float) -> None:
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Text(frame(_look(api)), no_wrap=True), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            return


def _look(api: Admin) -> Row:
    """The replicas as they are listed, with their tiers counted; adapters, the busiest first."""
    held = {row["replica"]: row["adapters"] for row in api.get("residency")["data"]}
    replicas = api.get("replicas")["data"]
    for row in replicas:
        states = held.get(row["replica"], [])
        row["tiers"] = {tier: sum(s["tier"] == tier for s in states) for tier in _TIERS}
    return {"replicas": replicas, "adapters": _adapters(held)}


def _adapters(held: dict[str, list[Row]]) -> list[Row]:
    found: dict[str, Row] = {}
    for replica, states in sorted(held.items()):
        for state in states:
            row = found.setdefault(state["adapter"], _nowhere(state["adapter"]))
            row["running"] += state["running"]
            row["pinned"] |= state["pinned"]
            if state["status"] == "loading":
                row["loading"].append(replica)
            elif state["tier"] in ("gpu", "host") and state["status"] == "ready":
                row["in_slots" if state["tier"] == "gpu" else "in_memory"].append(replica)
    return sorted(found.values(), key=lambda row: (-row["running"], -_near(row), row["adapter"]))


def _nowhere(adapter: str) -> Row:
    empty: Row = {name: [] for name in ("in_slots", "in_memory", "loading")}
    return {"adapter": adapter, "running": 0, "pinned": False, **empty}


def _near(row: Row) -> int:
    return 2 * len(row["in_slots"]) + len(row["in_memory"])


def _replica(row: Row) -> Row:
    used = row["pages_total"] - row["pages_free"]
    return {
        **row,
        "state": f"{row['state']}, leaving" if row["leaving"] else row["state"],
        "in_flight": f"{row['load']} of {row['limit']}",
        "slots": f"{row['tiers']['gpu']} of {row['slots']}",
        "host": row["tiers"]["host"],
        "pages": f"{used} of {row['pages_total']}",
    }
