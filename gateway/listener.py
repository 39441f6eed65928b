"""A port that speaks HTTP: aiohttp's server half, with its own errors in OpenAI's shape.

aiohttp answers what is not HTTP (a bad request line, two lengths that differ) before any handler
runs, in plain text; a client library shows that as noise. So the protocol is ours in one method.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from secrets import token_hex
from typing import Final

from aiohttp import web

from gateway.errors import BadRequest, GatewayError, Internal
from gateway.reply import respond
from shared.wire import REQUEST_ID

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_CLOSE_S: Final = 2.0  # for connections whose handlers have been ended already


class Listener:
    def __init__(self, app: web.Application, *, host: str, port: int) -> None:
        # A client that leaves cancels its handler: that is how everything behind learns of it.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S
        )
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Raises OSError when the port cannot be had."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Protocol(manager, loop=loop, access_log=None),  # type: ignore[arg-type]
            self._host,
            self._port,
            backlog=_BACKLOG,
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()


class _Protocol(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        error: GatewayError
        if status < 500:
            lines = (message or "").splitlines() or ["it could not be parsed"]
            error = BadRequest(f"This is not a valid HTTP request: {lines[0].rstrip(':')}.")
            _log.info("not HTTP", extra={"why": lines[0]})
        else:
            error = Internal()
            _log.error("handler failed", exc_info=exc)
        reply = respond(error, {REQUEST_ID: f"req_{token_hex(16)}"})
        reply.force_close()
        return reply
