"""ModelConfig: what the `config.json` of a Llama-family base says, checked on the way in.

What the forward pass cannot compute exactly is refused here, by the key that asks for it: a base
that is served almost right is worse than one that does not start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FAMILIES: Final = frozenset({"llama", "mistral"})
"""Values of `model_type` whose layers are exactly those of `model.py`."""

Q, K, V, O = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"  # noqa: E741
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"


class BadBase(ValueError):
    """The base folder cannot be served; the text names the file, the key and what would do."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the rotary wavelengths that are longer than the trained context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """Linear modules that read the same input, computed as one: `y = x Wᵀ`, slices side by side."""

    modules: tuple[str, ...]  # names inside a layer
    in_features: int
    out_features: tuple[int, ...]  # one a module, in the order of their columns in y

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Where each module's output lies in y."""
        spans, at = [], 0
        for width in self.out_features:
            spans.append((at, at + width))
            at += width
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None  # linear scaling and its like are refused
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[
        int
    ]  # of generation_config.json where it names any, else of config.json

    @property
    def groups(self) -> tuple[Group, ...]:
        """The four gathered groups of a layer, in the order they run."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inner = self.intermediate_size
        return (
            Group((Q, K, V), self.hidden_size, (heads, kv, kv)),
            Group((O,), heads, (self.hidden_size,)),
            Group((GATE, UP), self.hidden_size, (inner, inner)),
            Group((DOWN,), inner, (self.hidden_size,)),
        )

    @classmethod
    def from_dir(cls, folder: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the end tokens); raises BadBase."""
        raw = _json(folder / "config.json", required=True)
        _refuse_what_we_cannot_compute(raw, folder)
        try:
            heads = _positive(raw, "num_attention_heads")
            rope, scaling = _rope(raw)
            return cls(
                vocab_size=_positive(raw, "vocab_size"),
                hidden_size=_positive(raw, "hidden_size"),
                intermediate_size=_positive(raw, "intermediate_size"),
                num_layers=_positive(raw, "num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=_positive(raw, "num_key_value_heads", heads),
                head_dim=_positive(raw, "head_dim", raw["hidden_size"] // heads),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=rope,
                rope_scaling=scaling,
                max_position_embeddings=_positive(raw, "max_position_embeddings", 2048),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                eos_token_ids=_eos(raw, _json(folder / "generation_config.json", required=False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadBase(f"{folder / 'config.json'}: {error}") from error


def _json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise BadBase(
            f"{path}: no such file; a base is a Hugging Face folder with config.json, "
            "tokenizer.json and safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise BadBase(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise BadBase(f"{path}: expected a JSON object")
    return raw


def _refuse_what_we_cannot_compute(raw: dict[str, Any], folder: Path) -> None:
    path = folder / "config.json"
    if raw.get("model_type") not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise BadBase(f"{path}: model_type {raw.get('model_type')!r} is not one of {known}")
    if raw.get("hidden_act", "silu") != "silu":
        raise BadBase(f"{path}: hidden_act {raw['hidden_act']!r}: only silu is computed")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if raw.get(key):
            raise BadBase(f"{path}: {key} is set; convert the base to plain weights without it")
    window = raw.get("sliding_window")
    if window is not None and window < raw.get("max_position_embeddings", 0):
        raise BadBase(f"{path}: sliding_window {window} is shorter than the context; not computed")


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Reads both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`."""
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    rope |= raw.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope scaling of type {kind!r}: only llama3 and none are computed")
    return theta, Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        trained_tokens=int(rope["original_max_position_embeddings"]),
    )


def _eos(raw: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    named = generation.get("eos_token_id")
    named = raw.get("eos_token_id") if named is None else named
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
