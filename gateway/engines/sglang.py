"""SGLang's server.

It tells: `/v1/models` has the base and, with --enable-lora, each loaded adapter (`parent` the base,
`root` its path); `/metrics`, with --enable-metrics only, `sglang:num_running_reqs` and
`sglang:num_queue_reqs`. Which adapters run, and which are in its --max-loras-per-batch slots, it
does not tell: `slots` and `host_slots` (--max-loaded-loras) of the configuration say how many. Its
`/health` may generate a token each time, so it is not asked.

It takes `POST /load_lora_adapter` {lora_name, lora_path} and `/unload_lora_adapter` {lora_name},
answered by {success, error_message, loaded_adapters}: 200, or 400 when `success` is false. A failed
unload has been answered with 200 (SGLang issue 8213), so `success` counts, not the status, and an
unload that still lists the name among `loaded_adapters` has not happened. An unload waits until the
adapter's requests have ended.

A request names its adapter as `BASE:ADAPTER`. A model without a colon is not checked against
anything there: it is answered by the base. So the base's name is put before each adapter's here.

It cannot: pin what is loaded already, take a path from a request, or list adapters in releases
whose `/v1/models` has the base only. A served model name may have no colon. Sources: docs.sglang.io
"LoRA Serving" and "Production Metrics"; its http_server.py, io_struct.py and serving_base.py.
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
from gateway.engines.samples import total

_LOAD: Final = "/load_lora_adapter"
_UNLOAD: Final = "/unload_lora_adapter"


class SGLang:
    pages: tuple[str, ...] = ("/v1/models", "/metrics")
    by_request = False
    takes_loads = True

    def told(self, answers: Mapping[str, Answer]) -> Told:
        told = told_by_list(models_of(answers["/v1/models"]))
        text = answers["/metrics"].content.decode(errors="replace")
        return told._replace(
            running=total(text, "sglang:num_running_reqs"),
            waiting=total(text, "sglang:num_queue_reqs"),
        )

    def load(self, name: str, path: str) -> Call | None:
        return Call(_LOAD, {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> Call | None:
        return Call(_UNLOAD, {"lora_name": name})

    def refusal(self, call: Call, answer: Answer) -> str:
        said = answer.json()
        if not isinstance(said, dict) or "success" not in said:
            return error_of(answer)
        if said["success"] is not True:
            return str(said.get("error_message") or f"status {answer.status}, success: false")
        loaded, name = said.get("loaded_adapters"), call.body["lora_name"]
        if call.path == _UNLOAD and isinstance(loaded, dict) and name in loaded:
            return "it says that it is done, and lists the adapter as loaded still"
        return ""

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        return with_model(body, base if name is None else f"{base}:{name}")
