"""What the gateway must know of a make of server, and nothing else: one small module each.

Law: the server's own list is the truth. A reply of 200 to a load says that it is worth looking; the
adapter is routable when the list has it, and gone when the list has it no more.

An adapter that we load has its version in its name there, `NAME@` and 12 digits of its digest. So
the list tells versions, a new one is loaded beside the old before the old leaves, and no cache of
the server (vLLM keys cached prompts by the adapter's name) can mistake one for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import orjson

from gateway.edge.exchange import ReplyUnfit
from gateway.edge.rename import renamed_whole

_OURS: Final = re.compile(r"(?s)(.+)@([0-9a-f]{12})")
_TEXT_MAX: Final = 300


class Answer(NamedTuple):
    status: int
    content: bytes

    def json(self) -> Any:
        """None when it is none."""
        try:
            return orjson.loads(self.content)
        except orjson.JSONDecodeError:
            return None

    def text(self) -> str:
        return self.content[:_TEXT_MAX].decode(errors="replace").strip()


class Call(NamedTuple):
    """A POST that changes what the server has."""

    path: str
    body: dict[str, Any]


class Told(NamedTuple):
    """What one look at a server has told. Names are the server's own."""

    base: str
    listed: tuple[str, ...] = ()
    max_model_len: int = 0
    running: int = 0
    waiting: int = 0
    at_work: frozenset[str] = frozenset()  # adapters with requests that run now
    slots: int = 0  # 0: it does not say
    born: float = 0.0  # when the process began; 0: it does not say


class Engine(Protocol):
    pages: tuple[str, ...]
    """Paths that are asked each time. The first must answer; of the others 404 is an answer."""
    by_request: bool
    """It takes no load calls: a request brings the adapter's path."""

    def told(self, answers: Mapping[str, Answer]) -> Told:
        """Raises ReplyUnfit when it does not say enough."""
        ...

    takes_loads: bool
    """It has calls that load and unload."""

    def load(self, name: str, path: str) -> Call | None:
        """None: it takes none."""
        ...

    def unload(self, name: str) -> Call | None: ...

    def refusal(self, call: Call, answer: Answer) -> str:
        """Why it did not do it, in its own words; "" when it says that it is done."""
        ...

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        """The request's body for this server. `name`: the adapter's there, None for the base;
        `path`: of its version in the registry, or empty."""
        ...


def name_there(adapter: str, digest: str) -> str:
    """What a version is loaded as."""
    return f"{adapter}@{digest.rpartition(':')[2][:12]}"


def name_here(name: str) -> tuple[str, str]:
    """The adapter and the beginning of its digest; no digest when it was not we who loaded it."""
    ours = _OURS.fullmatch(name)
    return (ours[1], ours[2]) if ours else (name, "")


def models_of(answer: Answer) -> list[dict[str, Any]]:
    """Of `GET /v1/models`; none when the server has no such list (404, 405)."""
    if answer.status != 200:
        return []
    try:
        listed = orjson.loads(answer.content)["data"]
        return [model for model in listed if isinstance(model["id"], str)]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ReplyUnfit(f"/v1/models is not a list of models: {error!r}") from error


def told_by_list(models: list[dict[str, Any]]) -> Told:
    """The first without a parent is the base."""
    names = [model["id"] for model in models]
    roots = [model["id"] for model in models if not model.get("parent")]
    lengths = [n for model in models if isinstance(n := model.get("max_model_len"), int)]
    return Told(next(iter(roots), ""), tuple(names), max(lengths, default=0))


def error_of(answer: Answer) -> str:
    """The message of an OpenAI error, or what else it said."""
    said = answer.json()
    if isinstance(said, dict):
        error = said.get("error", said)
        if isinstance(error, dict):
            error = error.get("message") or error.get("error_message") or error.get("detail")
        if isinstance(error, str) and error:
            return error[:_TEXT_MAX]
    return answer.text() or f"status {answer.status}"


def with_model(body: bytes, model: str) -> bytes:
    return renamed_whole(body, model)
