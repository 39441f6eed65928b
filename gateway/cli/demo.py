"""`loraplex demo`: one question to the base and to each adapter, answers and accounts shown.

What `make demo` runs. It ends with an error when an answer is missing, when two are equal (then an
adapter was not applied), or when the ledger does not show what was asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from gateway.cli import report
from gateway.cli.ask import Answer, ask_all, pair, sdk
from gateway.cli.demo_model import demo_adapters
from gateway.cli.failure import Failure
from gateway.cli.fleet import QUESTION, Fleet
from gateway.cli.output import note
from gateway.cli.plan import DEMO_BASE, plan
from gateway.cli.report import Row
from gateway.cli.up import DataDirOption, PortOption, ReplicasOption, home, supervise
from shared.clock import monotonic

_LEDGER_S: Final = 10.0
_LEDGER_POLL_S: Final = 0.1


def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the answers.")] = False,
    replicas: ReplicasOption = 2,
    port: PortOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Run a fleet here and show what it does.

    One question goes to the base and to three adapters at once, as two tenants.
    """
    sdk()  # say now, not in a minute, that it is missing
    asked = plan(
        home=home(data_dir),
        replicas=replicas,
        base=DEMO_BASE,
        adapters=None,
        port=port,
        config=None,
    )
    note(f"data directory: {asked.home.root} (LORAPLEX_DATA moves it)")

    async def show_and_stay(fleet: Fleet) -> int:
        await _show(fleet)
        if once:
            return 0
        print(await asyncio.to_thread(fleet.card), flush=True)
        await asyncio.Event().wait()
        return 0

    raise typer.Exit(asyncio.run(supervise(asked, show_and_stay)))


async def _show(fleet: Fleet) -> None:
    models = await asyncio.to_thread(fleet.models)
    names = demo_adapters()
    if missing := [name for name in names if name not in models]:
        raise Failure(f"not served: {', '.join(missing)}. `loraplex adapter list` says why.")
    answers = pair(list(fleet.tenants), [fleet.base, *names])
    asked = [(answer.tenant, answer.model) for answer in answers]
    before = await asyncio.to_thread(report.usage_rows, fleet)
    reasons = await asyncio.to_thread(report.expectations, fleet, asked)
    live = sys.stdout.isatty()
    note(f"asking {len(answers)} models at once through the OpenAI SDK: {QUESTION}")
    await ask_all(fleet, answers, live=live)
    print("" if live else report.side_by_side(answers), flush=True)
    print(flush=True)
    _check_different(answers)
    after = await _entered(fleet, _requests(before) + len(answers))
    for part in (
        report.service(answers),
        report.reasons(reasons),
        await asyncio.to_thread(report.residency, fleet),
        await asyncio.to_thread(report.quotas, fleet, answers),
        report.usage(after),
    ):
        print(part, end="\n\n", flush=True)


def _check_different(answers: Sequence[Answer]) -> None:
    texts = {answer.text.strip() for answer in answers}
    if "" in texts or len(texts) < len(answers):
        told = "\n".join(f"  {answer.model}: {answer.text!r}" for answer in answers)
        raise Failure(f"the answers are not all different; was an adapter not applied?\n{told}")


async def _entered(fleet: Fleet, requests: int) -> list[Row]:
    """The ledger once it counts that many requests: a record follows its reply by moments."""
    deadline = monotonic() + _LEDGER_S
    while True:
        rows = await asyncio.to_thread(report.usage_rows, fleet)
        if _requests(rows) >= requests:
            return rows
        if monotonic() > deadline:
            raise Failure(f"the ledger has {_requests(rows)} requests, not {requests}: {rows}")
        await asyncio.sleep(_LEDGER_POLL_S)


def _requests(rows: Sequence[Row]) -> int:
    return sum(row["requests"] for row in rows)
