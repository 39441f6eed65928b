"""LoRAX (predibase/lorax), which takes an adapter with the request that wants it.

It tells: `/info` has `model_id` and `max_total_tokens`; `/metrics` has `lorax_batch_current_size`
(the requests that run) and `lorax_queue_length` (those that waited when a batch was last made, the
ones that it then took among them). There is no `/v1/models`, no list of adapters and no word of its
tiers: `slots` (--max-active-adapters) and `host_slots` of the configuration say how many it holds.

It takes no load or unload: `model` of a request is an adapter's id or path, loaded just in time and
evicted by its own rule; the base is `""`. So each adapter of the registry whose current version has
a path is served here, under that path, and so is what the configuration names. Where paths are of
a filesystem, start it with --adapter-source local.

It cannot: tell a version from another at the same path (give each its own), refuse an adapter
before its first request, pin, or be unloaded. Sources: its docs/guides/openai_api.md, router/src/
server.rs, infer.rs and scheduler.rs (its docs/reference/metrics.md names neither gauge).
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.edge.exchange import ReplyUnfit
from gateway.engines.engine import Answer, Call, Told, with_model
from gateway.engines.samples import total


class LoRAX:
    pages: tuple[str, ...] = ("/info", "/metrics")
    by_request = True
    takes_loads = False

    def told(self, answers: Mapping[str, Answer]) -> Told:
        info = answers["/info"].json()
        if not isinstance(info, dict) or not isinstance(info.get("model_id"), str):
            raise ReplyUnfit("/info names no model_id: is it a LoRAX server?")
        length = info.get("max_total_tokens")
        text = answers["/metrics"].content.decode(errors="replace")
        return Told(
            base=info["model_id"],
            max_model_len=length if isinstance(length, int) else 0,
            running=total(text, "lorax_batch_current_size"),
            waiting=total(text, "lorax_queue_length"),
        )

    def load(self, name: str, path: str) -> Call | None:
        return None

    def unload(self, name: str) -> Call | None:
        return None

    def refusal(self, call: Call, answer: Answer) -> str:
        return "LoRAX loads an adapter with its first request, and takes no call for it"

    def completion(self, body: bytes, base: str, name: str | None, path: str) -> bytes:
        return with_model(body, "" if name is None else path or name)
