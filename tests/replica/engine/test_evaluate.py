"""What an adapter loses on a quantised base: the measures, the verdict, and the signs of QLoRA."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.evaluate import Comparison, Tally, Trust, judge
from replica.engine.qlora import quantised_training

GOOD = Comparison(1000, 0.01, 1.0, 0.97, 20.0, 20.1)


@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 20), cut=st.integers(0, 20))
def test_a_text_seen_in_stretches_measures_as_the_whole(seed: int, n: int, cut: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    p, q, b = torch.randn(3, n, 17, generator=dice) * 3
    targets = torch.randint(0, 17, (n,), generator=dice)
    whole, parts = Tally(), Tally()
    whole.add(p, q, b, targets)
    for stretch in (slice(0, cut), slice(cut, n)):
        parts.add(p[stretch], q[stretch], b[stretch], targets[stretch])
    one, other = whole.result(), parts.result()
    assert one.tokens == other.tokens == n
    assert one.agreement == other.agreement
    assert one.divergence == pytest.approx(other.divergence, rel=1e-6)
    kl = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert one.divergence == pytest.approx(float(kl), rel=1e-4)
    cross = torch.nn.functional.cross_entropy(q, targets)
    assert one.perplexity_quantised == pytest.approx(math.exp(float(cross)), rel=1e-4)


def test_equal_models_diverge_by_nothing() -> None:
    logits = torch.randn(5, 9)
    tally = Tally()
    tally.add(logits, logits, logits, torch.zeros(5, dtype=torch.long))
    found = tally.result()
    assert (found.divergence, found.effect, found.noise, found.agreement) == (0, 0, 0, 1)
    assert found.perplexity_ratio == 1


def test_a_text_without_anything_to_score_is_said() -> None:
    with pytest.raises(ValueError, match="fewer than two tokens"):
        Tally().result()


@pytest.mark.parametrize(
    ("changes", "trust", "said"),
    [
        ({}, Trust.TRUST, ()),
        ({"tokens": 50}, Trust.CHECK, ("50 tokens",)),
        ({"divergence": 0.15}, Trust.CHECK, ("KL 0.15",)),
        ({"divergence": 0.3}, Trust.DISTRUST, ("KL 0.3", "KL is 30%")),
        ({"agreement": 0.8}, Trust.CHECK, ("agreement 80.0%",)),
        ({"agreement": 0.5}, Trust.DISTRUST, ("agreement 50.0%",)),
        ({"perplexity_quantised": 21.5}, Trust.CHECK, ("perplexity 1.07",)),
        ({"perplexity_quantised": 40.0}, Trust.DISTRUST, ("perplexity 2 times",)),
        ({"effect": 0.03}, Trust.CHECK, ("KL is 33%",)),
        ({"effect": 0.0}, Trust.DISTRUST, ("KL is inf%",)),
        ({"divergence": math.nan}, Trust.DISTRUST, ("KL nan",)),
        ({"perplexity_quantised": math.inf}, Trust.DISTRUST, ("perplexity inf",)),
    ],
)
def test_the_verdict_names_what_is_over_its_limit(
    changes: dict[str, Any], trust: Trust, said: tuple[str, ...]
) -> None:
    verdict = judge(replace(GOOD, **changes))
    assert verdict.trust is trust
    assert len(verdict.reasons) >= len(said)
    assert all(any(text in reason for reason in verdict.reasons) for text in said)


@pytest.mark.parametrize(
    ("config", "card", "signs"),
    [
        ({"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}, "", 0),
        ({"base_model_name_or_path": "unsloth/llama-3-8b-bnb-4bit"}, "", 1),
        ({"base_model_name_or_path": "TheBloke/Llama-2-7B-GPTQ"}, "", 1),
        ({"base_model_name_or_path": "acme/8bitty-habit"}, "", 0),
        ({"loftq_config": {"loftq_bits": 4}}, "", 1),
        ({"loftq_config": {}}, "", 0),
        ({}, "- load_in_4bit: True\n- bnb_4bit_quant_type: nf4\n", 2),
        ({}, "- load_in_4bit: False\nWe never use load_in_4bit: True, mind.\n", 0),
    ],
)
def test_signs_of_training_on_a_quantised_base_are_found(
    config: dict[str, Any], card: str, signs: int, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text(card)
    assert len(quantised_training(tmp_path)) == signs


def test_a_folder_without_config_shows_no_sign(tmp_path: Path) -> None:
    assert quantised_training(tmp_path) == ()
    (tmp_path / "adapter_config.json").write_text("[not an object")
    assert quantised_training(tmp_path) == ()
