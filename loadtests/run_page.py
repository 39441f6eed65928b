"""The page of a simulated run: the same as of a live one (`report`), so that they compare."""

from __future__ import annotations

from collections.abc import Iterable

from loadtests.outcome import Outcome
from loadtests.report import Watched, report
from loadtests.run import Cut, Finished, Refused, Run


def run_page(run: Run, *, title: str, notes: Iterable[str], skip: float) -> str:
    """Without the first part of the trace, in which caches fill."""
    after_s = skip * run.outcomes[-1].arrival.at_s
    counted = [row for row in as_outcomes(run) if row.due_s >= after_s]
    tiers = {str(tier): share for tier, share in run.tier_shares(after_s=after_s).items()}
    return report(counted, title=title, notes=notes, watched=Watched(tiers=tiers))


def as_outcomes(run: Run, base: str = "base") -> list[Outcome]:
    """As a generator would have seen them that is never late."""
    rows = []
    for number, one in enumerate(run.outcomes):
        arrival = one.arrival
        row = Outcome(number, arrival.at_s, arrival.tenant, arrival.adapter or base)
        match one:
            case Finished():
                row.first_s, row.total_s, row.status = one.first_token_s, one.total_s, 200
                row.events = row.completion_tokens = arrival.output_tokens
                if row.events > 1:
                    row.itl_s = (one.total_s - one.first_token_s) / (row.events - 1)
                row.replica, row.placement = str(one.replica), one.kind
                row.queue_ms = one.queue_s * 1e3
            case Refused():
                row.failure = f"refused: {one.why}"
            case Cut():
                row.failure, row.replica = "the stream broke", str(one.replica)
        rows.append(row)
    return rows
