"""Log-probabilities as OpenAI writes them: one entry for each token that is counted.

So the end token and the tokens of a stop string have entries, though no text. All are the model's
own, before temperature, penalties, bias and grammar. `text_offset` counts the characters that the
tokens before had settled: a character of several tokens begins at all of them. Chat gives each
token's text and bytes; completions give four lists, and know a token that is no text by
`bytes:\\xf0\\x9f`, for the alternatives there are keys of an object and must not fall together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from replica.engine.sampler import Drawn

Spell = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, its log-probabilities, and where in the choice's text it begins.

    The first token of an echoed prompt has none.
    """

    drawn: Drawn
    offset: int

    @property
    def logprob(self) -> float:
        assert self.drawn.logprob is not None, "drawn without being asked for log-probabilities"
        return self.drawn.logprob


def chat_logprobs(scored: Sequence[Scored], spell: Spell) -> dict[str, Any]:
    content = []
    for each in scored:
        top = [_entry(token, logprob, spell) for token, logprob in each.drawn.top]
        own = _entry(each.drawn.token, each.logprob, spell)
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(scored: Sequence[Scored], spell: Spell) -> dict[str, Any]:
    """`top_logprobs` has the drawn token too, beyond the likeliest if it is none of them."""
    tops: list[dict[str, float] | None] = []
    for each in scored:
        if each.drawn.logprob is None:
            tops.append(None)
            continue
        ranked = (*each.drawn.top, (each.drawn.token, each.drawn.logprob))
        top: dict[str, float] = {}
        for token, logprob in ranked:
            top.setdefault(_name(spell(token)), logprob)
        tops.append(top)
    return {
        "tokens": [_name(spell(each.drawn.token)) for each in scored],
        "token_logprobs": [each.drawn.logprob for each in scored],
        "top_logprobs": tops,
        "text_offset": [each.offset for each in scored],
    }


def _entry(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    spelled = spell(token)
    return {
        "token": spelled.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def _name(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
