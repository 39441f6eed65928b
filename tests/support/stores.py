"""A store whose road can be frozen, slow or cut: everything passes through this relay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self


class Relay:
    """`async with Relay(server, socket) as relay:` then dial `relay.url`."""

    def __init__(self, server_url: str, socket: Path) -> None:
        self._server_path = server_url.removeprefix("unix://")
        self._socket = socket
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.reads = 0  # chunks that came from clients
        self.delay_s = 0.0  # of each chunk, in both directions

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    def freeze(self) -> None:
        """Nothing moves any more; connections stay open and new ones are taken."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def cut(self) -> None:
        """Every connection ends and none is taken."""
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def mend(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer: asyncio.StreamWriter | None = None
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._server_path)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer, counted=True))
                both.create_task(self._pump(far_reader, writer, counted=False))
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            self.reads += counted
            await self._flows.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one side has closed")
