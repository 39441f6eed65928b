"""`loraplex adapter eval`: the real evaluation on a tiny base, and what people read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import adapter_eval
from gateway.cli.failure import USAGE, Failure

FOUND: dict[str, Any] = {
    "adapter": "pirate",
    "base": "./base",
    "quantization": "fp8",
    "tokens": 1289,
    "divergence": 0.0286,
    "effect": 1.937,
    "noise": 0.01477,
    "agreement": 0.886,
    "perplexity_full": 51.97,
    "perplexity_quantised": 52.42,
    "perplexity_ratio": 1.00866,
    "verdict": "trust",
    "reasons": [],
    "quantised_training": [],
}


def test_the_verdict_is_the_last_line() -> None:
    said = adapter_eval.describe(FOUND)
    assert said.splitlines()[-1].startswith("verdict: trust it")
    for figure in ("0.0286 nats", "88.6%", "51.970 full", "1,289 tokens"):
        assert figure in said


def test_what_speaks_against_it_is_said() -> None:
    sign = "README.md: bnb_4bit_quant_type: nf4"
    found = FOUND | {"verdict": "distrust", "reasons": ["KL 0.9 nats"], "noise": None}
    said = adapter_eval.describe(found | {"quantised_training": [sign]})
    assert "over the limit: KL 0.9 nats" in said
    assert f"QLoRA), says {sign}" in said
    assert said.splitlines()[-1].startswith("verdict: do not trust it")


def test_a_measure_that_is_not_finite_is_said_and_not_printed_as_a_number() -> None:
    measures = ("divergence", "effect", "noise", "perplexity_full", "perplexity_quantised")
    said = adapter_eval.describe(FOUND | {"verdict": "distrust"} | dict.fromkeys(measures))
    assert said.count("not finite") == 4


def test_it_evaluates_a_real_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from replica.engine.tiny import tiny_adapter, tiny_model

    tiny_adapter(tmp_path / "ada", tiny_model(tmp_path / "base"), seed=1)
    (tmp_path / "t.txt").write_text("once upon a time " * 8)
    adapter_eval.evaluate(
        tmp_path / "ada", base=tmp_path / "base", text=tmp_path / "t.txt", as_json=True
    )
    assert json.loads(capsys.readouterr().out)["adapter"] == "ada"


def test_what_is_not_there_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"--base: .*nowhere does not exist") as caught:
        adapter_eval.evaluate(tmp_path, base=tmp_path / "nowhere", text=tmp_path)
    assert caught.value.code == USAGE


def test_what_the_evaluation_refuses_is_the_failures_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("once upon a time")
    with pytest.raises(Failure, match=r"config\.json: no such file"):
        adapter_eval.evaluate(tmp_path, base=tmp_path, text=tmp_path / "t.txt")
