"""ModelConfig: what the `config.json` of a base says, checked on the way in.

What the forward pass cannot compute exactly is refused here, by the key that asks for it: a base
that is served almost right is worse than one that does not start. What differs between families is
in `family.py`; here it has become plain facts about this base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replica.engine.family import FAMILIES, SERVED, Family, Switch, Windows
from replica.engine.rope import Scaling, parse_rope

Q, K, V, O = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"  # noqa: E741
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"

_FULL, _SLIDING = "full_attention", "sliding_attention"
_QUANTISED: Final = ("quantization_config", "compression_config")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


class BadBase(ValueError):
    """The base folder cannot be served; the text names the file, the key and what would do."""


@dataclass(frozen=True, slots=True)
class Group:
    """Linear modules that read the same input, computed as one: `y = x Wᵀ`, slices side by side."""

    modules: tuple[str, ...]  # names inside a layer
    in_features: int
    out_features: tuple[int, ...]  # one a module, in the order of their columns in y
    bias: bool = False  # of the base, on every module: `y = x Wᵀ + b`

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
    rope_scaling: Scaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]  # generation_config.json's where it names any, else config.json's
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    sliding_layers: frozenset[int] = frozenset()  # the other layers see everything

    @property
    def window(self) -> int | None:
        """The window, where every layer has it: keys before it are read by no layer."""
        return self.sliding_window if len(self.sliding_layers) == self.num_layers else None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The four gathered groups of a layer, in the order they run."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inner = self.intermediate_size
        return (
            Group((Q, K, V), self.hidden_size, (heads, kv, kv), self.qkv_bias),
            Group((O,), heads, (self.hidden_size,), self.o_bias),
            Group((GATE, UP), self.hidden_size, (inner, inner), self.mlp_bias),
            Group((DOWN,), inner, (self.hidden_size,), self.mlp_bias),
        )

    @classmethod
    def from_dir(cls, folder: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the end tokens); raises BadBase."""
        raw = _json(folder / "config.json", required=True)
        ends = _json(folder / "generation_config.json", required=False)
        try:
            family = _family(raw)
            return _read(family, {**family.defaults, **raw}, ends)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else error
            raise BadBase(f"{folder / 'config.json'}: {what}") from error


def _read(family: Family, raw: Mapping[str, Any], ends: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    layers = _positive(raw, "num_hidden_layers")
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of {kv_heads} key heads")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd and cannot be rotated")
    context = _positive(raw, "max_position_embeddings", 2048)
    theta, scaling = parse_rope(raw, context)
    window = _window(family, raw, context)
    return ModelConfig(
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(raw, ends),
        qkv_bias=_switched(family.qkv_bias, raw),
        o_bias=_switched(family.o_bias, raw),
        mlp_bias=_switched(family.mlp_bias, raw),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=_sliding_layers(family, raw, window, layers),
    )


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


def _family(raw: Mapping[str, Any]) -> Family:
    """The family of a base that can be computed; ValueError says what cannot, and what can."""
    kind = raw.get("model_type")
    experts = [key for key in _EXPERTS if isinstance(raw.get(key), int) and raw[key] > 1]
    if experts:
        raise ValueError(
            f"{experts[0]} is {raw[experts[0]]}: a mixture of experts; served are {SERVED}"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        inside = " (its text_config may be, exported by itself)" if "text_config" in raw else ""
        raise ValueError(f"model_type {kind!r} is not served{inside}; served are {SERVED}")
    for key in _QUANTISED:
        if raw.get(key):
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise ValueError(
                f"{key} is set ({method}); convert the base to plain float weights without it"
            )
    family = FAMILIES[kind]
    named = raw.get("architectures") or [family.architecture]
    if family.architecture.lower() not in (str(name).lower() for name in named):
        raise ValueError(f"architectures {named}: a {kind} base is a {family.architecture}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r}: only silu is computed")
    return family


def _switched(switch: Switch, raw: Mapping[str, Any]) -> bool:
    return switch if isinstance(switch, bool) else bool(raw.get(switch, False))


def _window(family: Family, raw: Mapping[str, Any], context: int) -> int | None:
    """The window of the layers that have one, in tokens."""
    window = raw.get("sliding_window")
    if window is None or (family.windows == Windows.BY_LAYER and not raw.get("use_sliding_window")):
        return None
    if family.windows == Windows.NEVER:
        if window >= context:
            return None
        raise ValueError(
            f"sliding_window {window} is shorter than the context, and this model_type has no "
            "windows; remove it if the base was trained without"
        )
    return _positive(raw, "sliding_window")


def _sliding_layers(
    family: Family, raw: Mapping[str, Any], window: int | None, layers: int
) -> frozenset[int]:
    """By the family's own rule, or by `layer_types` where the family heeds it."""
    heeds = family.windows == Windows.BY_LAYER
    first = layers if window is None else raw["max_window_layers"] if heeds else 0
    own = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    kinds = list(raw.get("layer_types") or own)
    computed = {_FULL} if window is None else {_FULL, _SLIDING}
    if len(kinds) != layers or not computed.issuperset(kinds) or not (heeds or kinds == own):
        raise ValueError(
            f"layer_types {sorted(set(kinds))} for {layers} layers do not go with sliding_window "
            f"{window} in this model_type"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    named = generation.get("eos_token_id")
    named = raw.get("eos_token_id") if named is None else named
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
