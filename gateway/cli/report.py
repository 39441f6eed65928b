"""What the demo shows of its fleet: answers, why each replica was chosen, slots, quotas, usage."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from gateway.cli.ask import Answer
from gateway.cli.fleet import Fleet
from gateway.cli.output import left, table

Row = dict[str, Any]

_TIERS: Final = ("gpu", "host", "disk")
_COLUMN_MAX: Final = 42


def side_by_side(answers: Sequence[Answer]) -> str:
    """One column a model, as wide as the terminal allows."""
    width = min(_COLUMN_MAX, shutil.get_terminal_size((120, 24)).columns // len(answers) - 3)
    columns = [
        [answer.model[:width], "-" * width, *textwrap.wrap(answer.text, width)]
        for answer in answers
    ]
    height = max(map(len, columns))
    padded = [[line.ljust(width) for line in [*c, *[""] * (height - len(c))]] for c in columns]
    return "\n".join("   ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def service(answers: Sequence[Answer]) -> str:
    rows = [
        {
            "model": answer.model,
            "tenant": answer.tenant,
            "replica": answer.replica,
            "placement": answer.placement,
            "queue_ms": round(answer.queue_ms, 1),
            "first_token_ms": round(answer.first_token_ms or 0),
            "total_ms": round(answer.total_ms),
            "tokens": answer.completion_tokens,
        }
        for answer in answers
    ]
    return _titled("Who served it (the reply's headers say so)", rows)


def expectations(fleet: Fleet, answers: Sequence[tuple[str, str]]) -> list[Row]:
    """For each (tenant, model): what the router weighs for each replica now."""
    rows = []
    with fleet.admin() as admin:
        for tenant, model in answers:
            found = admin.get("explain", tenant=tenant, model=model)
            rows += [{"model": model, **row} for row in explained(found)]
    return rows


def explained(found: Row) -> list[Row]:
    """One row a candidate of an `explain` reply; milliseconds until the first token."""
    return [
        {
            "replica": one["replica"],
            "place": _place(one["step"]),
            "tier": f"{one['tier']} (inferred)" if one.get("inferred") else one["tier"],
            "load": f"{one['load']} of {one['bound']}",
            **{
                f"{name}_ms": None
                if one[f"{name}_s"] is None
                else round(1000 * one[f"{name}_s"], 1)
                for name in ("queue", "load", "slot", "hop", "crowd", "cold", "expected")
            },
            "verdict": "chosen" if one["replica"] == found["chosen"] else one["refused"] or "",
        }
        for one in found["candidates"]
    ]


def reasons(rows: Sequence[Row]) -> str:
    return _titled("Why there: expected time to the first token, before the requests", rows)


def residency(fleet: Fleet) -> str:
    with fleet.admin() as admin:
        replicas = admin.get("residency")["data"]
    rows = []
    for replica in replicas:
        tiers: Row = {tier: [] for tier in _TIERS}
        for state in replica["adapters"]:
            tiers[state["tier"]].append(state["adapter"])
        used = f"{len(tiers['gpu'])} of {replica['slots']}"
        named = {"in_slots": tiers["gpu"], "in_memory": tiers["host"], "on_disk": tiers["disk"]}
        rows.append({"replica": replica["replica"], "slots_used": used, **named})
    return _titled("Where the adapters are now", rows)


def quotas(fleet: Fleet, answers: Sequence[Answer]) -> str:
    """After the last request of each, as its reply said; and now, refilled meanwhile."""
    said = {answer.tenant: answer for answer in sorted(answers, key=lambda a: -_first(a))}
    rows = []
    with fleet.admin() as admin:
        for tenant in fleet.tenants:
            now = admin.get(f"tenants/{tenant}/quota")
            rows.append(
                {
                    "tenant": tenant,
                    "requests_left": said[tenant].requests_left,
                    "now": left(now["limits"], "requests"),
                    "tokens_left": said[tenant].tokens_left,
                    "now ": left(now["limits"], "tokens"),
                }
            )
    return _titled("What each tenant had left of its minute, and has now", rows)


def usage_rows(fleet: Fleet) -> list[Row]:
    with fleet.admin() as admin:
        rows: list[Row] = admin.get("usage", by="tenant,adapter")["data"]
    return rows


def usage(rows: Sequence[Row]) -> str:
    columns = ["tenant", "adapter", "requests", "prompt_tokens", "completion_tokens"]
    return _titled("What the ledger says of the last day", rows, columns)


def _titled(title: str, rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    return f"{title}\n{textwrap.indent(table(rows, columns or list(rows[0])), '  ')}"


def _place(step: int) -> str:
    return {0: "home", -1: "-"}.get(step, f"home +{step}")


def _first(answer: Answer) -> int:
    return int(answer.requests_left.split()[0].replace(",", ""))
