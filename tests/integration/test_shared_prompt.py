"""600 requests that share a prompt of 300 tokens, over the base and eight adapters on four slots:
every reply is what transformers and PEFT say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch

from replica.app import Replica
from replica.config import ReplicaConfig
from replica.engine.tiny import tiny_adapter, tiny_model
from replica.text import GrowingText, Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about themselves

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {f"a{rank}": rank for rank in (1, 2, 4, 8, 16, 24, 48, 64)}
REQUESTS, CONCURRENCY, TOKENS = 600, 24, 10
PROMPT = tuple(random.Random(300).choices(range(3, 260), k=300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    model = tiny_model(root / "base", seed=6)
    for seed, (name, rank) in enumerate(RANKS.items(), start=1):
        tiny_adapter(root / "adapters" / name, model, seed=seed, r=rank, targets=EVERY)
    return root


def peft_texts(folder: Path) -> dict[str, str]:
    """Greedy replies by model; "base" has no adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    vocabulary = Vocabulary(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    first, *others = RANKS
    adapted = PeftModel.from_pretrained(base, folder / "adapters" / first, adapter_name=first)
    for name in others:
        adapted.load_adapter(folder / "adapters" / name, adapter_name=name)
    ids = torch.tensor([PROMPT])
    asks = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}

    def said(model: Any) -> str:
        drawn = model.generate(input_ids=ids, **asks, eos_token_id=None)[0, len(PROMPT) :]
        text = GrowingText(vocabulary, stops=[], skip_special=False, min_tokens=0)
        return "".join([*map(text.feed, drawn.tolist()), text.flush()])

    texts = {}
    for name in RANKS:
        adapted.set_adapter(name)
        texts[name] = said(adapted)
    with adapted.disable_adapter():
        texts["base"] = said(adapted)
    return texts


async def test_600_requests_with_one_prompt_equal_the_peft_reference(folder: Path) -> None:
    expected = peft_texts(folder)
    assert len(set(expected.values())) == len(expected), "every adapter matters"
    config = ReplicaConfig(
        base=folder / "base",
        adapters=folder / "adapters",
        served_name="base",
        max_loras=4,
        max_running=CONCURRENCY,
        max_step_tokens=128,
        pages=360,
        max_model_len=400,
        threads=1,
        rescan_s=60,
    )
    replica, dice = Replica(config), random.Random(1)
    url = await replica.start()
    wrong: Counter[str] = Counter()
    cached = streamed = 0
    places = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession() as http:

        async def one(number: int) -> None:
            nonlocal cached, streamed
            model = dice.choice(["base", *RANKS])
            body = {"model": model, "prompt": list(PROMPT), "max_tokens": TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
            stream = number % 3 == 0
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with places, http.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                raw = await reply.read()
            events = [orjson.loads(raw)] if not stream else _events(raw)
            text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
            cached += events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            streamed += stream
            wrong[model] += text != expected[model]

        try:
            await asyncio.gather(*map(one, range(REQUESTS)))
        finally:
            await replica.stop()
    replica.engine.scheduler.check()
    assert wrong.total() == 0, wrong
    assert streamed == REQUESTS // 3
    whole_pages = (len(PROMPT) - 1) // 16 * 16
    assert cached > 0.9 * REQUESTS * whole_pages, "nine prompts are computed, not six hundred"


def _events(raw: bytes) -> list[Any]:
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    spoken = (event for event in events if not event.startswith(b":"))  # others keep it alive
    return [orjson.loads(event.removeprefix(b"data: ")) for event in spoken]
