"""How big is an adapter, against the shapes of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.failure import USAGE, Failure
from gateway.cli.size import LINEARS, measure, percent, read_shapes

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_7B | changes))
    return path


def test_rank_16_on_4096_by_4096_is_under_one_percent(tmp_path: Path) -> None:
    answer = measure(read_shapes(config(tmp_path)), ["q_proj"], 16, 2)
    (row,) = answer["projections"]
    assert (row["out"], row["in"]) == (4096, 4096)
    assert row["weights"] == 32 * 131_072
    assert percent(row["share_of_projection"]) == "0.781 %"


def test_the_share_of_the_base_is_said_of_the_whole_adapter_only(tmp_path: Path) -> None:
    answer = measure(read_shapes(config(tmp_path)), ["q_proj", "down_proj"], 16, 2)
    assert answer["share_of_base"] == answer["weights"] / answer["base_weights"]
    assert all("share_of_base" not in row for row in answer["projections"])


def test_the_base_of_llama_2_7b_has_its_6_738_415_616_weights(tmp_path: Path) -> None:
    assert read_shapes(config(tmp_path)).base_weights == 6_738_415_616


def test_grouped_keys_and_tied_embeddings_count_once(tmp_path: Path) -> None:
    """SmolLM2-135M: 134,515,008 parameters."""
    shapes = read_shapes(config(tmp_path, **SMOLLM2))
    assert shapes.base_weights == 134_515_008
    assert shapes.linears["k_proj"] == (192, 576)


def test_a_committed_adapter_has_the_size_that_is_computed(
    tmp_path: Path, real_adapters: Path
) -> None:
    """pirate: rank 4 on all seven linears, in bfloat16; the file adds only its header."""
    shapes = read_shapes(config(tmp_path, **SMOLLM2))
    weights = measure(shapes, list(LINEARS), 4, 2)["bytes"]
    file = (real_adapters / "pirate" / "adapter_model.safetensors").stat().st_size
    assert weights < file < 1.05 * weights


def test_a_folder_is_taken_for_its_config(tmp_path: Path) -> None:
    config(tmp_path)
    assert read_shapes(tmp_path) == read_shapes(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("{}", "'hidden_size'"), ('{"hidden_size": "wide"}', "wide")],
)
def test_a_config_that_is_none_is_a_usage_error_that_names_it(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(Failure, match=said) as caught:
        read_shapes(path)
    assert caught.value.code == USAGE
    assert str(path) in str(caught.value)
