"""What a replica refuses and how it fails: one tree, and for each kind its status and code.

Every one reaches the client as an OpenAI error. 5xx carry a code by which the gateway tells
"try another replica" (`draining`, `server_overloaded`) from "this one is broken".
"""

from __future__ import annotations

from typing import ClassVar

from shared.openai_errors import INVALID_REQUEST, error_body, error_event, model_not_found


class ReplicaError(Exception):
    """`message` is for the person who sent the request; `param` names the field at fault."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after_s: ClassVar[int | None] = None
    retry_is_vain: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = code or self.code

    def body(self) -> bytes:
        return error_body(self.message, type=self.type, param=self.param, code=self.reason)

    def event(self) -> bytes:
        """The same inside a stream that has begun."""
        return error_event(self.message, type=self.type, param=self.param, code=self.reason)

    def headers(self) -> dict[str, str]:
        named = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return named | {"x-should-retry": "false"} if self.retry_is_vain else named


class BadRequest(ReplicaError):
    """The request itself is wrong; sending it again changes nothing."""

    status = 400
    type = INVALID_REQUEST
    code = "invalid_value"


class Unsupported(BadRequest):
    """Understood, but not done by this replica: said aloud, because silence would mislead."""

    code = "unsupported"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class BadAdapterRequest(BadRequest):
    """A load call whose adapter, name or path cannot be served; `code` says why. The type is the
    word that vLLM has for it."""

    type = "InvalidUserInput"
    code = "invalid_adapter"


class UnknownModel(ReplicaError):
    """No such model, or one that is not servable: the two look alike to the caller."""

    status = 404
    type = INVALID_REQUEST
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.", param="model")
        self._model = model

    def body(self) -> bytes:
        return model_not_found(self._model)


class OnlyMerged(ReplicaError):
    """This replica's one adapter is part of its base, so base and other adapters are not here."""

    status = 404
    type = INVALID_REQUEST
    code = "model_not_found"

    def __init__(self, model: str, merged: str) -> None:
        super().__init__(
            f"This replica has the adapter `{merged}` merged into its base and serves nothing "
            f"else; ask another replica for `{model}`.",
            param="model",
        )


class UnknownAdapter(ReplicaError):
    """An operator named an adapter that is not here."""

    status = 404
    type = "NotFoundError"
    code = "adapter_not_found"


class NotFound(ReplicaError):
    status = 404
    type = INVALID_REQUEST
    code = "not_found"


class NotPermitted(ReplicaError):
    """The call changes the replica and lacks the fleet token."""

    status = 401
    type = "authentication_error"
    code = "fleet_token_required"


class BodyTooLarge(ReplicaError):
    status = 413
    type = INVALID_REQUEST
    code = "body_too_large"


class Overloaded(ReplicaError):
    """The waiting line is full."""

    status = 503
    type = "server_overloaded"
    code = "server_overloaded"
    retry_after_s = 1


class Draining(ReplicaError):
    """The replica finishes what runs and takes nothing new."""

    status = 503
    type = "server_overloaded"
    code = "draining"
    retry_after_s = 1


class AdapterLost(ReplicaError):
    """The adapter was servable when the request came and turned out not to be."""

    status = 503
    code = "adapter_load_failed"
    retry_after_s = 1


class SequenceFailed(ReplicaError):
    """This request's own computation failed; its neighbours go on."""

    code = "generation_failed"


class LogitsNotFinite(SequenceFailed):
    """The weights gave infinity or not-a-number; they would again, so SDKs are told not to try."""

    retry_is_vain = True


class EngineFailed(ReplicaError):
    """The engine stopped; only a restart helps."""

    code = "engine_failed"
