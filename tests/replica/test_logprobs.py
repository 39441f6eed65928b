"""Log-probabilities through the official SDK: transformers' own, streamed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.sampler import Drawn
from replica.logprobs import Scored, chat_logprobs, completion_logprobs

PROMPT: list[Any] = [{"role": "user", "content": "Say something."}]
SPELLED = {1: b"a", 2: " é".encode(), 3: b"\xf0\x9f", 4: b"\xf0", 5: b"<end>"}


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny / "base", dtype=torch.float32)


def _expected(reference: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), vocab]: log_softmax at each place where a token of `output` was drawn."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def _ids(served: Any) -> dict[bytes, int]:
    vocabulary = served.replica._vocabulary
    return {vocabulary.spell(token): token for token in range(vocabulary.size)}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.3, "seed": 4}])
async def test_chat_gives_the_logprobs_of_transformers(
    serve: Any, reference: Any, sampling: dict[str, Any]
) -> None:
    served = await serve()
    asks = {"model": "tiny", "messages": PROMPT, "max_tokens": 12, "logprobs": True, **sampling}
    reply = await served.sdk.chat.completions.create(top_logprobs=4, **asks)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    ids = _ids(served)
    output = [ids[bytes(entry.bytes)] for entry in content]
    prompt = served.replica._vocabulary.encode(
        served.replica._template.render(PROMPT), special=False
    )
    expected = _expected(reference, list(prompt), output)
    for entry, token, row in zip(content, output, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.token == bytes(entry.bytes).decode(errors="replace")
        best = row.topk(4)
        assert [ids[bytes(top.bytes)] for top in entry.top_logprobs] == best.indices.tolist()
        values = [top.logprob for top in entry.top_logprobs]
        assert values == pytest.approx(best.values.tolist(), abs=1e-4)
    alone = await served.sdk.chat.completions.create(**asks)
    assert [entry.top_logprobs for entry in alone.choices[0].logprobs.content] == [[]] * 12
    silent = await served.sdk.chat.completions.create(**{**asks, "logprobs": False})
    assert silent.choices[0].logprobs is None


async def test_completions_give_four_lists_that_fit_the_text(serve: Any, reference: Any) -> None:
    served = await serve()
    prompt = list(served.replica._vocabulary.encode("once", special=True))
    reply = await served.sdk.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=1.2, seed=3, logprobs=3, n=2
    )
    names = {}
    for token in range(served.replica._vocabulary.size):
        scored = [Scored(Drawn(token, 0.0), 0)]
        spell = served.replica._vocabulary.spell
        names[completion_logprobs(scored, spell)["tokens"][0]] = token
    for choice in reply.choices:
        lists = choice.logprobs
        output = [names[name] for name in lists.tokens]
        expected = _expected(reference, prompt, output)
        own = [float(row[token]) for row, token in zip(expected, output, strict=True)]
        assert lists.token_logprobs == pytest.approx(own, abs=1e-4)
        for top, token, row in zip(lists.top_logprobs, output, expected, strict=True):
            wanted = {*row.topk(3).indices.tolist(), token}
            assert {names[name] for name in top} == wanted
            assert all(top[n] == pytest.approx(float(row[names[n]]), abs=1e-4) for n in top)
        assert lists.text_offset[0] == 0
        assert lists.text_offset == sorted(lists.text_offset)
        for name, offset in zip(lists.tokens, lists.text_offset, strict=True):
            if not name.startswith("bytes:") and not name.startswith("<|"):
                rest = choice.text[offset:].lstrip("\ufffd")  # broken bytes settle later
                assert rest.startswith(name)


async def test_zero_alternatives_still_tell_the_drawn_token(serve: Any) -> None:
    served = await serve()
    reply = await served.sdk.completions.create(
        model="ada", prompt="once", max_tokens=3, temperature=0, logprobs=0
    )
    lists = reply.choices[0].logprobs
    assert [list(top) for top in lists.top_logprobs] == [[name] for name in lists.tokens]


@pytest.mark.parametrize("stop", [None, "stop"])
async def test_streamed_logprobs_are_those_that_are_not_streamed(serve: Any, stop: Any) -> None:
    served = await serve()
    body = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    if stop:
        text = await served.tokens("ada", tokens=24, ignore_eos=True)
        body["stop"] = [text[9:12]]
    complete = served.sdk.completions.create
    whole = await complete(model="ada", prompt="once", logprobs=2, n=2, **body)
    stream = await complete(model="ada", prompt="once", logprobs=2, n=2, stream=True, **body)
    texts = ["", ""]
    lists: list[dict[str, list[Any]]] = [{}, {}]
    async for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                lists[choice.index].setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert lists[choice.index] == choice.logprobs.model_dump()
        assert (choice.finish_reason == "stop") == bool(stop)
    assert sum(len(each["tokens"]) for each in lists) == whole.usage.completion_tokens


async def test_streamed_chat_logprobs_come_with_the_text_of_their_token(serve: Any) -> None:
    served = await serve()
    body = {"messages": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": True}
    whole = await served.sdk.chat.completions.create(model="bob", top_logprobs=2, **body)
    stream = await served.sdk.chat.completions.create(
        model="bob", top_logprobs=2, stream=True, **body
    )
    content = []
    async for chunk in stream:
        [choice] = chunk.choices
        if choice.logprobs is not None:
            content += choice.logprobs.content
    assert content == whole.choices[0].logprobs.content


async def test_the_end_token_is_counted_and_has_its_logprob(serve: Any) -> None:
    served = await serve()
    reply = await served.sdk.completions.create(
        model="tiny",
        prompt="once",
        max_tokens=4,
        temperature=0,
        logprobs=0,
        logit_bias={"2": 100},  # the end token
    )
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert choice.logprobs.tokens == ["<|im_end|>"]
    assert choice.logprobs.token_logprobs[0] < -1  # the model's own, without the bias


@given(st.lists(st.tuples(st.sampled_from(sorted(SPELLED)), st.floats(-50, 0)), max_size=5))
def test_shapes_have_one_entry_a_token(drawn: list[tuple[int, float]]) -> None:
    scored = [Scored(Drawn(t, p, ((3, -0.1), (4, -0.2))), i) for i, (t, p) in enumerate(drawn)]
    chat = chat_logprobs(scored, SPELLED.__getitem__)["content"]
    lists = completion_logprobs(scored, SPELLED.__getitem__)
    assert [bytes(entry["bytes"]) for entry in chat] == [SPELLED[t] for t, _ in drawn]
    assert [len(values) for values in lists.values()] == [len(drawn)] * 4
    for top, (token, _) in zip(lists["top_logprobs"], drawn, strict=True):
        assert len(top) == len({3, 4, token})  # broken characters do not fall together
