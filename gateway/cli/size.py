"""`loraplex size`: how big is an adapter of a rank, beside the base it adapts.

For each adapted projection y = x Wᵀ with W [out, in], an adapter of rank r adds A [r, in] and
B [out, r]: r·(in + out) weights beside in·out, a share of r·(1/in + 1/out). On 4096 x 4096 rank 16
adds 131,072 weights to 16,777,216, which is 0.78 %.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.cli.failure import usage_failure
from gateway.cli.output import JsonFlag, show_json, table

LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SHARE: Final = "share_of_projection"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def weight_bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class Shapes:
    """What of a Llama-family config decides the size: [out, in] of each linear, and the rest."""

    layers: int
    linears: dict[str, tuple[int, int]]
    other_weights: int  # embedding, head and norms: never adapted here

    @property
    def base_weights(self) -> int:
        return self.other_weights + self.layers * sum(o * i for o, i in self.linears.values())


def size(
    model_config: Annotated[
        Path, typer.Option(metavar="F", help="The base's config.json, or its folder.")
    ],
    rank: Annotated[int, typer.Option(metavar="R", min=1, help="Rank of the adapter.")],
    targets: Annotated[
        str, typer.Option(metavar="NAMES", help="Adapted projections, separated by commas.")
    ] = ",".join(LINEARS),
    dtype: Annotated[Dtype, typer.Option(help="Type of the adapter's weights.")] = Dtype.BFLOAT16,
    as_json: JsonFlag = False,
) -> None:
    """How big is an adapter, beside its base.

    Bytes and share of each projection it adapts, and in all of the base.
    """
    names = [name.strip() for name in targets.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(LINEARS)):
        raise usage_failure(f"--targets: no {', '.join(unknown)}; there are {', '.join(LINEARS)}.")
    shapes = read_shapes(model_config)
    answer = measure(shapes, names, rank, dtype.weight_bytes)
    if as_json:
        show_json(answer)
        return
    columns = ["projection", "out", "in", "layers", "weights", "bytes", _SHARE]
    rows = [row | {_SHARE: percent(row[_SHARE])} for row in answer["projections"]]
    print(table(rows, columns))
    print(
        f"\nAn adapter of rank {rank} in {dtype}: {answer['weights']:,} weights, "
        f"{answer['bytes'] / 1e6:.2f} MB.\n"
        f"That is {percent(answer['share_of_adapted'])} of the projections it adapts and "
        f"{percent(answer['share_of_base'])} of the base ({answer['base_weights']:,} weights)."
    )


def measure(shapes: Shapes, targets: list[str], rank: int, weight_bytes: int) -> dict[str, Any]:
    """Sizes of one adapter; shares are fractions of what their name says: one
    projection in all layers, all that is adapted, the whole base."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(targets):
        out, width = shapes.linears[name]
        weights = rank * (out + width) * shapes.layers
        rows.append(
            {
                "projection": name,
                "out": out,
                "in": width,
                "layers": shapes.layers,
                "weights": weights,
                "bytes": weights * weight_bytes,
                _SHARE: weights / (out * width * shapes.layers),
            }
        )
    total = sum(row["weights"] for row in rows)
    adapted = sum(row["out"] * row["in"] * row["layers"] for row in rows)
    return {
        "rank": rank,
        "projections": rows,
        "weights": total,
        "bytes": total * weight_bytes,
        "base_weights": shapes.base_weights,
        "share_of_adapted": total / adapted,
        "share_of_base": total / shapes.base_weights,
    }


def read_shapes(path: Path) -> Shapes:
    """Raises Failure that names the file and the key."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise usage_failure(f"--model-config {file}: {error.strerror}.") from error
    except ValueError as error:
        raise usage_failure(f"--model-config {file}: not JSON: {error}.") from error
    try:
        hidden, inner = int(raw["hidden_size"]), int(raw["intermediate_size"])
        heads, layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
        vocabulary = int(raw["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise usage_failure(
            f"--model-config {file}: a Llama-family config has {error}, this one does not."
        ) from error
    width = int(raw.get("head_dim") or hidden // heads)
    queries, keys = heads * width, int(raw.get("num_key_value_heads") or heads) * width
    tied = bool(raw.get("tie_word_embeddings", False))
    return Shapes(
        layers=layers,
        linears={
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        },
        other_weights=vocabulary * hidden * (1 if tied else 2) + hidden * (2 * layers + 1),
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
