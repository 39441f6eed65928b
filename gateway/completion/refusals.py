"""Why a request was not admitted, as the error its client reads."""

from __future__ import annotations

from typing import Final

from gateway.core.dispatcher import RejectReason
from gateway.errors import (
    GatewayError,
    InsufficientQuota,
    ModelNotFound,
    NoReplica,
    QueueFull,
    QuotaExceeded,
    WaitExpired,
)
from gateway.state.quota import Denied

RETRY_S: Final = 1.0
"""For what usually passes in a moment."""


def over_quota(denied: Denied) -> GatewayError:
    if denied.never:
        return InsufficientQuota(f"Your limit of {denied.line.title} admits nothing.")
    if denied.spent:
        return InsufficientQuota(
            f"Your budget of {denied.line.title} is used up; it begins anew after the wait.",
            retry_after_s=denied.retry_after_s,
        )
    return QuotaExceeded(
        f"Rate limit reached for {denied.line.title}; retry after the wait.",
        retry_after_s=denied.retry_after_s,
    )


def not_placed(why: RejectReason, model: str) -> GatewayError:
    match why:
        case RejectReason.QUEUE_FULL:
            return QueueFull(
                "Too many of your requests are waiting; let some finish first.",
                retry_after_s=RETRY_S,
            )
        case RejectReason.UNKNOWN_MODEL:
            return ModelNotFound(model)
        case RejectReason.EXPIRED:
            return WaitExpired("The request waited too long for a replica.", retry_after_s=RETRY_S)
        case RejectReason.NO_REPLICA:
            return NoReplica("No replica can serve this model now.", retry_after_s=RETRY_S)
