"""The evaluation as a program, on a tiny base: its figures are those of transformers and PEFT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.evaluation import evaluate, main
from replica.text import Vocabulary

TEXT = "once upon a time there was an adapter in a slot, beside a page of keys and values. " * 4


@pytest.mark.filterwarnings("ignore")
def test_the_full_side_is_the_reference(tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from replica.engine.quantised import Quantization

    found = evaluate(
        base=tiny / "base",
        adapter=tiny / "adapters" / "bob",
        text=TEXT,
        quantization=Quantization.FP8,
        window=100,
    )
    tokens = torch.tensor(Vocabulary(tiny / "base").encode(TEXT, special=True))
    base = AutoModelForCausalLM.from_pretrained(tiny / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tiny / "adapters" / "bob").eval()
    lost, effect, scored = 0.0, 0.0, 0
    for window in tokens.split(100):
        with torch.inference_mode():
            p = model(input_ids=window[None]).logits[0, :-1].log_softmax(-1)
            with model.disable_adapter():
                b = model(input_ids=window[None]).logits[0, :-1].log_softmax(-1)
        lost -= float(p.gather(-1, window[1:, None]).sum())
        effect += float((p.exp() * (p - b)).sum())
        scored += len(window) - 1
    assert found["tokens"] == scored
    assert found["perplexity_full"] == pytest.approx(math.exp(lost / scored), rel=1e-4)
    assert found["effect"] == pytest.approx(effect / scored, rel=1e-3)
    assert 0 < found["divergence"] < found["effect"]


def test_the_program_prints_one_json_object(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    arguments = [str(tiny / "adapters" / "ada"), "--base", str(tiny / "base")]
    assert main([*arguments, "--text", str(tmp_path / "t.txt"), "--max-tokens", "64"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["adapter"], found["tokens"]) == ("ada", 63)
    assert found["verdict"] in ("trust", "check", "distrust")


@pytest.mark.parametrize(
    ("adapter", "base", "text", "said"),
    [
        ("adapters/nobody", "base", "text", "no such folder"),
        ("adapters/ada", "adapters", "text", "config.json: no such file"),
        ("base", "base", "text", "missing_config"),
        ("adapters/ada", "base", "", "fewer than two tokens"),
        ("adapters/ada", "base", None, "No such file"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    adapter: str,
    base: str,
    text: str | None,
    said: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / "t.txt").write_text(text)
    arguments = [str(tiny / adapter), "--base", str(tiny / base)]
    assert main([*arguments, "--text", str(tmp_path / "t.txt")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1
