"""`python -m replica.evaluation`: one adapter on the full and on the quantised base, over a text.

Both bases are read into this process; no replica is asked, so nothing that serves is disturbed and
an adapter can be judged before it is deployed. The text is cut into windows that do not overlap; in
each every token but the first is scored with what precedes it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row
from replica.engine.adapter_store import AdapterFolder, BadAdapter
from replica.engine.evaluate import Comparison, Tally, judge
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import BadBase, ModelConfig
from replica.engine.qlora import quantised_training
from replica.engine.quantised import Quantization
from replica.engine.runner import Runner
from replica.engine.sections import page_elements, pages_of
from replica.text import Vocabulary
from shared.ids import AdapterId

_PAGE_TOKENS: Final = 64
_TEXT_MAX_BYTES: Final = 16 << 20
_PLACES_AT_ONCE: Final = 64
"""Places whose logits are held, some six tables of them: 200 MB of a vocabulary of 128 k."""
_GREEDY: Final = Sampling(max_tokens=1, temperature=0)


class CannotEvaluate(ValueError):
    """The text says what is missing or wrong."""


def evaluate(
    *,
    base: Path,
    adapter: Path,
    text: str,
    quantization: Quantization,
    dtype: str = "float32",
    device: str = "cpu",
    window: int = 512,
    tokens_max: int = 4096,
    threads: int = 0,
) -> dict[str, Any]:
    """Raises BadBase, BadAdapter or CannotEvaluate."""
    config = ModelConfig.from_dir(base)
    window = min(window, config.max_position_embeddings)
    tokens = Vocabulary(base).encode(text, special=True)[:tokens_max]
    if len(tokens) < 2:
        raise CannotEvaluate("the text has fewer than two tokens: nothing follows anything")
    root = adapter.resolve()
    if not root.is_dir():
        raise CannotEvaluate(
            f"{adapter}: no such folder; name an adapter's folder as PEFT saves it"
        )
    store = AdapterFolder(root.parent, config.hidden_size, config, dtype, page_tokens=_PAGE_TOKENS)
    host = store.read(AdapterId(root.name))
    full, quantised = (
        _runner(base, host, device=device, dtype=dtype, threads=threads, kept=kept, window=window)
        for kept in (Quantization.NONE, quantization)
    )
    tally = Tally()
    for start in range(0, len(tokens) - 1, window):
        _compare(tally, full, quantised, tokens[start : start + window])
    about = {"adapter": root.name, "digest": host.digest, "base": str(base)}
    signs = list(quantised_training(root))
    return {
        **about,
        "quantization": str(quantization),
        **_measures(tally.result()),
        "quantised_training": signs,
    }


def _runner(
    base: Path,
    host: HostAdapter,
    *,
    device: str,
    dtype: str,
    threads: int,
    kept: Quantization,
    window: int,
) -> Runner:
    """With the adapter in slot 0, and pages for one window below its own."""
    config = ModelConfig.from_dir(base)
    pages = -(-window // _PAGE_TOKENS)
    held = pages_of(host.ranks, config, page_elements(config, _PAGE_TOKENS))
    runner = Runner(
        base_dir=base,
        device=device,
        dtype=dtype,
        slots=1,
        max_rank=host.rank,
        pages=pages + held,
        page_tokens=_PAGE_TOKENS,
        threads=threads,
        quantization=kept,
    )
    runner.load(0, host, range(pages, pages + held))
    return runner


def _measures(found: Comparison) -> dict[str, Any]:
    """JSON has no infinity: a measure without a finite value is null."""
    verdict = judge(found)
    measures = asdict(found) | {"perplexity_ratio": found.perplexity_ratio, "noise": found.noise}
    finite = {name: value if math.isfinite(value) else None for name, value in measures.items()}
    return {**finite, "verdict": str(verdict.trust), "reasons": list(verdict.reasons)}


def _compare(tally: Tally, full: Runner, quantised: Runner, tokens: tuple[int, ...]) -> None:
    """One window: a forward pass of each, then logits a few places at a time."""
    pages = tuple(range(-(-len(tokens) // _PAGE_TOKENS)))

    def hidden(runner: Runner, slot: int) -> Tensor:
        row = Row("eval", slot, 0, tokens, pages, samples=False, sampling=_GREEDY, drawn=0)
        return runner.hidden(row)

    p, q, b = hidden(full, 0), hidden(quantised, 0), hidden(full, BASE_SLOT)
    followed = torch.tensor(tokens[1:], device=p.device)
    for at in range(0, len(followed), _PLACES_AT_ONCE):
        targets = followed[at : at + _PLACES_AT_ONCE]
        here = slice(at, at + len(targets))
        tally.add(full.head(p[here]), quantised.head(q[here]), full.head(b[here]), targets)


def main(argv: list[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    try:
        answer = evaluate(
            base=args.base,
            adapter=args.adapter,
            text=_read(args.text),
            quantization=args.quantization,
            dtype=args.dtype,
            device=args.device,
            window=args.window,
            tokens_max=args.max_tokens,
            threads=args.threads,
        )
    except (BadBase, BadAdapter, CannotEvaluate) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m replica.evaluation",
        description="Compare an adapter on a quantised base with itself on the full one.",
        epilog="example: python -m replica.evaluation ./adapters/pirate --base ./base --text t.txt",
    )
    kinds = [kind for kind in Quantization if kind is not Quantization.NONE]
    parser.add_argument("adapter", type=Path, help="the adapter's folder")
    parser.add_argument("--base", type=Path, required=True, help="folder of the full base")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text of its domain")
    parser.add_argument(
        "--quantization", type=Quantization, choices=kinds, default=Quantization.FP8
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=_count, default=512, help="tokens seen at once")
    parser.add_argument(
        "--max-tokens", type=_count, default=4096, help="of the text, from its start"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's choice")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return value


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_TEXT_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotEvaluate(f"{path}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
