"""Fields that change a draw or its end, from the SDK to the text, alone and among neighbours."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

END = 2  # the tiny base's end token
VLLM = frozenset({"ignore_eos", "min_tokens", "repetition_penalty", "stop_token_ids"})


async def _complete(served: Any, model: str = "tiny", **body: Any) -> Any:
    """One call of the SDK, with vLLM's own fields where the SDK takes such."""
    asks = {"prompt": "once", "max_tokens": 12, "temperature": 0, **body}
    extra = {name: asks.pop(name) for name in VLLM & asks.keys()}
    return await served.sdk.completions.create(model=model, extra_body=extra, **asks)


async def test_a_bias_forces_and_forbids_a_token(serve: Any) -> None:
    served = await serve()
    [token] = served.replica._vocabulary.encode("Q", special=False)
    forced = await _complete(served, logit_bias={str(token): 100}, n=2)
    assert [choice.text for choice in forced.choices] == ["Q" * 12] * 2
    plain = await _complete(served, logprobs=0)
    first = plain.choices[0].logprobs.tokens[0]
    ids = {served.replica._vocabulary.spell(t): t for t in range(265)}
    raw = bytes.fromhex(first[6:].replace("\\x", "")) if first[:6] == "bytes:" else first.encode()
    other = await _complete(served, logit_bias={str(ids[raw]): -100}, logprobs=0)
    assert first not in other.choices[0].logprobs.tokens


async def test_tokens_that_do_not_exist_are_refused_by_their_field(serve: Any) -> None:
    served = await serve()
    for field, value in (("logit_bias", {"265": 1}), ("stop_token_ids", [265])):
        with pytest.raises(openai.BadRequestError) as caught:
            await _complete(served, **{field: value})
        assert caught.value.param == field


async def test_the_least_number_of_tokens_holds_back_every_end(serve: Any) -> None:
    served = await serve()
    short = await _complete(served, logit_bias={str(END): 100})
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (1, "stop")
    longer = await _complete(served, logit_bias={str(END): 100}, min_tokens=5, n=2)
    assert longer.usage.completion_tokens == 12
    assert {choice.finish_reason for choice in longer.choices} == {"stop"}
    text = longer.choices[0].text
    assert "<|im_end|>" not in text
    [token] = served.replica._vocabulary.encode("Q", special=False)
    bias = {"logit_bias": {str(token): 100}}
    assert (await _complete(served, stop="QQ", **bias)).choices[0].text == ""
    assert (await _complete(served, stop="QQ", min_tokens=5, **bias)).choices[0].text == "Q" * 5
    stopped = await _complete(served, stop_token_ids=[token], min_tokens=3, **bias)
    assert stopped.usage.completion_tokens == 4


async def test_without_its_end_token_a_sequence_goes_on(serve: Any) -> None:
    served = await serve()
    reply = await _complete(served, logit_bias={str(END): 100}, ignore_eos=True)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (12, "length")


async def test_a_repetition_penalty_counts_the_prompt(serve: Any) -> None:
    served = await serve()
    reply = await _complete(served, prompt="a" * 40, repetition_penalty=10.0, logprobs=0)
    tokens = reply.choices[0].logprobs.tokens
    assert len(set(tokens)) == len(tokens)
    assert "a" not in tokens


async def test_echo_begins_with_the_prompt_streamed_or_not(serve: Any) -> None:
    served = await serve()
    prompts = ["once upon", "a time"]
    plain = await _complete(served, prompt=prompts, n=2)
    echoed = await _complete(served, prompt=prompts, n=2, echo=True)
    expected = [prompts[i // 2] + choice.text for i, choice in enumerate(plain.choices)]
    assert [choice.text for choice in echoed.choices] == expected
    texts = [""] * 4
    async for chunk in await _complete(served, prompt=prompts, n=2, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    tokens = list(served.replica._vocabulary.encode("once upon", special=True))
    assert (await _complete(served, prompt=tokens, echo=True)).choices[0].text == expected[0]
    stopped = await _complete(served, prompt="once", echo=True, stop="once", max_tokens=3)
    assert stopped.choices[0].text.startswith("once")  # a prompt is no place to stop


async def test_the_best_of_several_are_those_with_the_highest_mean_logprob(serve: Any) -> None:
    served = await serve()
    hot = {"prompt": ["once", "twice"], "temperature": 1.4, "seed": 5, "logprobs": 1}
    every = (await _complete(served, n=5, **hot)).choices

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    best = await _complete(served, n=2, best_of=5, **hot)
    expected = [
        choice.text
        for five in (every[:5], every[5:])
        for choice in sorted(five, key=mean, reverse=True)[:2]
    ]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in every)
    silent = await _complete(served, n=2, best_of=5, **{**hot, "logprobs": None})
    assert [choice.text for choice in silent.choices] == expected
    assert all(choice.logprobs is None for choice in silent.choices)


async def test_a_seed_gives_the_same_text_whatever_the_neighbours(serve: Any) -> None:
    served = await serve(max_loras=4)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.2, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8, "n": 2},
        {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 8},
        {"temperature": 1.5, "seed": 4, "logit_bias": {"40": 5}, "logprobs": 2},
    ]
    models = ["tiny", "ada", "bob", "cyd"]

    async def texts(at: int) -> list[str]:
        reply = await _complete(served, models[at], max_tokens=20, **kinds[at])
        return [choice.text for choice in reply.choices]

    alone = [await texts(at) for at in range(4)]
    noise = [
        served.tokens(models[i % 4], f"noise {i}", tokens=10 + 5 * i, temperature=1.0)
        for i in range(8)
    ]
    *together, _ = await asyncio.gather(*[texts(at) for at in range(4)], asyncio.gather(*noise))
    assert together == alone
