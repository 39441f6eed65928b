"""Many tenants of one prompt: 600 requests that begin with the same 300 tokens, to the base and to
eight adapters on four slots, 24 at a time and a third of them streamed. Each is PEFT's greedy text.

What could go wrong is that keys computed under one adapter are read under another, that a slot is
changed under a running sequence, and that a stream mixes with its neighbour. The same on the real
base takes minutes on two cores and is run by hand: `pytest -m long`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter, tiny_model
from replica.text import GrowingText, Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about themselves

SHARED, REQUESTS, AT_ONCE, SLOTS = 300, 600, 24, 4
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {"ada": 4, "bob": 8, "cyd": 16, "dee": 2, "eve": 24, "fay": 32, "gus": 8, "hal": 1}
BASE = "base"
TEXT = """The lighthouse stood on the last rock before the open sea. Every evening its keeper
climbed two hundred steps with a can of oil, trimmed the wick, and wrote the weather into
a book that his father had begun. Ships from Lisbon passed with cork and wine, ships from
Bergen with dried fish and timber, and once a year a small grey boat brought flour,
candles, letters and a new almanac. In winter nobody came. The keeper repaired nets,
taught his daughter the names of the stars, and measured how far the waves had thrown
their stones up the path. He liked Vega best, because it came back in spring; she
preferred Aldebaran, which was red and had a difficult name. When she was twelve she built
a telescope from two lenses and a length of drain pipe. The first thing that she saw in it
was not a star but a sail, torn and hanging, far to the north where no ship had any
business to be. They lit the lamp at noon, rang the bell until their arms ached, and rowed
out with blankets, soup and the long rope. There were four people on board: a cook, two
brothers, and a woman who had drawn the only map of those waters that showed the rock in
the right place. Nobody had believed her. She stayed until April, corrected the almanac in
red ink, and left the map behind on the kitchen wall, where it still hangs beside the
barometer. Visitors who ask about it are told this story first, and afterwards they are
asked a question, to find out whether they listened to all of it."""


@dataclass(frozen=True)
class Case:
    """A base, eight adapters, and prompts that begin with the same tokens."""

    base: Path
    adapters: Path
    endings: tuple[str, ...]
    tokens: int  # to draw

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.adapters.iterdir())

    def prompts(self) -> list[list[int]]:
        vocabulary = Vocabulary(self.base)
        shared = list(vocabulary.encode(TEXT, special=True))[:SHARED]
        assert len(shared) == SHARED
        return [[*shared, *vocabulary.encode(ending, special=False)] for ending in self.endings]


@pytest.fixture
def tiny_case(tmp_path: Path) -> Case:
    config = tiny_model(tmp_path / "base", hidden=96, layers=3, heads=6, context=512)
    for seed, (name, rank) in enumerate(RANKS.items(), start=1):
        targets = EVERY if seed % 2 else ("q_proj", "v_proj")
        tiny_adapter(tmp_path / "adapters" / name, config, seed, r=rank, targets=targets)
    endings = ("", "What was it?", "And then", " once", "?!")
    return Case(tmp_path / "base", tmp_path / "adapters", endings, tokens=12)


@pytest.fixture
def real_case(tmp_path: Path, real_base: Path, real_adapters: Path) -> Case:
    """The three that were trained, and five that were drawn."""
    shutil.copytree(real_adapters, tmp_path / "adapters")
    config = ModelConfig.from_dir(real_base)
    for seed, name in enumerate(list(RANKS)[:5], start=1):
        adapter = tmp_path / "adapters" / name
        tiny_adapter(adapter, config, seed, r=RANKS[name], targets=EVERY, strength=0.5)
    return Case(real_base, tmp_path / "adapters", (" What did she build?", " The map"), tokens=8)


def _references(case: Case) -> dict[tuple[str, int], str]:
    """By model and prompt: the greedy text of transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    plain.generation_config.eos_token_id = None  # as `ignore_eos` has it: the text goes on
    first, *others = case.names
    adapted = PeftModel.from_pretrained(plain, case.adapters / first, adapter_name=first).eval()
    for name in others:
        adapted.load_adapter(case.adapters / name, adapter_name=name)
    vocabulary = Vocabulary(case.base)

    def greedy(prompt: list[int]) -> str:
        ids = torch.tensor([prompt])
        whole = adapted.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        text = GrowingText(vocabulary, stops=[])
        return "".join(map(text.feed, whole[0, len(prompt) :].tolist())) + text.flush()

    found: dict[tuple[str, int], str] = {}
    with torch.inference_mode():
        for name in case.names:
            adapted.set_adapter(name)
            found |= {(name, i): greedy(prompt) for i, prompt in enumerate(case.prompts())}
        with adapted.disable_adapter():
            found |= {(BASE, i): greedy(prompt) for i, prompt in enumerate(case.prompts())}
    return found


async def _text(served: Any, body: dict[str, Any]) -> tuple[str, int]:
    """The completion, and how many tokens of its prompt were computed before."""
    async with served.http.post(served.url + "/v1/completions", json=body) as reply:
        raw = await reply.read()
        assert reply.status == 200, raw
    if not body["stream"]:
        whole = orjson.loads(raw)
        return whole["choices"][0]["text"], _cached(whole["usage"])
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    events = [event for event in events if not event.startswith(b":")]  # no silence is too long
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, _cached(chunks[-1]["usage"])


def _cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def _all_equal_the_reference(case: Case, serve: Any, **settings: Any) -> None:
    expected = _references(case)
    assert len(set(expected.values())) > len(expected) * 2 // 3, "models that differ"
    served = await serve(
        base=case.base,
        adapters=case.adapters,
        served_name=BASE,
        max_loras=SLOTS,
        max_cpu_loras=6,
        max_running=AT_ONCE,
        **settings,
    )
    dice, asked, prompts = random.Random(4), asyncio.Semaphore(AT_ONCE), case.prompts()
    models = [BASE, *case.names]
    cached = Counter[str]()

    async def ask(i: int) -> bool:
        model, ending = dice.choice(models), dice.randrange(len(prompts))
        body = {"model": model, "prompt": prompts[ending], "max_tokens": case.tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": i % 3 == 0}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        async with asked:
            text, before = await _text(served, body)
        cached[model] += before
        return text == expected[model, ending]

    equal = await asyncio.gather(*[ask(i) for i in range(REQUESTS)])
    assert sum(equal) == REQUESTS
    assert all(cached[model] > 0 for model in models), "a prompt of one's own model was shared"
    await served.idle()


async def test_600_of_600_equal_the_reference(tiny_case: Case, serve: Any) -> None:
    await _all_equal_the_reference(tiny_case, serve, max_step_tokens=128)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_600_of_600_equal_the_reference_on_the_real_base(real_case: Case, serve: Any) -> None:
    await _all_equal_the_reference(real_case, serve, threads=2, pages=1536)
