"""`loraplex adapter eval`: may an adapter be trusted on a quantised base?

The figures are made by `python -m replica.evaluation`, a process of its own: no replica is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.cli.extra import require_replica
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.output import JsonFlag, show_json

_VERDICTS: Final = {
    "trust": "trust it: on this base the adapter does what it does on the full one",
    "check": "check it: try it on more text of its own before it serves",
    "distrust": "do not trust it: serve it on the full base, or train it on this one",
}


class Quantization(StrEnum):
    FP8 = "fp8"


def evaluate(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter's folder.")],
    base: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the full base model.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text of the adapter's domain.")],
    quantization: Annotated[
        Quantization, typer.Option(help="How the base would be kept.")
    ] = Quantization.FP8,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda:0, …")] = "cpu",
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text, from its start.")] = 4096,
    as_json: JsonFlag = False,
) -> None:
    """Compare an adapter on a quantised base with itself on the full one, over a text.

    KL, top-1 agreement and perplexity, and whether to trust it. Both bases are read here.
    """
    require_replica()
    for name, path in (("ADAPTER", adapter), ("--base", base), ("--text", text)):
        if not path.exists():
            raise usage_failure(f"{name}: {path} does not exist.")
    found = _run(
        *(str(adapter), "--base", str(base), "--text", str(text)),
        *("--quantization", quantization.value, "--device", device),
        *("--max-tokens", str(max_tokens)),
    )
    if as_json:
        show_json(found)
        return
    print(describe(found))


def describe(found: dict[str, Any]) -> str:
    """What people read: the measures, what speaks against it, the verdict last."""
    kept = found["quantization"]
    lines = [
        f"{found['adapter']} on {found['base']}, {kept} against full, {found['tokens']:,} tokens",
        f"  KL full to {kept}        {_number(found['divergence'], 4)} nats a token",
        f"  of the adapter's effect  {_share(found['noise'])} (KL to the bare base "
        f"{_number(found['effect'], 4)})",
        f"  top-1 agreement          {found['agreement']:.1%}",
        f"  perplexity               {_number(found['perplexity_full'])} full, "
        f"{_number(found['perplexity_quantised'])} {kept}",
    ]
    lines += [f"  over the limit: {reason}" for reason in found["reasons"]]
    for sign in found["quantised_training"]:
        lines.append(f"  trained on a quantised base (QLoRA), says {sign}")
    if found["quantised_training"]:
        lines.append(
            "  Such an adapter also makes up for the error of the base it was trained on: neither "
            "side of this comparison is that base, so compare its answers with those it was "
            "accepted for."
        )
    lines.append(f"verdict: {_VERDICTS[found['verdict']]}")
    return "\n".join(lines)


def _run(*arguments: str) -> dict[str, Any]:
    """The JSON object that the evaluation prints. Raises Failure with what it said instead."""
    command = [sys.executable, "-m", "replica.evaluation", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise Failure(said[-1] if said else f"the evaluation ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _share(noise: float | None) -> str:
    return "no share of it" if noise is None else f"{noise:.1%}"


def _number(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"
