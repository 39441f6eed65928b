"""How a completion is put to a server of another make: what differs from our own replicas' way."""

from __future__ import annotations

from typing import Protocol

from shared.ids import AdapterId


class Dialect(Protocol):
    @property
    def lines(self) -> str:
        """Header lines that the server wants of us, each with its end: never the fleet token."""

    def completion(self, body: bytes, adapter: AdapterId | None, digest: str) -> bytes:
        """The body for the server, of a request for this adapter (None: the base) in the version
        that placement found there. It is being sent: the server will have used the adapter."""
        ...
