"""Logits of each family's random base against transformers, and of its adapters against PEFT.

Each base goes through the ways a step can be made up: whole and chunked prefill, decoding, and rows
of several adapters and of none at once. Texts outgrow the windows more than twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
TOKENS = 40

BASES: dict[str, dict[str, Any]] = {
    "llama-biases": {"extra": {"attention_bias": True, "mlp_bias": True}},
    "smollm2": {"heads": 6, "kv_heads": 2, "hidden": 48, "tied": True},
    "mistral": {"family": "mistral"},
    "mistral-no-window": {
        "family": "mistral",
        "extra": {"sliding_window": None, "head_dim": 24},
        "tied": True,
    },
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen2-windows": {"family": "qwen2", "layers": 3, "extra": {"use_sliding_window": True}},
    "qwen2-layer-types": {
        "family": "qwen2",
        "extra": {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "qwen3": {"family": "qwen3"},
    "qwen3-everything": {
        "family": "qwen3",
        "heads": 8,
        "tied": True,
        "extra": {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 0},
    },
}

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, dict[str, Any]] = {
    "every": {"r": 8, "targets": EVERY, "alpha": 16},
    "query": {"r": 4, "targets": ("q_proj", "v_proj"), "rslora": True},
    "late": {"r": 6, "targets": ("k_proj", "o_proj", "down_proj"), "layers": (1,)},
}

Reference = Callable[[tuple[int, ...], str], Tensor]


@dataclass(frozen=True)
class Base:
    folder: Path
    runner: Runner
    reference: Reference  # logits [tokens, vocab] of PEFT's model, of the base for ""

    def driver(self) -> Driver:
        return Driver(self.runner, pages=PAGES, page_tokens=PAGE_TOKENS)


@pytest.fixture(scope="module", params=list(BASES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, BASES[request.param])
    return Base(folder, loaded(folder, "float32"), peft_logits(folder, torch.float32))


def write(folder: Path, recipe: Mapping[str, Any]) -> None:
    config = tiny_model(folder / "base", seed=1, **recipe)
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        tiny_adapter(folder / "adapters" / name, config, seed, **adapter)


def loaded(folder: Path, dtype: str) -> Runner:
    runner = Runner(
        base_dir=folder / "base",
        dtype=dtype,
        slots=len(ADAPTERS),
        max_rank=8,
        pages=pool_pages(PAGES, len(ADAPTERS)),
        page_tokens=PAGE_TOKENS,
        threads=1,
    )
    store = AdapterFolder(folder / "adapters", 16, runner.config, dtype)
    verdicts = list(store.scan())
    assert all(isinstance(verdict, Found) for verdict in verdicts), verdicts
    for slot, name in enumerate(ADAPTERS):
        load(runner, slot, store.read(AdapterId(name)), PAGES)
    return runner


def peft_logits(folder: Path, dtype: torch.dtype) -> Reference:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    first, *others = ADAPTERS
    adapted = PeftModel.from_pretrained(
        plain, folder / "adapters" / first, adapter_name=first, autocast_adapter_dtype=False
    )
    for name in others:
        adapted.load_adapter(
            folder / "adapters" / name, adapter_name=name, autocast_adapter_dtype=False
        )
    adapted.eval()

    @functools.cache
    def logits(tokens: tuple[int, ...], name: str) -> Tensor:
        with torch.no_grad():
            if not name:
                with adapted.disable_adapter():
                    return adapted(torch.tensor([tokens])).logits[0].float()
            adapted.set_adapter(name)
            return adapted(torch.tensor([tokens])).logits[0].float()

    return logits


def _text(seed: int = 0) -> tuple[int, ...]:
    dice = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 265, (TOKENS,), generator=dice).tolist())


def _slot(name: str) -> int:
    return list(ADAPTERS).index(name) if name else BASE_SLOT


def _assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def _alone(driver: Driver, text: tuple[int, ...], name: str, chunk: int) -> Iterator[Tensor]:
    """The logits after each token from the ninth on: prefill in chunks, then decoding."""
    driver.add("s", text[:9], _slot(name))
    for end in range(9, len(text) + 1):
        while not (logits := driver.logits(chunk)):
            pass
        yield logits["s"]
        driver.sequences["s"].tokens += text[end : end + 1]


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_prefill_equals_transformers_and_peft(name: str, base: Base) -> None:
    text = _text()
    driver = base.driver()
    driver.add("s", text, _slot(name))
    _assert_close(driver.logits()["s"], base.reference(text, name)[-1])


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_an_adapter_changes_the_logits(name: str, base: Base) -> None:
    change = (base.reference(_text(), name) - base.reference(_text(), ""))[-1].abs().max()
    assert change > 100 * TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_chunked_prefill_equals_transformers(chunk: int, base: Base) -> None:
    text = _text(1)
    for name in ("", "every"):
        for end in (5, 17, 24, TOKENS):
            driver = base.driver()
            driver.add("s", text[:end], _slot(name))
            while not (logits := driver.logits(chunk)):
                pass
            _assert_close(logits["s"], base.reference(text, name)[end - 1])


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_decoding_equals_transformers_at_every_position(name: str, base: Base) -> None:
    text = _text(2)
    theirs = base.reference(text, name)
    for end, logits in enumerate(_alone(base.driver(), text, name, chunk=4), start=9):
        _assert_close(logits, theirs[end - 1])


def test_a_mixed_batch_equals_each_alone(base: Base) -> None:
    """Prefill and decode, adapters and base rows between them, some past the window, some not."""
    names = ["", "every", "", "query", "late", "every", ""]
    texts = {f"{i}{name}": (_text(seed=i), name) for i, name in enumerate(names)}
    driver = base.driver()
    for i, (seq, (text, name)) in enumerate(texts.items()):
        driver.add(seq, text[: 3 + 4 * i], _slot(name))
    for _ in range(12):
        for seq, logits in driver.logits(chunk=9).items():
            text, name = texts[seq]
            at = len(driver.sequences[seq].tokens)
            _assert_close(logits, base.reference(text, name)[at - 1])
            driver.sequences[seq].tokens.append(text[at])


@pytest.mark.parametrize("recipe", ["smollm2", "mistral", "qwen2-windows", "qwen3-everything"])
def test_bfloat16_errs_no_more_than_transformers_does(recipe: str, tmp_path: Path) -> None:
    """Stated tolerance, both against the float32 reference: root mean square error at most 1.25
    times that of transformers and PEFT in bfloat16, and at most 3 % of the logits' spread."""
    write(tmp_path, BASES[recipe])
    runner = loaded(tmp_path, "bfloat16")
    exact, rounded = peft_logits(tmp_path, torch.float32), peft_logits(tmp_path, torch.bfloat16)
    for name in ("", "every"):
        text = _text(3)
        driver = Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)
        ours = torch.stack(list(_alone(driver, text, name, chunk=4)))
        truth = exact(text, name)[8:]
        error = (ours - truth).square().mean().sqrt()
        allowed = (rounded(text, name)[8:] - truth).square().mean().sqrt()
        assert error < 1.25 * allowed
        assert error < 0.03 * truth.std()
