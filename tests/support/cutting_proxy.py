"""A TCP proxy that breaks connections or swallows what comes: a network on bad days."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class CuttingProxy:
    """While `cut_after` is set, an answer is cut off after that many bytes; `dead`: no answer; a
    request that holds `refuses` ends its connection."""

    target: tuple[str, int]
    cut_after: int | None = None
    cuts_left: int = 1 << 30
    dead: bool = False
    refuses: bytes | None = None
    connections: int = 0
    endpoint: str = ""
    _open: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def close(self) -> None:
        for each in self._open:
            each.close()

    def _answer(self, client: socket.socket) -> None:
        if self.dead:
            return  # connected, and silent
        with suppress(OSError), socket.create_connection(self.target) as server:
            self._open.append(server)
            up = threading.Thread(target=self._ask, args=(client, server), daemon=True)
            up.start()
            passed = 0
            while piece := server.recv(1 << 14):
                if self.dead:
                    return
                limit = self.cut_after
                if limit is not None and self.cuts_left > 0 and passed + len(piece) > limit:
                    client.sendall(piece[: limit - passed])
                    self.cuts_left -= 1
                    break
                passed += len(piece)
                client.sendall(piece)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while piece := client.recv(1 << 14):
                if self.refuses is not None and self.refuses in piece:
                    break
                server.sendall(piece)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(endpoint: str) -> Iterator[CuttingProxy]:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = CuttingProxy((host, int(port)))
    proxy.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
    try:
        yield proxy
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        proxy.close()
