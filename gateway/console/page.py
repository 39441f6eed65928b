"""Serves the console's files, from memory, under a policy that lets nothing else in.

Scripts, styles and requests are this gateway's own or none; nobody may frame the page. What it
shows comes from the admin API, with the key that its reader gives it: the files hold no secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from aiohttp import web

_KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # asked for again each time, and answered 304
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str

    async def answer(self, request: web.Request) -> web.StreamResponse:
        tag = hashlib.sha256(self.body).hexdigest()[:16]
        headers = {**_HEADERS, "ETag": f'"{tag}"'}
        if any(one.value == tag for one in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self.body, content_type=self.kind, charset="utf-8", headers=headers
        )


def add_console_routes(app: web.Application, *, enabled: bool) -> None:
    """`enabled`: there is an admin API for it to show; otherwise its address says what to set."""
    if not enabled:
        app.router.add_get("/console", _off)
        return
    for path, handler in _handlers().items():
        app.router.add_get(path, handler, allow_head=False)


def _handlers() -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
    found = {}
    here = files("gateway.console")
    for folder, at in ((here, "/console"), (here / "vendor", "/console/vendor")):
        for file in folder.iterdir():
            kind = _KINDS.get(f".{file.name.rpartition('.')[2]}")
            if kind is not None:
                found[f"{at}/{file.name}"] = _File(file.read_bytes(), kind).answer
    index = found.pop("/console/index.html")
    return {**found, "/console": index, "/console/": index}


async def _off(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="The console is off: set `admin.key` to have it.\n")
