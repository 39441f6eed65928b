"""The console's files as a gateway serves them. What they do is shown in a browser, elsewhere."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.console.page import add_console_routes

FOLDER = Path(__file__).parents[2] / "gateway/console"


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application()
    add_console_routes(app, enabled=getattr(request, "param", True))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield session
    await runner.cleanup()


async def test_every_file_that_the_page_asks_for_is_there_and_under_its_policy(
    client: aiohttp.ClientSession,
) -> None:
    wanted, seen = ["/console"], set()
    while wanted:
        path = wanted.pop()
        seen.add(path)
        async with client.get(path) as response:
            assert response.status == 200, path
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            text = await response.text()
        asked = set(re.findall(r'(?:href|src)="(/[^"]+)"|from "(/[^"]+)"', text))
        wanted += [one or two for one, two in asked if (one or two) not in seen]
    served = {
        f"/console/{p.relative_to(FOLDER)}"
        for p in FOLDER.rglob("*")
        if p.suffix in (".js", ".css")
    }
    assert seen == served | {"/console"}


async def test_a_file_that_did_not_change_is_not_sent_again(client: aiohttp.ClientSession) -> None:
    async with client.get("/console/main.js") as first:
        tag = first.headers["ETag"]
    async with client.get("/console/main.js", headers={"If-None-Match": tag}) as again:
        assert again.status == 304


@pytest.mark.parametrize("path", ["/console/__init__.py", "/console/page.py", "/console/../app.py"])
async def test_nothing_else_is_served(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as response:
        assert response.status == 404


@pytest.mark.parametrize("client", [False], indirect=True)
async def test_without_an_admin_key_the_console_says_what_to_set(
    client: aiohttp.ClientSession,
) -> None:
    async with client.get("/console") as response:
        assert response.status == 404
        assert "admin.key" in await response.text()


def test_the_page_has_no_inline_script_or_style_and_no_outside_address() -> None:
    for file in [*FOLDER.glob("*.html"), *FOLDER.glob("*.js"), *FOLDER.glob("*.css")]:
        text = file.read_text()
        assert not re.search(r"https?://", text), file
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\son[a-z]+=\"", text), file


@pytest.mark.parametrize("name", ["htm", "preact", "uplot"])
def test_what_is_vendored_has_its_licence_beside_it(name: str) -> None:
    assert (FOLDER / "vendor" / f"LICENSE.{name}").read_text().strip()
