"""Rotary frequencies: radians a position and pair of dimensions, and how long contexts bend them.

    f_i = theta^(-2 i / d), i < d / 2

A scaling changes the frequencies once for all positions, so that a cached key stays true whatever
comes after it. `dynamic` is refused for that reason: it picks its frequencies by the length of the
longest sequence in the batch, and keys already cached keep the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    @property
    def amplitude(self) -> float:
        return 1.0

    def bend(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the wavelengths that are longer than the trained context.

    Wavelengths beyond `trained / low` are stretched by `factor`, those under `trained / high` kept,
    those between mixed linearly in frequency.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_tokens: int

    @property
    def amplitude(self) -> float:
        return 1.0

    def bend(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.trained_tokens * frequencies / (2 * math.pi)  # over the trained context
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: dimensions that turn more than `fast` times over the trained context are kept, those
    that turn less than `slow` times stretched by `factor`, and between them a ramp in i. Cosine and
    sine grow by `amplitude`, which sharpens the softmax of the longer context."""

    factor: float
    trained_tokens: int
    fast: float
    slow: float
    amplitude: float
    whole_dimensions: bool  # the ramp's ends rounded outwards

    def bend(self, frequencies: Tensor, theta: float) -> Tensor:
        width = 2 * len(frequencies)
        low, high = (self._dimension(turns, width, theta) for turns in (self.fast, self.slow))
        if self.whole_dimensions:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(len(frequencies), dtype=torch.float32)
        stretched = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)

    def _dimension(self, turns: float, width: int, theta: float) -> float:
        """The i whose frequency makes so many turns over the trained context."""
        return width * math.log(self.trained_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))


Scaling = LinearScaling | Llama3Scaling | YarnScaling

_DEFAULT_THETA: Final = 10_000.0


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Tensor:
    """Radians a position, [d / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    return frequencies if scaling is None else scaling.bend(frequencies, theta)


def parse_rope(raw: Mapping[str, Any], context: int) -> tuple[float, Scaling | None]:
    """Theta and scaling of a `config.json`, in either spelling: `rope_theta` with `rope_scaling`,
    and the newer `rope_parameters`. Raises KeyError, TypeError or ValueError with the key."""
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    rope |= raw.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters differ from layer to layer, which is not computed")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor {partial}: only whole heads are rotated")
    theta = float(rope.get("rope_theta") or _DEFAULT_THETA)
    if not 1 < theta < math.inf:
        raise ValueError(f"rope_theta must be over 1, not {theta}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in _SCALINGS:
        known = ", ".join(sorted(_SCALINGS))
        raise ValueError(f"rope scaling of type {kind!r}: computed are {known} and none")
    factor = float(rope["factor"])
    if not 1 <= factor < math.inf:
        raise ValueError(f"the rope scaling's factor must be 1 or more, not {factor}")
    return theta, _SCALINGS[kind](rope, factor, context)


def _linear(rope: Mapping[str, Any], factor: float, context: int) -> Scaling:
    return LinearScaling(factor)


def _llama3(rope: Mapping[str, Any], factor: float, context: int) -> Scaling:
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        trained_tokens=_trained(rope, context),
    )


def _yarn(rope: Mapping[str, Any], factor: float, context: int) -> Scaling:
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise ValueError(f"{key} is set in the rope scaling, which is not computed")
    amplitude = rope.get("attention_factor")
    return YarnScaling(
        factor=factor,
        trained_tokens=_trained(rope, context),
        fast=float(rope.get("beta_fast") or 32),
        slow=float(rope.get("beta_slow") or 1),
        amplitude=0.1 * math.log(factor) + 1 if amplitude is None else float(amplitude),
        whole_dimensions=bool(rope.get("truncate", True)),
    )


def _trained(rope: Mapping[str, Any], context: int) -> int:
    return int(rope.get("original_max_position_embeddings") or context)


_SCALINGS: Final = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
