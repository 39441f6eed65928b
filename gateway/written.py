"""What aiohttp is given in place of a reply that was written past it."""

from __future__ import annotations

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter


class Written(web.StreamResponse):
    """Tells aiohttp that the reply is on the wire; it only keeps or closes the connection."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._kept = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._kept

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None
