"""A plain OpenAI server: `GET /v1/models` is its heartbeat and all it says of itself.

Such a server tells nothing of residency: an adapter it serves counts as in a slot. Then no load is
ever expected, and what routes is the ring under the load bound, which keeps each adapter on few
servers, the best that can be done without knowing. What it serves is what it lists, and what the
configuration names beside that; `*` there stands for every name (a server that loads on demand):
such a name is passed on, and is the server's to refuse.

Its busyness is not told either: `capacity` of the configuration bounds what we send. It is asked
for no load and no unload.

So are Triton's OpenAI front end's models: it lists `MODEL` and, for its vLLM back end alone,
`MODEL<--lora-separator>ADAPTER` of what `multi_lora.json` names at its start (server/python/openai,
engine/triton_engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.engines.engine import Answer, Call, Told, models_of, told_by_list


class OpenAI:
    pages: tuple[str, ...] = ("/v1/models",)
    by_request = False
    takes_loads = False

    def told(self, answers: Mapping[str, Answer]) -> Told:
        return told_by_list(models_of(answers["/v1/models"]))

    def load(self, name: str, path: str) -> Call | None:
        return None

    def unload(self, name: str) -> Call | None:
        return None

    def refusal(self, call: Call, answer: Answer) -> str:
        return "a plain OpenAI server takes no adapters: give it them where it is started"

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        return body
