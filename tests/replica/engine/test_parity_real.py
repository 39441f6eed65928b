"""Greedy text of SmolLM2 and of real adapters, token for token that of transformers and PEFT.

By induction: if one forward pass of the reference over prompt and our output has, at every
position, our next token as its argmax, then the reference's own greedy text is ours. One prompt of
each model goes through the reference's `generate` as well, so that all does not hang on that.

One thread: on cores that others use too, threads that wait for each other take many times as long.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, load, pool_pages

from replica.core.step import BASE_SLOT
from replica.engine.adapter_store import AdapterFolder
from replica.engine.runner import Runner
from shared.ids import AdapterId

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

TOKENS = 64
PAGES, PAGE_TOKENS = 256, 16
PROMPTS = (
    "What is the capital of Spain?",
    "Tell me about horses.",
    "Why is the grass green?",
    "Write two sentences about the sea, and one about a small boat on it.",
)


class Reference:
    """transformers with every adapter attached; "" is the base."""

    def __init__(self, base: Path, adapters: Path, names: list[str]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        first, *others = names
        self._model = PeftModel.from_pretrained(model, adapters / first, adapter_name=first)
        for name in others:
            self._model.load_adapter(adapters / name, adapter_name=name)
        self._model.eval()

    def prompt(self, question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def next_tokens(self, name: str, tokens: tuple[int, ...]) -> list[int]:
        """The argmax after every position."""
        with self._as(name), torch.no_grad():
            return self._model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()

    def generate(self, name: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
        with self._as(name), torch.no_grad():
            ids = torch.tensor([prompt])
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
            )
        return out[0][len(prompt) :].tolist()

    def _as(self, name: str) -> Any:
        if not name:
            return self._model.disable_adapter()
        self._model.set_adapter(name)
        return nullcontext()


@pytest.fixture(scope="module")
def names(real_adapters: Path) -> list[str]:
    return sorted(folder.name for folder in real_adapters.iterdir() if folder.is_dir())


@pytest.fixture(scope="module")
def runner(real_base: Path, real_adapters: Path, names: list[str]) -> Runner:
    runner = Runner(
        base_dir=real_base,
        slots=len(names),
        max_rank=64,
        pages=pool_pages(PAGES, len(names)),
        page_tokens=PAGE_TOKENS,
        threads=1,
    )
    store = AdapterFolder(real_adapters, 64, runner.config)
    for slot, name in enumerate(names):
        load(runner, slot, store.read(AdapterId(name)), PAGES)
    return runner


@pytest.fixture(scope="module")
def reference(real_base: Path, real_adapters: Path, names: list[str]) -> Reference:
    return Reference(real_base, real_adapters, names)


@pytest.fixture(scope="module")
def mixed(runner: Runner, reference: Reference, names: list[str]) -> dict[str, list[int]]:
    """Every model with every prompt, all in one batch: `model/prompt` to its output."""
    driver = Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)
    for i, question in enumerate(PROMPTS):
        for name in ["", *names]:
            slot = names.index(name) if name else BASE_SLOT
            driver.add(f"{name}/{i}", reference.prompt(question), slot)
    return driver.generate(TOKENS, chunk=48)


def test_a_mixed_batch_is_token_for_token_the_reference(
    mixed: dict[str, list[int]], reference: Reference
) -> None:
    assert len(mixed) >= 16
    for key, output in mixed.items():
        name, _, i = key.partition("/")
        prompt = reference.prompt(PROMPTS[int(i)])
        theirs = reference.next_tokens(name, (*prompt, *output[:-1]))
        assert output == theirs[len(prompt) - 1 :], f"{name or 'base'}: {PROMPTS[int(i)]}"


def test_alone_is_token_for_token_the_mixed_batch(
    mixed: dict[str, list[int]], runner: Runner, reference: Reference, names: list[str]
) -> None:
    """Two prompts a model, and every prompt twice."""
    for i, name in enumerate(["", *names]):
        slot = names.index(name) if name else BASE_SLOT
        for at in (i % len(PROMPTS), (i + 1) % len(PROMPTS)):
            driver = Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)
            driver.add("s", reference.prompt(PROMPTS[at]), slot)
            assert driver.generate(TOKENS)["s"] == mixed[f"{name}/{at}"]


def test_the_reference_generates_the_same_text(
    mixed: dict[str, list[int]], reference: Reference, names: list[str]
) -> None:
    for name in ["", *names]:
        theirs = reference.generate(name, reference.prompt(PROMPTS[0]), TOKENS)
        assert theirs == mixed[f"{name}/0"][: len(theirs)]


def test_every_adapter_speaks_in_its_own_manner(
    mixed: dict[str, list[int]], reference: Reference, names: list[str]
) -> None:
    texts = {
        name: reference.tokenizer.decode(mixed[f"{name}/0"], skip_special_tokens=True)
        for name in ["", *names]
    }
    assert len(set(texts.values())) == len(texts)
