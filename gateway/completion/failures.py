"""An attempt at one replica that gave no answer: what the client is told, whose fault it was, and
whether another replica may be asked."""

from __future__ import annotations

import logging
from typing import Final

from gateway.core.dispatcher import Conduct
from gateway.edge.exchange import (
    ConnectFailed,
    Headers,
    ReplyLost,
    ReplyTimeout,
    ReplyTooLong,
    ReplyUnfit,
    UpstreamError,
)
from gateway.errors import GatewayError, ReplicaBusy, ReplicaLost, ReplicaTimeout
from shared.ids import RequestId

_log = logging.getLogger(__name__)

BUSY: Final = frozenset({429, 502, 503, 504})
"""A replica that answers so may be fine later; another may be fine now."""

_BUSY_RETRY_S: Final = 1.0


class AttemptFailed(Exception):
    """This attempt gave no answer."""

    def __init__(self, error: GatewayError, conduct: Conduct | None, *, elsewhere: bool) -> None:
        """`elsewhere`: nothing was told to the client, and another replica may be asked."""
        super().__init__(error.message)
        self.error = error
        self.conduct = conduct
        self.elsewhere = elsewhere


def exchange_failed(failure: UpstreamError, request: RequestId, *, told: bool) -> AttemptFailed:
    match failure:
        case ConnectFailed():
            error: GatewayError = ReplicaLost("The replica refused the connection.")
            conduct = Conduct.GONE
        case ReplyTimeout():
            error, conduct = ReplicaTimeout("The replica did not answer in time."), Conduct.FAULTY
        case ReplyUnfit():
            error, conduct = ReplicaLost("The replica's reply could not be used."), Conduct.FAULTY
        case ReplyTooLong():  # it would be as long anywhere
            much = "The replica's reply was too long to pass on; ask for less."
            return AttemptFailed(ReplicaLost(much, should_retry=False), None, elsewhere=False)
        case ReplyLost() | _:
            error, conduct = ReplicaLost("The connection to the replica was lost."), Conduct.GONE
    _log.info("exchange failed", extra={"request_id": request, "why": str(failure)})
    return AttemptFailed(error, conduct, elsewhere=not told)


def busy(headers: Headers) -> ReplicaBusy:
    told = next((value for name, value in headers if name == b"retry-after"), b"")
    wait_s = float(told) if told.isdigit() else _BUSY_RETRY_S
    return ReplicaBusy("Every replica that could serve this is busy.", retry_after_s=wait_s)
