"""The one shape of an error that OpenAI clients read, and the few that both processes raise.

The SDK takes its exception class from the status and its text from `error.message`; a body of
another shape reaches the user as noise.
"""

from __future__ import annotations

from typing import Final

import orjson

INVALID_REQUEST: Final = "invalid_request_error"


def error_body(
    message: str, *, type: str = INVALID_REQUEST, param: str | None = None, code: str | None = None
) -> bytes:
    """`{"error": {message, type, param, code}}`; `code` is a word, never the HTTP number."""
    return orjson.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def error_event(
    message: str, *, type: str = "server_error", param: str | None = None, code: str | None = None
) -> bytes:
    """The same inside a stream that has begun; the stream then closes without `[DONE]`."""
    return b"data: " + error_body(message, type=type, param=param, code=code) + b"\n\n"


def model_not_found(model: str) -> bytes:
    """Body of the one 404 for a model that is unknown, and for one the tenant may not use."""
    return error_body(
        f"The model `{model}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )
