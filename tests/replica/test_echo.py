"""A prompt before its completion, with transformers' own log-probabilities of its tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.echo import Echo
from replica.engine.sampler import Drawn
from replica.generation import PromptScores

TEXT = "once upon a time there was an adapter in a slot, and a naïve page 🙂 beside it"
SCORED = {"echo": True, "logprobs": 3, "temperature": 0}


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    """PEFT with `ada`; `disable_adapter` is the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, tiny / "adapters" / "ada").eval()


def _expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocab]: what the second token and those after it were drawn from."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)  # type: ignore[no-any-return]


async def _complete(served: Any, **body: Any) -> dict[str, Any]:
    asked = {"model": "ada", "prompt": TEXT, "max_tokens": 6, **SCORED, **body}
    status, reply = await served.post("/v1/completions", asked)
    assert status == 200, reply
    return dict(reply)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [512, 7], ids=["whole", "in chunks"])
async def test_prompt_logprobs_are_those_of_the_reference(
    chunk: int, serve: Any, reference: Any
) -> None:
    served = await serve(max_step_tokens=chunk, max_running=4)
    prompt = list(served.replica._vocabulary.encode(TEXT, special=True))
    with reference.disable_adapter():
        rows = {"tiny": _expected(reference, prompt)}
    rows["ada"] = _expected(reference, prompt)
    for model, expected in rows.items():
        [choice] = (await _complete(served, model=model))["choices"]
        lists = choice["logprobs"]
        assert len(lists["tokens"]) == len(prompt) + 6
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        own = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=True)]
        assert lists["token_logprobs"][1 : len(prompt)] == pytest.approx(own, abs=1e-4)
        tops = lists["top_logprobs"][1 : len(prompt)]
        for top, row, value in zip(tops, expected, own, strict=True):
            wanted = sorted([*row.topk(3).values.tolist(), value])
            assert all(any(abs(v - w) < 1e-4 for w in wanted) for v in top.values())
            assert 3 <= len(top) <= 4


async def test_offsets_are_places_in_the_echoed_text(serve: Any) -> None:
    served = await serve()
    [choice] = (await _complete(served))["choices"]
    assert choice["text"].startswith(TEXT)
    lists = choice["logprobs"]
    assert lists["text_offset"] == sorted(lists["text_offset"])
    for name, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if not name.startswith("bytes:") and not name.startswith("<|"):
            assert choice["text"][offset:].lstrip("\ufffd").startswith(name)
    counted = len(served.replica._vocabulary.encode(TEXT, special=True))
    assert lists["text_offset"][counted] == len(TEXT)  # where the completion begins


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_but_the_echo_is_the_prompt_and_its_scores(
    stream: bool, logprobs: int | None, serve: Any
) -> None:
    served = await serve()
    whole = await _complete(served, logprobs=logprobs)
    asked = {"model": "ada", "prompt": TEXT, "max_tokens": 0, "stream": stream}
    sdk = served.sdk.completions.create
    reply = await sdk(**asked, echo=True, logprobs=logprobs, temperature=0)
    choices = [chunk.choices[0] async for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == TEXT
    assert choices[-1].finish_reason == "length"
    if logprobs is None:
        assert all(choice.logprobs is None for choice in choices)
    else:
        prompt = len(served.replica._vocabulary.encode(TEXT, special=True))
        lists = choices[0].logprobs.model_dump()
        expected = whole["choices"][0]["logprobs"]
        assert lists == {name: values[:prompt] for name, values in expected.items()}
    if not stream:
        assert reply.usage.completion_tokens == 0
        assert reply.usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    await served.idle()


async def test_streamed_scores_are_those_that_are_not_streamed(serve: Any) -> None:
    served = await serve(max_step_tokens=16, max_running=8)
    prompts = [TEXT, "once", "a time"]
    whole = await _complete(served, prompt=prompts, n=2)
    lists: list[dict[str, list[Any]]] = [{} for _ in range(6)]
    stream = await served.sdk.completions.create(
        model="ada", prompt=prompts, n=2, max_tokens=6, stream=True, **SCORED
    )
    async for chunk in stream:
        [choice] = chunk.choices
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                lists[choice.index].setdefault(name, []).extend(values)
    assert lists == [choice["logprobs"] for choice in whole["choices"]]


async def test_scores_survive_preemption_and_neighbours(serve: Any) -> None:
    """The oldest move on and the newest start again: from the first token, and once."""
    roomy = await serve(max_loras=2)
    tight = await serve(
        **{"max_loras": 2, "pages": 48, "page_tokens": 8, "max_lora_rank": 8},
        **{"max_step_tokens": 24, "max_running": 8},
    )
    models = ("tiny", "ada", "bob", "tiny", "ada", "bob")
    asked = [
        {"model": model, "max_tokens": 24, "prompt": TEXT[at:]} for at, model in enumerate(models)
    ]
    alone = [await _complete(roomy, **body) for body in asked]
    together = await asyncio.gather(*[_complete(tight, **body) for body in asked])
    for one, other in zip(alone, together, strict=True):
        left, right = one["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
        assert left["tokens"] == right["tokens"]
        assert left["token_logprobs"][1:] == pytest.approx(right["token_logprobs"][1:], abs=1e-4)
    await tight.idle()


def test_scores_that_come_again_replace_those_that_came() -> None:
    """A sequence preempted within its prompt scores it from the first token again."""
    echo = Echo("abcd", (1, 2, 3, 4), (0, 1, 2, 3))
    first, again = Drawn(2, -1.0), Drawn(2, -1.5)
    rest = Drawn(3, -2.0), Drawn(4, -3.0)
    for start, tokens in ((0, (first,)), (1, rest[:1]), (0, (again,)), (1, rest)):
        echo.take(PromptScores(start, tokens))
    assert [each.drawn.logprob for each in echo.scored()] == [None, -1.5, -2.0, -3.0]
    assert [each.offset for each in echo.scored()] == [0, 1, 2, 3]


async def test_the_best_are_chosen_by_what_was_drawn_not_by_the_prompt(serve: Any) -> None:
    served = await serve()
    hot = {"temperature": 1.4, "seed": 5, "prompt": "once", "n": 1, "best_of": 4, "logprobs": 1}
    echoed = await _complete(served, **hot)
    silent = await _complete(served, **hot, echo=False)
    assert echoed["choices"][0]["text"] == "once" + silent["choices"][0]["text"]


async def test_a_prompt_of_one_token_has_one_entry(serve: Any) -> None:
    served = await serve()
    [choice] = (await _complete(served, prompt=[65], max_tokens=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["logprobs"]["text_offset"] == [0]


async def test_what_was_cached_is_scored_all_the_same(serve: Any) -> None:
    served = await serve()
    plain = await _complete(served, logprobs=None)
    first, second = [await _complete(served) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["text"] == plain["choices"][0]["text"]
    assert None not in first["choices"][0]["logprobs"]["token_logprobs"][1:]


async def test_no_tokens_and_no_echo_is_refused(serve: Any) -> None:
    served = await serve()
    body = {"model": "ada", "prompt": "once", "max_tokens": 0}
    status, reply = await served.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "max_tokens")
    assert "echo" in reply["error"]["message"]
