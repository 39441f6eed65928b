"""Signs that an adapter was trained on a quantised base (QLoRA: NF4 weights, arXiv:2305.14314).

Such an adapter has learnt to make up for that base's error as well; on the full base, or on one
quantised another way, the same correction is an error of its own. Nothing in PEFT's format says how
the base was kept, so these are hints: the base's name, and what PEFT writes into the model card.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

_READ_MAX_BYTES: Final = 1 << 16
_NAME: Final = re.compile(r"(?i)(?:^|[-_/.])(bnb|nf4|fp4|[48]-?bit|int[48]|gptq|awq)(?:$|[-_/.])")
_CARD: Final = re.compile(
    r"(?im)^[\s\-*]*(bnb_4bit_quant_type:\s*\w+|_?load_in_[48]bit:\s*true|quant_method:\s*\w+)\s*$"
)


def quantised_training(folder: Path) -> tuple[str, ...]:
    """Each sign with where it was found; empty without any. A missing file says nothing."""
    signs: list[str] = []
    config = _object(_head(folder / "adapter_config.json"))
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and _NAME.search(base):
        signs.append(f"adapter_config.json: base_model_name_or_path {base}")
    if config.get("loftq_config"):
        signs.append("adapter_config.json: loftq_config")
    card = _head(folder / "README.md")
    signs += dict.fromkeys(f"README.md: {found.group(1)}" for found in _CARD.finditer(card))
    return tuple(signs)


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
