"""Logits of the engine against transformers and PEFT, on random models small enough to try all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, load, pool_pages
from torch import Tensor

from replica.core.step import BASE_SLOT
from replica.engine.adapter_store import AdapterFolder, Found
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_adapter, tiny_model
from shared.ids import AdapterId

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about themselves

PAGES, PAGE_TOKENS = 128, 16
TOLERANCE = 1e-4

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "targets": ("q_proj", "v_proj")},
    "all": {"r": 8, "targets": EVERY, "alpha": 16},
    "rslora": {"r": 6, "targets": EVERY, "rslora": True},
    "ranks": {
        "r": 4,
        "targets": EVERY,
        "rank_pattern": {"down_proj": 1, "q_proj": 12},
        "alpha_pattern": {"down_proj": 5, "k_proj": 0.5},
    },
    "ranks_rslora": {
        "r": 4,
        "targets": ("o_proj", "up_proj"),
        "rslora": True,
        "rank_pattern": {"up_proj": 9},
        "alpha_pattern": {"o_proj": 3},
    },
    "one_layer": {"r": 10, "targets": ("k_proj", "gate_proj"), "layers": (1,)},
    "bfloat": {"r": 8, "targets": ("v_proj", "down_proj"), "dtype": torch.bfloat16},
}


Reference = Callable[[tuple[int, ...], str], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = tiny_model(folder / "base", seed=1)
    for seed, (name, recipe) in enumerate(ADAPTERS.items()):
        tiny_adapter(folder / "adapters" / name, config, seed, **recipe)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    """Every adapter resident, and the last slot too, so that -1 would find something."""
    runner = _runner(folder / "base")
    store = AdapterFolder(folder / "adapters", 16, runner.config)
    assert all(isinstance(found, Found) for found in store.scan())
    for slot, name in enumerate(ADAPTERS):
        load(runner, slot, store.read(AdapterId(name)), PAGES)
    return runner


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Logits [tokens, vocab] of transformers, with PEFT for an adapter, without for ""."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    first = next(iter(ADAPTERS))
    adapted = PeftModel.from_pretrained(base, folder / "adapters" / first, adapter_name=first)
    for name in ADAPTERS:
        if name != first:
            adapted.load_adapter(folder / "adapters" / name, adapter_name=name)
    adapted.eval()

    @functools.cache
    def logits(tokens: tuple[int, ...], name: str) -> Tensor:
        with torch.no_grad():
            if not name:
                with adapted.disable_adapter():
                    return adapted(torch.tensor([tokens])).logits[0]
            adapted.set_adapter(name)
            return adapted(torch.tensor([tokens])).logits[0]

    return logits


def _runner(base: Path) -> Runner:
    return Runner(
        base_dir=base,
        slots=len(ADAPTERS),
        max_rank=16,
        pages=pool_pages(PAGES, len(ADAPTERS)),
        page_tokens=PAGE_TOKENS,
        threads=1,
    )


def _driver(runner: Runner) -> Driver:
    return Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 265, (length,), generator=dice).tolist())


def _slot(name: str) -> int:
    return list(ADAPTERS).index(name) if name else BASE_SLOT


def _assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_prefill_equals_transformers_and_peft(
    name: str, runner: Runner, reference: Reference
) -> None:
    prompt = _prompt(23)
    driver = _driver(runner)
    driver.add("s", prompt, _slot(name))
    _assert_close(driver.logits()["s"], reference(prompt, name)[-1])


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_an_adapter_changes_the_logits(name: str, reference: Reference) -> None:
    prompt = _prompt(23)
    change = (reference(prompt, name) - reference(prompt, ""))[-1].abs().max()
    assert change > 100 * TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 11])
def test_chunked_prefill_equals_transformers_at_every_chunk(
    chunk: int, runner: Runner, reference: Reference
) -> None:
    prompt = _prompt(21)
    for name in ("", "all"):
        theirs = reference(prompt, name)
        for end in range(1, len(prompt) + 1):
            driver = _driver(runner)
            driver.add("s", prompt[:end], _slot(name))
            while not (logits := driver.logits(chunk)):
                pass
            _assert_close(logits["s"], theirs[end - 1])


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_decoding_equals_transformers_at_every_position(
    name: str, runner: Runner, reference: Reference
) -> None:
    tokens = _prompt(40)
    theirs = reference(tokens, name)
    driver = _driver(runner)
    driver.add("s", tokens[:9], _slot(name))
    for end in range(9, len(tokens)):
        _assert_close(driver.logits()["s"], theirs[end - 1])
        driver.sequences["s"].tokens.append(tokens[end])


def test_a_mixed_batch_equals_each_alone(runner: Runner, reference: Reference) -> None:
    """Prefill and decode, all adapters and base rows between them, lengths all different."""
    names = ["", "all", "", "rslora", "ranks", "plain", "", "bfloat", "one_layer", "all"]
    texts = {f"{i}{name}": (_prompt(40, seed=i), name) for i, name in enumerate(names)}
    driver = _driver(runner)
    for i, (seq, (tokens, name)) in enumerate(texts.items()):
        driver.add(seq, tokens[: 3 + 2 * i], _slot(name))
    for _ in range(16):
        for seq, logits in driver.logits(chunk=7).items():
            tokens, name = texts[seq]
            at = len(driver.sequences[seq].tokens)
            _assert_close(logits, reference(tokens, name)[at - 1])
            driver.sequences[seq].tokens.append(tokens[at])


def test_base_rows_do_not_notice_adapters_around_them(runner: Runner, folder: Path) -> None:
    """Base, adapter, base in one batch, idle adapters resident, against a runner without any."""
    prompts = [_prompt(17, seed=5), _prompt(17, seed=6), _prompt(6, seed=7)]
    alone, mixed = _driver(_runner(folder / "base")), _driver(runner)
    for i, prompt in enumerate(prompts):
        alone.add(f"base{i}", prompt)
        mixed.add(f"base{i}", prompt)
        mixed.add(f"all{i}", prompt, _slot("all"))
    for _ in range(8):
        ours, pure = mixed.logits(), alone.logits()
        for seq, logits in pure.items():
            _assert_close(ours[seq], logits, tolerance=1e-5)
            token = int(logits.argmax())
            alone.sequences[seq].tokens.append(token)
            mixed.sequences[seq].tokens.append(token)
            mixed.sequences[seq.replace("base", "all")].tokens.append(token)


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_heads": 4, "tied": True},
        {"kv_heads": 1, "heads": 8, "layers": 4, "inner": 64},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "family": "qwen2",
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 3.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.9,
                "beta_fast": 8,
                "beta_slow": 0.5,
                "truncate": False,
            }
        },
    ],
    ids=["multi-head-tied", "one-kv-head", "llama3-rope", "linear-rope", "yarn", "yarn-all-keys"],
)
def test_other_shapes_of_the_family_equal_transformers(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model(tmp_path, seed=3, **sizes)
    tokens = _prompt(90)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([tokens])).logits[0]
    driver = _driver(_runner(tmp_path))
    driver.add("s", tokens[:80])
    for end in range(80, 90):
        _assert_close(driver.logits(chunk=33 if end > 80 else 80)["s"], theirs[end - 1])
        driver.sequences["s"].tokens.append(tokens[end])
