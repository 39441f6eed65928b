"""Every way the gateway says no, and what each looks like to an OpenAI client.

The SDK takes its exception class from the status, decides on a retry from status,
`x-should-retry` and `Retry-After`, and shows `error.message`. So a message says what to do next,
`Retry-After` is true, and a refusal that no retry can cure says so.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

from shared import openai_errors
from shared.openai_errors import INVALID_REQUEST

RATE_LIMIT: Final = "rate_limit_error"
SERVER_ERROR: Final = "server_error"


class GatewayError(Exception):
    """A request that ends without an answer from a replica."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = SERVER_ERROR
    code: ClassVar[str | None] = None
    reason: ClassVar[str] = "internal"
    """The word for this refusal in metrics."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def body(self) -> bytes:
        return openai_errors.error_body(
            self.message, type=self.type, param=self.param, code=self.code
        )

    def event(self) -> bytes:
        return openai_errors.error_event(
            self.message, type=self.type, param=self.param, code=self.code
        )

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


class Unauthenticated(GatewayError):
    status, type, code, reason = 401, INVALID_REQUEST, "invalid_api_key", "unauthenticated"

    def __init__(self) -> None:
        super().__init__(
            "Missing or invalid API key. Send it as `Authorization: Bearer KEY`; "
            "your operator makes one with `loraplex tenant key-create`."
        )

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "WWW-Authenticate": "Bearer"}


class TooManyFailures(GatewayError):
    """Wrong keys from one address: for a while none from there is looked at."""

    status, type, code, reason = 429, RATE_LIMIT, "too_many_failed_keys", "failed_keys"

    def __init__(self, wait_s: float) -> None:
        super().__init__(
            "Too many wrong keys came from your address; try again after the wait.",
            retry_after_s=wait_s,
        )


class BadRequest(GatewayError):
    status, type, reason = 400, INVALID_REQUEST, "bad_request"


class BodyTooLarge(GatewayError):
    status, type, code, reason = 413, INVALID_REQUEST, "request_too_large", "body_too_large"


class BodyTooSlow(GatewayError):
    status, type, code, reason = 408, INVALID_REQUEST, "request_timeout", "body_too_slow"


class UnknownEncoding(GatewayError):
    status, type, code, reason = 415, INVALID_REQUEST, "unsupported_encoding", "bad_request"


class HeadTooLarge(GatewayError):
    status, type, code, reason = 431, INVALID_REQUEST, "headers_too_large", "bad_request"


class HeadTooSlow(GatewayError):
    status, type, code, reason = 408, INVALID_REQUEST, "request_timeout", "head_too_slow"


class ExpectationFailed(GatewayError):
    status, type, code, reason = 417, INVALID_REQUEST, "expectation_failed", "bad_request"


class NoSuchRoute(GatewayError):
    status, type, code, reason = 404, INVALID_REQUEST, "unknown_url", "no_route"


class WrongMethod(GatewayError):
    status, type, code, reason = 405, INVALID_REQUEST, "method_not_allowed", "no_route"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed on {path}; use {allowed}.")
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Allow": self.allowed}


class ModelNotFound(GatewayError):
    """Unknown and not permitted are one answer, equal to the byte but for the name."""

    status, type, code, reason = 404, INVALID_REQUEST, "model_not_found", "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist or you do not have access to it.")
        self.model = model

    def body(self) -> bytes:
        return openai_errors.model_not_found(self.model)


class QuotaExceeded(GatewayError):
    status, type, code, reason = 429, RATE_LIMIT, "rate_limit_exceeded", "quota"


class InsufficientQuota(GatewayError):
    """A budget that is used up, or a limit that admits nothing: no retry helps soon."""

    status, type, code, reason = 429, "insufficient_quota", "insufficient_quota", "quota"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, should_retry=False)


class KeyReused(GatewayError):
    """An Idempotency-Key whose request was accepted already."""

    status, type, code, reason = 409, INVALID_REQUEST, "idempotency_key_reused", "idempotency"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="Idempotency-Key", should_retry=False)


class QueueFull(GatewayError):
    status, type, code, reason = 429, RATE_LIMIT, "rate_limit_exceeded", "queue_full"


class WaitExpired(GatewayError):
    status, code, reason = 503, "server_overloaded", "wait_expired"


class NoReplica(GatewayError):
    status, code, reason = 503, "server_overloaded", "no_replica"


class ReplicaBusy(GatewayError):
    status, code, reason = 503, "server_overloaded", "replica_busy"


class NotLoaded(GatewayError):
    """Tenants and keys are not read yet, so an unknown key may be a good one."""

    status, code, reason = 503, "server_starting", "not_loaded"

    def __init__(self) -> None:
        super().__init__("This gateway has not read its tenants yet.", retry_after_s=1)


class ShuttingDown(GatewayError):
    status, code, reason = 503, "server_shutting_down", "shutting_down"

    def __init__(self) -> None:
        super().__init__("This gateway is shutting down; send the request again.", retry_after_s=1)


class ReplicaLost(GatewayError):
    status, code, reason = 502, "replica_lost", "replica_lost"


class ReplicaTimeout(GatewayError):
    status, code, reason = 504, "replica_timeout", "replica_timeout"


class Internal(GatewayError):
    def __init__(self) -> None:
        super().__init__("The gateway failed on this request; its log names the request id.")
