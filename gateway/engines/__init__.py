"""Servers of other makers as replicas: what each shows of itself, turned into our reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from gateway.engines.engine import Engine
from gateway.engines.lorax import LoRAX
from gateway.engines.openai import OpenAI
from gateway.engines.sglang import SGLang
from gateway.engines.trtllm import TensorRTLLM
from gateway.engines.vllm import VLLM

ENGINES: Final[Mapping[str, Callable[[], Engine]]] = MappingProxyType(
    {"openai": OpenAI, "vllm": VLLM, "sglang": SGLang, "lorax": LoRAX, "trtllm": TensorRTLLM}
)
"""By the `kind` of the configuration."""
