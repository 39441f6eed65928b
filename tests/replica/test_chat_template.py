"""The prompt equals what transformers' apply_chat_template gives for the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from replica.chat_template import ChatTemplate
from replica.errors import BadRequest, Unsupported

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{{- bos_token }}
{%- if tools is not none %}
    {{- raise_exception("no tools") }}
{%- endif %}
{% set ns = namespace(seen=0) %}
{% for message in messages %}
    {% if message.role == "skip" %}{% continue %}{% endif %}
    {% if ns.seen > 2 %}{% break %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
[{{ message.role | upper }}] {{ message.content | trim | tojson }}
    {% if message.role == "assistant" %}
        {% generation %}
        {{ message.name if message.name is defined else "nobody" }}
        {% endgeneration %}
    {% endif %}
{% endfor %}
{{ {"b": [1, 2], "a": "<&é>"} | tojson(indent=2) }} {{ mood | default("calm") }}
{% if add_generation_prompt %}>>{% endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>& é 🤗"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "name": "bot"},
        {"role": "user", "content": "Three"},
        {"role": "user", "content": "never seen"},
    ],
    [{"role": "skip", "content": ""}, {"role": "assistant", "content": "x", "name": None}],
]


def _folder(folder: Path, template: str, *, beside: bool) -> Path:
    tokens = {"<s>": 0, "</s>": 1, "<unk>": 2}
    Tokenizer(models.WordLevel(tokens, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "unk_token": "<unk>",
    }
    if beside:
        (folder / "chat_template.jinja").write_text(template)
        config["chat_template"] = "the file beside it is the newer one"
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("template", [SMOLLM2, BLOCKS])
@pytest.mark.parametrize("prompt", [False, True])
def test_messages_render_as_transformers_renders_them(
    tmp_path: Path, template: str, beside: bool, prompt: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = _folder(tmp_path, template, beside=beside)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate.from_dir(folder)
    for chat in CHATS:
        expected = theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt, mood="glad"
        )
        got = ours.render(chat, add_generation_prompt=prompt, extra={"mood": "glad"})
        assert got == expected


def test_a_template_that_refuses_the_messages_names_them() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_a_template_cannot_reach_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(BadRequest):
        template.render([{"role": "user", "content": "hi"}])


def test_a_base_without_template_says_where_to_go() -> None:
    with pytest.raises(Unsupported, match="/v1/completions"):
        ChatTemplate(None, {}).render([{"role": "user", "content": "hi"}])


def test_extra_values_may_not_replace_the_messages() -> None:
    with pytest.raises(BadRequest, match="messages"):
        ChatTemplate(SMOLLM2, {}).render(
            [{"role": "user", "content": "hi"}], extra={"messages": []}
        )


def test_developer_messages_reach_templates_that_only_know_system() -> None:
    got = ChatTemplate(SMOLLM2, {}).render([{"role": "developer", "content": "Be brief."}])
    assert got.startswith("<|im_start|>system\nBe brief.")


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_dir(tmp_path).render([{"role": "user", "content": "hi"}]) == "D"
