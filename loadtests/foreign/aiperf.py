"""NVIDIA's aiperf against `loraplex up`: `python -m loadtests.foreign.aiperf -o FILE`.

Two profiles on one fleet, chat completions streamed, over the base and several adapters:

    schedule   a trace of ours as a Mooncake trace, replayed at its exact arrival times
    rate       aiperf's own prompts at a Poisson rate

aiperf (1.2 GB with what it needs) gets an environment of its own in the folder `--environment`.
What is written is aiperf's own summary of each, and whether any request failed: exit code 1 then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import orjson
import typer

from loadtests.foreign.environment import NotInstalled, environment
from loadtests.recipe import Recipe, generate
from loadtests.trace import Trace
from loadtests.up_fleet import BASE, Shape, UpFleet

_PACKAGE: Final = "aiperf==0.13.0"
_TENANT: Final = "aiperf"
_TIMES: Final = ("time_to_first_token", "inter_token_latency", "request_latency")
_OTHERS: Final = ("request_count", "error_request_count", "request_throughput",
                  "output_token_throughput", "output_sequence_length")  # fmt: skip


class Failed(Exception):
    """aiperf ended with an error; the text is the end of what it said."""


def mooncake(trace: Trace) -> bytes:
    """Its rows: milliseconds and lengths. It has no field for who asks for which model."""
    rows = (
        {
            "timestamp": round(row.at_s * 1e3),
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
        }
        for row in trace
    )
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def summary(told: Mapping[str, Any]) -> dict[str, Any]:
    """What we keep of `profile_export_aiperf.json`: units are in its own names."""
    kept: dict[str, Any] = {}
    for name in _TIMES:
        if one := told.get(name):
            kept[name] = {key: one.get(key) for key in ("unit", "avg", "p50", "p90", "p99", "max")}
    for name in _OTHERS:
        if one := told.get(name):
            kept[name] = one.get("avg")
    kept["errors"] = told.get("error_summary") or []
    return kept


async def measure(folder: Path, binary: Path, trace: Trace, shape: Shape) -> dict[str, Any]:
    names = sorted({str(row.adapter) for row in trace if row.adapter is not None})
    async with UpFleet(folder, shape, names) as fleet:
        key = (await fleet.register([_TENANT]))[_TENANT]
        await fleet.settled()
        (folder / "trace.jsonl").write_bytes(mooncake(trace))
        schedule = ["--input-file", str(folder / "trace.jsonl"), "--fixed-schedule"]
        schedule += ["--custom-dataset-type", "mooncake_trace"]
        rate = ["--request-rate", "4", "--request-count", "60", "--isl", "64", "--osl", "16"]
        profiles = {"schedule": schedule, "rate": rate}
        common = ["--url", fleet.url, "--api-key", key, "-m", ",".join([fleet.base, *names])]
        return {
            name: await _profile(binary, [*common, *options], folder, name)
            for name, options in profiles.items()
        }


async def _profile(binary: Path, options: Sequence[str], folder: Path, name: str) -> dict[str, Any]:
    out = folder / name
    words = ["profile", *options, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(folder / BASE), "--extra-inputs", "ignore_eos:true"]
    words += ["--random-seed", "1", "--ui", "none", "--artifact-dir", str(out)]
    process = await asyncio.create_subprocess_exec(
        str(binary / "aiperf"),
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "PYTHONPATH")},
    )
    said, _ = await process.communicate()
    found = out / "profile_export_aiperf.json"
    if process.returncode or not found.exists():
        raise Failed(said.decode(errors="replace")[-3000:])
    return summary(orjson.loads(found.read_bytes()))


def main(
    output: Annotated[Path | None, typer.Option("-o", help="JSON file.")] = None,
    where: Annotated[Path, typer.Option("--environment", help="Of aiperf.")] = Path("build/aiperf"),
    adapters: Annotated[int, typer.Option(min=1, help="Adapters.")] = 6,
    arrivals: Annotated[int, typer.Option(min=1, help="Of the schedule.")] = 120,
    rate: Annotated[float, typer.Option(help="Of the schedule, a second.")] = 4.0,
) -> None:
    """Run both profiles against a small fleet; exit code 1 when a request failed."""
    recipe = Recipe(
        arrivals=arrivals, rate_per_s=rate, adapters=adapters,
        prompt_tokens_mean=48, prompt_tokens_max=256, output_tokens_mean=16, output_tokens_max=64,
    )  # fmt: skip
    asked = {"adapters": adapters, "arrivals": arrivals, "rate_per_s": rate, "package": _PACKAGE}
    try:
        told = asyncio.run(_main(where, tuple(generate(recipe))))
    except (NotInstalled, Failed, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    failed = any(one["errors"] or one.get("error_request_count") for one in told.values())
    whole = {"command": "python -m loadtests.foreign.aiperf", **asked, "profiles": told}
    data = orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if output is not None:
        output.write_bytes(data)
    typer.echo(data)
    raise typer.Exit(int(failed))


async def _main(where: Path, trace: Trace) -> dict[str, Any]:
    binary = await environment(where, _PACKAGE)
    with TemporaryDirectory(prefix="aiperf-") as folder:
        return await measure(Path(folder), binary, trace, Shape(slots=4, host=16))


if __name__ == "__main__":
    typer.run(main)
