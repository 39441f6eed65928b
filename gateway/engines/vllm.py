"""vLLM's OpenAI server.

It tells: `/v1/models` has the base (`parent` null) and each adapter (`parent` the base, `root` its
path); `/health` is 503 when its engine has died behind it; `/metrics` has
`vllm:num_requests_running` and `_waiting`, and `vllm:lora_requests_info`, of which a series is a
combination of names ever seen, its value the time it was last set: the newest counts. `max_lora`
there is its slots. Which idle adapters are in slots it does not tell.

It takes `POST /v1/load_lora_adapter` {lora_name, lora_path} and `/v1/unload_lora_adapter`
{lora_name}, when VLLM_ALLOW_RUNTIME_LORA_UPDATING is set (otherwise 404 `{"detail":"Not Found"}`).
A success is plain text with 200; 400 says that the name is loaded already, 404 that the path, or on
unload the adapter, is not there; a fault of the adapter itself is a 400 or, for most, a 500. What
runs when its adapter is unloaded finishes.

A refusal is an OpenAI error but for `code`, the HTTP number, and `type`, a class's name. Usage
comes when asked for, without cached tokens unless --enable-prompt-tokens-details is given.

It cannot: list tiers, pin, or take a path from a request. Names with a comma cannot be read in its
metrics. A SIGKILL of its first process leaves the others behind: kill the group. On a CPU, 0.32
gives base rows the adapter of the last slot in a batch that mixes both. Sources: docs.vllm.ai,
"LoRA Adapters" and "Metrics"; release 0.32 itself (tests/vllm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.engines.engine import (
    Answer,
    Call,
    Told,
    error_of,
    models_of,
    told_by_list,
    with_model,
)
from gateway.engines.samples import samples, total

_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_INFO: Final = "vllm:lora_requests_info"


class VLLM:
    pages: tuple[str, ...] = ("/v1/models", "/health", "/metrics")
    by_request = False
    takes_loads = True

    def told(self, answers: Mapping[str, Answer]) -> Told:
        told = told_by_list(models_of(answers["/v1/models"]))
        text = answers["/metrics"].content.decode(errors="replace")
        running = total(text, "vllm:num_requests_running")
        newest = max(samples(text, _INFO), key=lambda one: one.value, default=None)
        labels = {} if newest is None else newest.labels
        at_work = labels.get("running_lora_adapters", "").split(",") if running else ()
        slots = labels.get("max_lora", "")
        born = next(samples(text, "process_start_time_seconds"), None)
        return told._replace(
            running=running,
            waiting=total(text, "vllm:num_requests_waiting"),
            at_work=frozenset(name for name in at_work if name),
            slots=int(slots) if slots.isdecimal() else 0,
            born=0.0 if born is None else born.value,
        )

    def load(self, name: str, path: str) -> Call | None:
        return Call(_LOAD, {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> Call | None:
        return Call(_UNLOAD, {"lora_name": name})

    def refusal(self, call: Call, answer: Answer) -> str:
        why = error_of(answer)
        if answer.status == 200 or (answer.status == 400 and "already been loaded" in why):
            return ""
        if answer.status == 404 and why == "Not Found":
            return "it takes no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        if call.path == _UNLOAD and answer.status == 404:
            return ""
        return why

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        return body if name is None else with_model(body, name)
