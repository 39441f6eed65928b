"""An exchange with a replica, to whoever wants one: how it may fail, and who receives the reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """An exchange that gave no whole reply. `answered` says whether any byte of one came."""

    answered = False
    stale = False
    """The connection was a kept one, and dead before any byte of a reply: no fault of anybody."""


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable or too slow to open. The replica saw nothing."""


class ReplyLost(UpstreamError):
    """The connection ended, or what came was not HTTP, before the reply was whole."""


class ReplyTimeout(UpstreamError):
    """The replica kept the connection and said nothing for too long."""


class ReplyUnfit(UpstreamError):
    """Raised by a sink: HTTP, but not a reply that can be used."""


class ReplyTooLong(UpstreamError):
    """Raised by a sink: more than it will keep."""


class Flow(Protocol):
    """What a sink may ask of its connection."""

    def pause(self) -> None:
        """Read no more until `resume`: the sink's own client is slow."""

    def resume(self) -> None: ...

    def limit_silence(self, idle_s: float) -> None:
        """From now on this much silence ends the exchange (a report stream names its own)."""


class Sink(Protocol):
    """Who receives a reply; called from the transport's callback, so it must not block."""

    takes_chunks: bool = False
    """Set by `head`: reads may be offered to `chunk`."""

    def head(self, status: int, headers: Headers, flow: Flow) -> None: ...

    def body(self, data: bytes) -> bool:
        """True: nothing that follows is wanted, the exchange may end."""
        ...

    def chunk(self, data: bytes) -> bool:
        """A read that begins between two chunks, as it came. False: it is not exactly one chunk, or
        one to be looked into; it comes as `body` instead."""
        return False


Ended = Callable[["UpstreamError | None"], None]
