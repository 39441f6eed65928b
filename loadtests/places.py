"""A replica as places that are held for a time: a model's pace without the model.

A request waits, first in first out, until one of `capacity` places is free; then its prompt is
read, and it has a token every `token_s`. `prefill_s` is for the first token of any prompt. With
`prompt_token_s` the prompts of one replica are also read one after the other, as an engine does
whose steps have a budget of tokens. Sans-IO.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who")


@dataclass(frozen=True, kw_only=True)
class Engine:
    replicas: int = 4
    capacity: int = 16
    prefill_s: float = 0.2
    prompt_token_s: float = 0.0
    token_s: float = 0.01


class Places(Generic[Who]):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: OrderedDict[Who, int] = OrderedDict()
        self._held: set[Who] = set()
        self._reads_until = 0.0

    def enter(self, who: Who, prompt: int) -> None:
        self._waiting[who] = prompt

    def leave(self, who: Who) -> None:
        """Its end, wherever it is."""
        self._waiting.pop(who, None)
        self._held.discard(who)

    def begin(self, now: float) -> list[tuple[Who, float]]:
        """Those that have a place from now on, each with the time of its first token."""
        begun = []
        while self._waiting and len(self._held) < self._engine.capacity:
            who, prompt = self._waiting.popitem(last=False)
            self._held.add(who)
            reads_s = prompt * self._engine.prompt_token_s
            self._reads_until = max(now, self._reads_until) + reads_s
            begun.append((who, self._reads_until + self._engine.prefill_s))
        return begun
