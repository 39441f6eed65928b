"""Family: what the layers of one `model_type` have that Llama's have not; and the table of them.

Every family here is the decoder of `model.py`; they differ only in what this table names. A switch
is true, false, or the name of the key in `config.json` that decides. `defaults` are the values that
the family's config class fills in for keys that a file leaves out, where they are not Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

Switch = bool | str


class Windows(StrEnum):
    """Which layers see only the last `sliding_window` tokens."""

    NEVER = "never"
    ALWAYS = "always"  # all of them, unless `sliding_window` is null
    BY_LAYER = "by layer"  # `layer_types`, or those from `max_window_layers` on


@dataclass(frozen=True, slots=True)
class Family:
    models: str  # whose weights have this type, for people
    architecture: str  # the class that `transformers` makes of it
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: bool = False  # each head of q and k has its RMS norm, before the rotation
    windows: Windows = Windows.NEVER
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(
            models="Llama 2 and 3, SmolLM2",
            architecture="LlamaForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        "mistral": Family(
            models="Mistral",
            architecture="MistralForCausalLM",
            windows=Windows.ALWAYS,
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "sliding_window": 4096,
            },
        ),
        "qwen2": Family(
            models="Qwen2 and 2.5",
            architecture="Qwen2ForCausalLM",
            qkv_bias=True,
            windows=Windows.BY_LAYER,
            defaults={
                "num_key_value_heads": 32,
                "max_position_embeddings": 32_768,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
        ),
        "qwen3": Family(
            models="Qwen3",
            architecture="Qwen3ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=Windows.BY_LAYER,
            defaults={
                "head_dim": 128,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32_768,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
        ),
    }
)
"""By `model_type`, as `config.json` has it."""

SERVED: Final = ", ".join(f"{kind} ({family.models})" for kind, family in FAMILIES.items())
