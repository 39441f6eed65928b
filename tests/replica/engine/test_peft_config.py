"""The config's scaling rules against PEFT's own, and patterns that must not run away."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replica.engine.bad_adapter import BadAdapter
from replica.engine.peft_config import PeftConfig

PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 11)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")
]
KEYS = [
    *{"q_proj", "proj", "down_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "mlp"},
    *{r"layers\.1\.mlp\..*", r"layers\.\d+\.mlp\.up_proj", "(q|o)_proj", ".*", "^model.*down_proj"},
    *{"model.layers.11.mlp.down_proj", "up_pro", "1.mlp.up_proj", "[qo]_proj", "x"},
]


def _parse(**fields: Any) -> PeftConfig:
    return PeftConfig.parse(json.dumps({"peft_type": "LORA", **fields}).encode(), ())


@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64), max_size=4),
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64), max_size=4),
    st.sampled_from(PATHS),
)
def test_patterns_choose_what_peft_chooses(
    ranks: dict[str, int], alphas: dict[str, int], path: str
) -> None:
    from peft.utils.other import get_pattern_key

    config = _parse(r=7, lora_alpha=5, rank_pattern=ranks, alpha_pattern=alphas)
    rank = ranks.get(get_pattern_key(ranks.keys(), path), 7)
    alpha = alphas.get(get_pattern_key(alphas.keys(), path), 5)
    assert config.rank_of(path) == rank
    assert config.scaling_of(path, rank) == pytest.approx(alpha / rank)
    rooted = _parse(r=7, lora_alpha=5, alpha_pattern=alphas, use_rslora=True)
    assert rooted.scaling_of(path, rank) == pytest.approx(alpha / rank**0.5)


def test_absent_fields_have_pefts_defaults() -> None:
    from peft import LoraConfig

    theirs, ours = LoraConfig(), _parse()
    assert (ours.rank, ours.alpha, ours.rslora) == (theirs.r, theirs.lora_alpha, False)


def test_every_default_of_peft_is_taken() -> None:
    from peft import LoraConfig

    fields = {key: getattr(v, "value", v) for key, v in LoraConfig().to_dict().items()}
    assert _parse(**fields).rank == 8


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*)*x",
        "(.|..)" * 12,
        ".*.*.*.*x",
        "(a|aa)+",
        "(?=.*)q_proj",
        r"(q)\1",
        "q" * 500,
        "(?:x*)*",
    ],
)
def test_a_pattern_that_could_run_away_is_refused(pattern: str) -> None:
    with pytest.raises(BadAdapter, match="bad_config:rank_pattern"):
        _parse(rank_pattern={pattern: 4})


@example("[[a]]")  # Python warns of it
@given(st.text(alphabet="ab.*+?()|[]{}\\d^$1q_", max_size=40))
def test_every_pattern_that_is_taken_is_quick(pattern: str) -> None:
    try:
        config = _parse(rank_pattern={pattern: 4})
    except BadAdapter:
        return
    begun = time.perf_counter()
    config.rank_of("model.layers.11.self_attn." + "ab" * 20)
    assert time.perf_counter() - begun < 0.5


def test_equal_computations_have_equal_canonical_bytes() -> None:
    same = _parse(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"])
    assert _parse(r=4, lora_alpha=8.0).canonical() == same.canonical()
    assert _parse(r=4, lora_alpha=9).canonical() != same.canonical()
