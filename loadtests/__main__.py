"""`python -m loadtests`: traces, plans, lessons, and a run of a trace through the cores."""

from __future__ import annotations

import typer

from loadtests import lesson_commands, trace_commands
from loadtests.plan_command import plan
from loadtests.simulate_command import simulate

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
app.add_typer(trace_commands.app, name="trace")
app.add_typer(lesson_commands.app, name="lesson")
app.command()(simulate)
app.command()(plan)


if __name__ == "__main__":
    app()
