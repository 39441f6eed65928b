"""What a replica refused a request with, in the one shape that OpenAI clients read.

Law: the SDK takes its class from the status and its text from `error.message`; `code` is a word or
null, never the HTTP number, and `type` is one of OpenAI's. What has that shape passes untouched.

Servers of other makes have their own: vLLM has `code` 400 and a class's name as `type`; SGLang and
trtllm-serve tell {object: "error", message, type, param, code} without `error` around them; LoRAX
tells {error: TEXT, error_type}. Sources: those named in gateway/engines, and a transcript of vLLM
0.32.
"""

from __future__ import annotations

from typing import Any

from gateway.errors import SERVER_ERROR
from shared.openai_errors import INVALID_REQUEST


def refusal(status: int, payload: dict[str, Any] | None) -> dict[str, Any] | None:
    """`{"error": …}` for the client, equal to `payload` where nothing had to be mended; None when
    these are no words of a server's API."""
    told = payload.get("error", payload) if payload else None
    if isinstance(told, str):
        told = {"message": told}
    if not isinstance(told, dict) or not isinstance(told.get("message"), str):
        return None
    kind, param, code = told.get("type"), told.get("param"), told.get("code")
    if not isinstance(kind, str) or "_" not in kind:
        kind = INVALID_REQUEST if status < 500 else SERVER_ERROR
    mended = {
        "message": told["message"],
        "type": kind,
        "param": param if isinstance(param, str) else None,
        "code": code if isinstance(code, str) and not code.isdecimal() else None,
    }
    if told is payload:
        return {"error": mended}
    sound = all(told[key] == mended[key] for key in mended if key in told) and "type" in told
    return payload if sound else {"error": told | mended}
