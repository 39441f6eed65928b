"""`python -m replica.bench.batching`: the field's lesson on batching, worked with our own kernels.

One layer, one projection y = x Wᵀ with W [d, d]; `adapters` of rank r; a batch whose rows name them
at random (numpy's default_rng(42), so that anybody draws the same). Two ways to the same outputs:

    merged     for each adapter of the batch in turn W' = W + s B A, then its rows through W'
    gathered   all rows through W at once, then each row's own (x Aᵀ) Bᵀ beside it

An adapter adds 2 r d weights and as many products a row to the base's d²: 2r/d of it. The gathered
way is `engine/kernels/reference.py`, through the pages of an arena as in a step of the engine; the
merged way is `engine/merged.py`, what `--merged` serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import Tensor

from replica.core.segments import Segments
from replica.engine import kernels
from replica.engine.arena import Arena
from replica.engine.host_adapter import HostAdapter, pack
from replica.engine.merged import Merge
from replica.engine.model_config import ModelConfig
from replica.engine.sections import page_elements, pages_of
from shared.clock import monotonic
from shared.ids import AdapterId

_SEED: Final = 42
_SCALING: Final = 2.0
_REPEATS: Final = 5
_ITEM_BYTES: Final = 2  # as adapters and bases are kept: 16 bits a weight
_HEAD_DIM: Final = 128
_PAGE_TOKENS: Final = 16
_PROJECTION: Final = 1  # the group of one module [d, d]: o_proj
_TOLERANCE: Final = 1e-4  # of float32, in outputs of size one

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    width: int = 2048  # d
    rank: int = 16
    adapters: int = 50
    batch: int = 64

    def __post_init__(self) -> None:
        if self.width % _HEAD_DIM:
            raise ValueError(f"the width is a multiple of {_HEAD_DIM}, not {self.width}")

    @property
    def config(self) -> ModelConfig:
        """One layer whose output projection is the W of the lesson."""
        heads = self.width // _HEAD_DIM
        return ModelConfig(
            vocab_size=16,
            hidden_size=self.width,
            intermediate_size=_HEAD_DIM,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=_HEAD_DIM,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            rope_scaling=None,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            eos_token_ids=frozenset(),
        )

    def wanted(self) -> list[int]:
        """Which adapter each row names, in order of the adapters: rows of one lie together."""
        drawn = np.random.default_rng(_SEED).integers(0, self.adapters, self.batch)
        return sorted(int(number) for number in drawn)


@app.command(epilog="Example: loraplex lesson batching --rank 64")
def main(
    width: Annotated[int, typer.Option(min=_HEAD_DIM, help="d of W [d, d].")] = 2048,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Of each adapter.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, max=1000, help="To draw from.")] = 50,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Rows.")] = 64,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rows of many adapters in one batch: the same outputs, one product with the base for all."""
    try:
        setting = Setting(width=width, rank=rank, adapters=adapters, batch=batch)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    told = lesson(setting)
    print(json.dumps(told, indent=2) if json_ else _text(setting, told))
    if not told["same_outputs"]:
        raise typer.Exit(1)


def lesson(setting: Setting) -> dict[str, Any]:
    """The figures; times in milliseconds, medians of a few runs."""
    config, wanted = setting.config, setting.wanted()
    dice = torch.Generator().manual_seed(_SEED)
    d = setting.width
    W = torch.randn(d, d, generator=dice) / d**0.5
    x = torch.randn(setting.batch, d, generator=dice)
    hosts = {number: _adapter(number, setting, dice) for number in sorted(set(wanted))}
    slots = {number: slot for slot, number in enumerate(hosts)}
    arena = _arena(list(hosts.values()), setting)
    layout = _segments([slots[number] for number in wanted])
    gathered, gathered_ms = _timed(lambda: _gathered(x, W, layout, arena, config))
    merged, merged_ms = _timed(lambda: _merged(x, W, layout, list(hosts.values()), config))
    difference = float((gathered - merged).abs().max())
    return {
        "width": d,
        "rank": setting.rank,
        "adapters": setting.adapters,
        "batch": setting.batch,
        "distinct": len(hosts),
        "same_outputs": difference <= _TOLERANCE,
        "largest_difference": difference,
        "extra_flops_share": 2 * setting.rank / d,
        "adapter_bytes": 2 * setting.rank * d * _ITEM_BYTES,
        "base_bytes": d * d * _ITEM_BYTES,
        "merged_ms": merged_ms,
        "gathered_ms": gathered_ms,
    }


def _gathered(x: Tensor, W: Tensor, layout: Segments, arena: Arena, config: ModelConfig) -> Tensor:
    y = x @ W.t()
    plan = kernels.plan(layout, arena)
    assert plan is not None  # every row has an adapter
    plan.add(x, y, 0, _PROJECTION, config.groups[_PROJECTION])
    return y


def _merged(
    x: Tensor, W: Tensor, layout: Segments, hosts: Sequence[HostAdapter], config: ModelConfig
) -> Tensor:
    y = torch.empty_like(x)
    spans = zip(layout.starts, layout.starts[1:], layout.slots, strict=False)
    for start, end, slot in spans:
        folded = W.clone()
        Merge(hosts[slot], config).fold(folded, 0, _PROJECTION)
        y[start:end] = x[start:end] @ folded.t()
    return y


def _adapter(number: int, setting: Setting, dice: torch.Generator) -> HostAdapter:
    d, rank = setting.width, setting.rank
    A = torch.randn(rank, d, generator=dice) / d**0.5
    B = torch.randn(d, rank, generator=dice) / rank**0.5
    name = setting.config.groups[_PROJECTION].modules[0]
    pairs = {(0, name): (A, B, _SCALING)}
    return pack(AdapterId(f"adapter-{number}"), "", setting.config, pairs, torch.float32)


def _arena(hosts: Sequence[HostAdapter], setting: Setting) -> Arena:
    """A slot for each, in pages of its own."""
    elements = page_elements(setting.config, _PAGE_TOKENS)
    counts = [pages_of(host.ranks, setting.config, elements) for host in hosts]
    arena = Arena(
        config=setting.config,
        pages=sum(counts),
        page_tokens=_PAGE_TOKENS,
        slots=len(hosts),
        max_rank=setting.rank,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    first = 0
    for slot, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        arena.place(slot, host, range(first, first + count))
        first += count
    return arena


def _segments(slots: Sequence[int]) -> Segments:
    """Of rows whose slots are in order."""
    starts = [at for at, slot in enumerate(slots) if at == 0 or slot != slots[at - 1]]
    return Segments(starts=(*starts, len(slots)), slots=tuple(slots[at] for at in starts))


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its result and its usual time in milliseconds; the first run only warms up."""
    result, took = work(), []
    for _ in range(_REPEATS):
        begun = monotonic()
        work()
        took.append(monotonic() - begun)
    return result, 1e3 * median(took)


def _text(setting: Setting, told: dict[str, Any]) -> str:
    outputs = "the same outputs" if told["same_outputs"] else "OTHER OUTPUTS"
    return "\n".join(
        (
            f"W [{setting.width}, {setting.width}], {setting.adapters} adapters of rank "
            f"{setting.rank}, a batch of {setting.batch} rows that names {told['distinct']} of "
            "them.",
            "",
            f"merged one after another  {told['merged_ms']:>8.2f} ms",
            f"gathered in one batch     {told['gathered_ms']:>8.2f} ms",
            "",
            f"Merged and gathered give {outputs} (largest difference "
            f"{told['largest_difference']:.1g}).",
            f"An adapter costs {100 * told['extra_flops_share']:.2f} % extra FLOPs (2r/d), and",
            f"{told['adapter_bytes'] / 1e6:.2f} MB an adapter-layer against "
            f"{told['base_bytes'] / 1e6:.1f} MB of the base's.",
        )
    )


if __name__ == "__main__":
    app()
