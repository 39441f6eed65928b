"""TensorRT-LLM's own server, `trtllm-serve` (PyTorch back end, started with a `lora_config`).

It tells: `/v1/models`, which has the base alone; with `return_perf_metrics`, `/prometheus/metrics`
has `trtllm_num_requests_running` and `_waiting`. Its `/metrics` is no such page but a queue of
statistics of iterations: who reads takes them from everybody else, and waits for some when there
are none, so it is left alone. `slots` (max_loras) and `host_slots` (max_cpu_loras) of the
configuration say how many adapters it holds; it evicts the least recent.

It takes no load or unload: a request brings `lora_request` {lora_name, lora_int_id, lora_path}. The
number is the adapter's identity in its caches, so it is made from name and digest here (53 bits,
which every JSON reader keeps). A request without that field is answered by the base, whatever
`model` says; so only adapters of the registry whose current version has a path are served here.

It cannot: list, load, unload or pin adapters, nor tell which of them run. In front of Triton use
kind `openai`: its OpenAI front end offers adapters of the vLLM back end only. Sources:
nvidia.github.io/TensorRT-LLM, "LoRA", "trtllm-serve", "Openai Completion Client For Lora" and
"Prometheus Metrics"; its serve/openai_server.py and metrics/collector.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import orjson

from gateway.engines.engine import Answer, Call, Told, models_of, told_by_list, with_model
from gateway.engines.samples import total


class TensorRTLLM:
    pages: tuple[str, ...] = ("/v1/models", "/prometheus/metrics")
    by_request = True
    takes_loads = False

    def told(self, answers: Mapping[str, Answer]) -> Told:
        text = answers["/prometheus/metrics"].content.decode(errors="replace")
        return told_by_list(models_of(answers["/v1/models"]))._replace(
            listed=(),
            running=total(text, "trtllm_num_requests_running"),
            waiting=total(text, "trtllm_num_requests_waiting"),
        )

    def load(self, name: str, path: str) -> Call | None:
        return None

    def unload(self, name: str) -> Call | None:
        return None

    def refusal(self, call: Call, answer: Answer) -> str:
        return "trtllm-serve takes an adapter with the request, and no call for it"

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        body = with_model(body, base)
        if name is None:
            return body
        number = int.from_bytes(hashlib.sha256(f"{name}\n{path}".encode()).digest()[:8]) >> 11
        wanted = {"lora_name": name, "lora_int_id": number, "lora_path": path}
        head, _, rest = body.partition(b"{")
        return head + b'{"lora_request":' + orjson.dumps(wanted) + b"," + rest
