"""Weights: a small random base and adapters under given names, as folders that a replica serves.

It draws only tokens that are text by themselves, so that each is an event of its own on a stream
and the first event is the first token: dimension 0 of the residual stream is a constant, which
nothing writes to, and the head reads from it that other tokens are out of the question.

A process of its own writes them, for it imports tensors, which the load tests must not.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAKE: Final = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from replica.engine.tiny import tiny_adapter, tiny_model
base, adapters = Path(sys.argv[1]), Path(sys.argv[2])
layers, hidden, context = map(int, sys.argv[3:6])
config = tiny_model(base, layers=layers, hidden=hidden, inner=2 * hidden, context=context)
file = base / "model.safetensors"
tensors = load_file(file)
for name, tensor in tensors.items():
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor[0] = 0
tensors["model.embed_tokens.weight"][:, 0] = 4
tensors["lm_head.weight"][:, 0] = 0
tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
for token in range(config.vocab_size):
    text = tokenizer.decode([token])
    if not (text and text.isascii() and text.isprintable()):
        tensors["lm_head.weight"][token, 0] = -1000
save_file(tensors, file, metadata={"format": "pt"})
for name in sys.stdin.read().split("\\n"):
    tiny_adapter(adapters / name, config, seed=len(name) + sum(map(ord, name)))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the base; its heads are four, its feed-forward width is twice the hidden one."""

    layers: int = 2
    hidden: int = 64
    context: int = 512


async def make(base: Path, adapters: Path, names: Sequence[str], size: Size) -> None:
    """Write the base's folder, and one below `adapters` for each name."""
    words = ["-c", _MAKE, str(base), str(adapters)]
    words += [str(size.layers), str(size.hidden), str(size.context)]
    made = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=asyncio.subprocess.PIPE
    )
    await made.communicate("\n".join(names).encode())
    if made.returncode:
        raise RuntimeError("the small base was not made; is torch installed?")
