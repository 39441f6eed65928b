"""Tools: the prompt shows them, calls in the safe form are read, all else is text or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.core.step import Step
from replica.engine.runner import Drawn, Runner
from replica.tool_calls import ToolCalls

PROMPT: list[Any] = [{"role": "user", "content": "Weather?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HERMES = (
    "{% if tools %}{{ 'Answer with <tool_call>…</tool_call>.' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture
def hermes(tiny: Path, tmp_path: Path) -> Path:
    """The tiny base with a template that shows tools and how to call them."""
    shutil.copytree(tiny / "base", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(HERMES)
    return tmp_path / "base"


def _says(monkeypatch: pytest.MonkeyPatch, served: Any, text: str) -> None:
    """The model draws this text and then its end token."""
    script = [*served.replica._vocabulary.encode(text, special=False), 2]

    def scripted(runner: Runner, step: Step) -> dict[str, Drawn]:
        return {row.seq: Drawn(script[row.drawn]) for row in step.rows if row.samples}

    monkeypatch.setattr(Runner, "run_with_logprobs", scripted)


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (CALL, None, 1),
        (f"Let me see. {CALL}\n{CALL}", "Let me see. ", 2),
        ("It rains.", "It rains.", 0),
        (CALL.replace("weather", "launch"), CALL.replace("weather", "launch"), 0),
        ("<tool_call>{oh", "<tool_call>{oh", 0),
    ],
)
async def test_calls_are_read_streamed_or_not(
    serve: Any, hermes: Path, monkeypatch: Any, said: str, content: str | None, calls: int
) -> None:
    served = await serve(base=hermes)
    _says(monkeypatch, served, said)
    create = served.sdk.chat.completions.create
    asks: dict[str, Any] = {"model": "ada", "messages": PROMPT, "tools": [TOOL]}
    [choice] = (await create(**asks)).choices
    assert choice.message.content == content
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert len(choice.message.tool_calls or []) == calls
    for call in choice.message.tool_calls or []:
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
    text, streamed, finish = "", [], None
    async for chunk in await create(stream=True, **asks):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        streamed += delta.tool_calls or []
        finish = chunk.choices[0].finish_reason
    assert text == (content or "")
    assert [call.index for call in streamed] == list(range(calls))
    assert [call.function.model_dump() for call in streamed] == [
        call.function.model_dump() for call in choice.message.tool_calls or []
    ]
    assert finish == choice.finish_reason


async def test_one_call_is_enough_if_the_client_says_so(
    serve: Any, hermes: Path, monkeypatch: Any
) -> None:
    served = await serve(base=hermes)
    _says(monkeypatch, served, f"{CALL}{CALL}")
    reply = await served.sdk.chat.completions.create(
        model="ada", messages=PROMPT, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls) == 1
    assert reply.choices[0].finish_reason == "tool_calls"
    await served.idle()


async def test_the_prompt_shows_the_tools_unless_none_may_be_used(serve: Any, hermes: Path) -> None:
    served = await serve(base=hermes)
    asks: dict[str, Any] = {"model": "tiny", "messages": PROMPT, "max_tokens": 1}
    create = served.sdk.chat.completions.create
    without = (await create(**asks)).usage.prompt_tokens
    shown = (await create(tools=[TOOL], tool_choice="auto", **asks)).usage.prompt_tokens
    hidden = (await create(tools=[TOOL], tool_choice="none", **asks)).usage.prompt_tokens
    assert shown > without == hidden


async def test_calls_that_come_back_are_objects_to_the_template(serve: Any, hermes: Path) -> None:
    served = await serve(base=hermes)
    call = {"id": "c", "type": "function", "function": {"name": "weather"}}
    told = [
        *PROMPT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    call["function"]["arguments"] = '{"city": "Zürich"}'  # type: ignore[index]
    assert "Zürich" in served.replica._template.render(told)
    create = served.sdk.chat.completions.create
    await create(model="tiny", messages=told, max_tokens=1)
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=told, max_tokens=1)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("forced", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_forced_call_is_refused_by_its_field(serve: Any, hermes: Path, forced: Any) -> None:
    served = await serve(base=hermes)
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.chat.completions.create(
            model="tiny", messages=PROMPT, tools=[TOOL], tool_choice=forced
        )
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported")


def _read(pieces: list[str], **settings: Any) -> tuple[str, list[tuple[int, str, str]]]:
    reader = ToolCalls(["weather"], **settings)
    text, calls = "", []
    for piece in pieces:
        said, called = reader.feed(piece)
        text += said
        calls += [(call.index, call.name, call.arguments) for call in called]
    return text + reader.flush(), calls


@given(
    st.lists(
        st.sampled_from([CALL, "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{}"]),
        max_size=8,
    ).map("".join),
    st.data(),
)
def test_what_is_read_does_not_depend_on_how_the_text_is_cut(text: str, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for parallel in (True, False):
        whole = _read([text], parallel=parallel)
        assert _read(pieces, parallel=parallel) == whole
        if not whole[1]:
            assert whole[0] == text
