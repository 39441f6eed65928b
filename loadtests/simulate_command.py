"""`loraplex simulate`: the production cores of gateway and replica under virtual time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from gateway.config import GatewayConfig
from loadtests import trace as traces
from loadtests.contest import POLICIES, Setting, contest, known, row
from loadtests.faults import parse
from loadtests.prices import Prices
from loadtests.recipe import Recipe
from loadtests.recipe import generate as generate_trace
from loadtests.run import Run
from loadtests.run_page import run_page
from loadtests.trace import Trace
from loadtests.usage import JsonFlag, or_usage, usage, write
from shared.settings import load as load_settings


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="JSON lines of arrivals.")
    ] = None,
    zipf: Annotated[
        float | None, typer.Option(metavar="S", help="No trace: make one of this skew.")
    ] = None,
    adapters: Annotated[int, typer.Option(min=1, help="Of a made trace.")] = 500,
    load: Annotated[
        str, typer.Option(metavar="L,…", help="Of a made trace: parts of what the fleet can do.")
    ] = "0.75,0.97",
    arrivals: Annotated[int, typer.Option(min=1, help="Of a made trace.")] = 20_000,
    tenants: Annotated[int, typer.Option(min=1, help="Of a made trace. 1: routing alone.")] = 1,
    seed: Annotated[int, typer.Option(help="Of a made trace.")] = 1,
    policy: Annotated[str, typer.Option(metavar="P,…", help=f"Of {', '.join(POLICIES)}.")] = "",
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 6,
    slots: Annotated[int, typer.Option(min=1, help="Slots a replica has.")] = 16,
    host: Annotated[int, typer.Option(min=1, help="Adapters a replica keeps in memory.")] = 128,
    capacity: Annotated[int, typer.Option(min=1, help="Sequences a replica runs at once.")] = 16,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="P=V", help="step_s, row_s, disk_load_s, … of loadtests/prices.py."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="F", help="lost:R@S, added:R@S, drained:R@S, slow:R@S:FACTOR."),
    ] = None,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds before the trace begins.")] = 30,
    skip: Annotated[float, typer.Option(min=0, max=0.9, help="First part not counted.")] = 0.1,
    config: Annotated[
        Path | None, typer.Option(help="A gateway's file: its router, placement and queue.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", help="Write the JSON here too.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of the last run here.")] = None,
    json: JsonFlag = False,
) -> None:
    """Run a trace through the cores of gateway and replica, and through what others do.

    Example: loraplex simulate --zipf 1.1 --adapters 500 --replicas 6 --slots 16 --host 128
    """
    if (trace is None) == (zipf is None):
        usage("give either a TRACE or --zipf S")
    places = Prices(slots=slots, host_max=max(host, slots), capacity=capacity)
    prices = or_usage(lambda: places.changed(price or ()))
    setting = Setting(
        trace=(),
        replicas=replicas,
        prices=prices,
        config=or_usage(lambda: load_settings(GatewayConfig, config)),
        faults=or_usage(lambda: [parse(text) for text in fault or ()]),
        warm_up_s=warm_up,
        skip=skip,
    )
    names = or_usage(lambda: known(policy))
    law = partial(Recipe, seed=seed, arrivals=arrivals, adapters=adapters, tenants=tenants)
    made = _traces(trace, or_usage(lambda: law(skew=zipf or 0.0)), load, (replicas, prices))
    told = [one for title, rows in made for one in _told(title, rows, setting, names, json, html)]
    _keep(setting, told, output, json)


def _keep(setting: Setting, told: list[dict[str, Any]], output: Path | None, json: bool) -> None:
    """The data, with what is needed to make it again."""
    data = orjson.dumps(
        {
            "command": " ".join(["loraplex", *sys.argv[1:]]),
            "replicas": setting.replicas,
            "prices": asdict(setting.prices),
            "skip": setting.skip,
            "runs": told,
        },
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    if output is not None:
        write(data, output)
    if json:
        write(data, None)


def _told(
    title: str, rows: Trace, setting: Setting, names: list[str], json: bool, html: Path | None
) -> Iterator[dict[str, Any]]:
    """The figures of each policy; the table is printed as it grows."""
    _say(json, title)
    factor = setting.config.router.load_factor
    for at, (name, run) in enumerate(contest(replace(setting, trace=rows), names)):
        figures = run.figures(load_factor=factor, skip=setting.skip)
        cells = row(name, figures)
        if not at:
            _say(json, _line(list(cells)))
        _say(json, _line(list(cells.values())))
        if html is not None:
            write(_page(f"{title}, {name}", run, setting).encode(), html)
        yield {"trace": title, "policy": name, **figures}


def _page(title: str, run: Run, setting: Setting) -> str:
    prices = setting.prices
    notes = [
        f"Simulated: {setting.replicas} replicas of {prices.slots} slots, {prices.host_max} "
        f"adapters in host memory and {prices.capacity} places each; the first {setting.skip:.0%} "
        "of the time is left out below.",
        "Prices: " + ", ".join(f"{name} {value:g}" for name, value in asdict(prices).items()),
    ]
    return run_page(run, title=f"Simulated: {title}", notes=notes, skip=setting.skip)


def _traces(
    path: Path | None, recipe: Recipe, load: str, fleet: tuple[int, Prices]
) -> list[tuple[str, Trace]]:
    if path is not None:
        return [(path.name, or_usage(lambda: traces.read(path)))]
    made = []
    for part in or_usage(lambda: [float(text) for text in load.split(",")]):
        title, asked = or_usage(partial(_at_load, recipe, part, fleet))
        made.append((title, tuple(generate_trace(asked))))
    return made


def _at_load(recipe: Recipe, part: float, fleet: tuple[int, Prices]) -> tuple[str, Recipe]:
    """At a part of the rate that the fleet can bear when all its places are taken."""
    replicas, prices = fleet
    most = replicas * prices.requests_per_s(
        prompt_tokens=recipe.prompt_tokens_mean, output_tokens=recipe.output_tokens_mean
    )
    rate = part * most
    whose = f"zipf {recipe.skew}, {recipe.adapters} adapters"
    if recipe.tenants > 1:
        whose += f" of {recipe.tenants} tenants"
    return f"{whose}, {rate:.1f}/s = {part:.0%} of {most:.1f}/s", replace(recipe, rate_per_s=rate)


def _line(cells: list[str]) -> str:
    return f"{cells[0]:<14}" + "".join(f"{cell:>12}" for cell in cells[1:])


def _say(json: bool, line: str) -> None:
    if not json:
        typer.echo(line)
