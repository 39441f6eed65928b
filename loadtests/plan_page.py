"""A plan for people: text in a terminal, and a page with the curve that made it choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any, Final

from gateway.cli.output import table as text_table
from loadtests.chart import bars, page, paragraph
from loadtests.chart import table as html_table
from loadtests.machine import Machine
from loadtests.neighbours import PROPOSED, Trial, verdict
from loadtests.plan_run import Plan
from loadtests.proposal import Advice, Level, Pool, Proposal, Wish

_BAR: Final = 32
_WIDTH: Final = 100
_INDENT: Final = "      "
_TENANTS: Final = 10
_MARKS: Final = {Level.OK: "ok  ", Level.DO: "do  ", Level.WARNING: "WARN"}
_TRIAL: Final = (
    *("change", "replicas", "slots", "host_slots", "busy", "p50_ms", "p99_ms"),
    *("in_slot", "from_disk", "cost_per_hour", "verdict"),
)
_QUOTA: Final = ("tenant", "requests_per_min", "tokens_per_min", "concurrency", "weight")
_COST: Final = (
    *("pool", "replicas", "slots", "host_slots", "host_gb", "max_rank", "adapters"),
    *("requests_per_s", "cost_per_hour", "cost_per_million_tokens"),
)


def text(plan: Plan) -> str:
    proposal, trials, wish, machine = plan.proposal, plan.trials, plan.wish, plan.machine
    parts = [plan.title, fill(of_machine(machine), _WIDTH), "", advice_text(proposal.advice)]
    if trials:
        tried = f"{plan.arrivals} arrivals in the simulator; the target is "
        tried += f"{1e3 * wish.ttft_p99_s:.0f} ms for the first token of 99 %:"
        parts += ["", tried, "", text_table(trial_rows(trials, wish), _TRIAL), "", curve(plan)]
    parts += ["", text_table(cost_rows(proposal, machine), _COST)]
    parts.append(f"in all {proposal.cost_per_hour(machine):.2f} an hour")
    if proposal.quotas:
        rows = quota_rows(proposal)
        parts += ["", text_table(rows[:_TENANTS], _QUOTA)]
        if len(rows) > _TENANTS:
            parts.append(f"and {len(rows) - _TENANTS} tenants more (--json has all)")
    return "\n".join(parts)


def advice_text(advice: Sequence[Advice]) -> str:
    lines = []
    for one in advice:
        lines.append(_wrapped(f"{_MARKS[one.level]}  {one.topic}: ", one.say, _INDENT))
        lines.append(_wrapped(f"{_INDENT}because    ", one.because, f"{_INDENT}           "))
        if one.otherwise:
            lines.append(_wrapped(f"{_INDENT}otherwise  ", one.otherwise, f"{_INDENT}           "))
    return "\n".join(lines)


def _wrapped(head: str, said: str, indent: str) -> str:
    return fill(said, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def curve(plan: Plan) -> str:
    """p99 as bars; the target is a mark on the same scale."""
    trials, wish = (*plan.trials, *plan.others), plan.wish
    took = [trial.p99_ms for trial in trials]
    most = max([ms for ms in took if math.isfinite(ms)] + [1e3 * wish.ttft_p99_s])
    target = round(_BAR * 1e3 * wish.ttft_p99_s / most)
    lines = []
    for trial, ms in zip(trials, took, strict=True):
        full = max(1, round(_BAR * ms / most)) if math.isfinite(ms) else _BAR
        bar = "".join("#" if at < full else "|" if at == target - 1 else " " for at in range(_BAR))
        mark = " <-" if trial.change == PROPOSED else ""
        lines.append(f"{trial.change:<22} {bar} {ms:,.0f} ms{mark}")
    return "\n".join(lines)


def of_machine(machine: Machine) -> str:
    """What the plan takes a replica to be."""
    return (
        f"A replica: {machine.gpu_bytes / 1e9:.0f} GB of GPU memory, of which the base takes "
        f"{machine.base_bytes / 1e9:.1f}; {machine.host_bytes / 1e9:.0f} GB of host memory for "
        f"adapters; copies at {machine.copy_bytes_per_s / 1e9:.1f} and disk reads at "
        f"{machine.read_bytes_per_s / 1e9:.2f} GB/s; "
        f"{machine.capacity} sequences at once; a step {1e3 * machine.step_s:.2f} ms + "
        f"{1e6 * machine.row_s:.0f} µs a row + {1e6 * machine.adapter_s:.0f} µs an adapter, "
        f"{1e6 * machine.prompt_token_s:.0f} µs a prompt token "
        "(--measured, --model-config and --machine change it)"
    )


def html(plan: Plan) -> str:
    proposal, trials, wish, machine = plan.proposal, plan.trials, plan.wish, plan.machine
    decided = []
    for one in proposal.advice:
        says = f"{one.topic}: {one.say}. Because {one.because}."
        tail = f" Otherwise {one.otherwise}." if one.otherwise else ""
        decided.append(paragraph(says + tail, bad=one.level is Level.WARNING))
    sections: dict[str, list[str]] = {
        "Decisions, in the order to follow them": decided,
        "What it costs": [html_table(cost_rows(proposal, machine), _COST)],
    }
    if trials:
        by_change = {_short(trial.change): trial for trial in trials}
        sections["The proposal and its neighbours, simulated"] = [
            html_table(trial_rows(trials, wish), _TRIAL),
            bars("First token, 99th percentile",
                 {name: trial.p99_ms for name, trial in by_change.items()}, y="ms"),
            bars("Requests that waited for a disk",
                 {name: 100 * trial.found["disk"] for name, trial in by_change.items()}, y="%"),
            bars("Cost", {name: t.cost_per_hour for name, t in by_change.items()}, y="an hour"),
        ]  # fmt: skip
    if proposal.quotas:
        sections["Tenants"] = [html_table(quota_rows(proposal), _QUOTA)]
    return page(f"Plan: {plan.title}", sections)


def _short(change: str) -> str:
    """Fits below a bar."""
    return change.replace("one ", "1 ").replace("the ", "").replace(" memory", "")


def trial_rows(trials: Sequence[Trial], wish: Wish) -> list[dict[str, Any]]:
    chosen = next(trial for trial in trials if trial.change == PROPOSED)
    return [
        {
            "change": trial.change,
            "replicas": trial.pool.replicas,
            "slots": trial.pool.slots,
            "host_slots": trial.pool.host_slots,
            "busy": f"{100 * trial.busy:.0f} %",
            "p50_ms": round(float(trial.figures["ttft_p50_ms"]), 1),
            "p99_ms": round(trial.p99_ms, 1),
            "in_slot": f"{100 * trial.found['gpu']:.1f} %",
            "from_disk": f"{100 * trial.found['disk']:.2f} %",
            "cost_per_hour": round(trial.cost_per_hour, 2),
            "verdict": verdict(trial, chosen, wish),
        }
        for trial in trials
    ]


def cost_rows(proposal: Proposal, machine: Machine) -> list[dict[str, Any]]:
    return [_cost_row(pool, machine) for pool in proposal.pools]


def quota_rows(proposal: Proposal) -> list[dict[str, Any]]:
    return [{name: getattr(quota, name) for name in _QUOTA} for quota in proposal.quotas]


def _cost_row(pool: Pool, machine: Machine) -> dict[str, Any]:
    cost = pool.cost_per_hour(machine)
    tokens = pool.demand.rate_per_s * 3600 * pool.demand.output_tokens
    return {
        "pool": pool.name,
        "replicas": pool.replicas,
        "slots": pool.slots,
        "host_slots": pool.host_slots,
        "host_gb": round(pool.host_bytes / 1e9, 1),
        "max_rank": pool.max_rank,
        "adapters": len(pool.demand.adapters),
        "requests_per_s": round(pool.demand.rate_per_s, 2),
        "cost_per_hour": round(cost, 2),
        "cost_per_million_tokens": round(1e6 * cost / tokens, 3) if tokens else None,
    }
