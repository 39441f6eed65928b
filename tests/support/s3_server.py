"""A real S3 server (SeaweedFS, from its wheel) on ports of its own, that checks signatures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "adapters"
KEY, SECRET = "AKTESTTESTTESTTEST", "s3cret-of-the-tests"
_SERVICES = ("master.port", "volume.port", "filer.port", "s3.port", "webdav.port", "admin.port")


@dataclass(frozen=True)
class S3Server:
    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        return options(self.endpoint)

    @property
    def bucket(self) -> Any:
        settings: Any = {**self.options, "bucket": BUCKET}
        return S3Store(config=settings, client_options={"allow_http": True})

    def put(self, folder: Path, prefix: str) -> None:
        """Every file of the folder, below the prefix."""
        for path in folder.rglob("*"):
            if path.is_file():
                name = f"{prefix}/{path.relative_to(folder)}"
                obstore.put(self.bucket, name, path.read_bytes(), use_multipart=False)


def options(endpoint: str) -> dict[str, str]:
    return {
        "endpoint": endpoint,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "virtual_hosted_style_request": "false",
    }


def free_ports(count: int) -> list[int]:
    """Low enough that the server's own offset of 10,000 for gRPC fits above."""
    with _open(count) as sockets:
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _open(count: int) -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    candidates = iter(range(20_000 + os.getpid() % 10_000, 32_000))
    try:
        while len(sockets) < count:
            each = socket.socket()
            try:
                each.bind(("127.0.0.1", next(candidates)))
            except OSError:
                each.close()
            else:
                sockets.append(each)
        yield sockets
    finally:
        for each in sockets:
            each.close()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Running once its bucket can be written to."""
    ports = free_ports(len(_SERVICES) + 1)
    flags = [f"-{name}={port}" for name, port in zip(_SERVICES, ports, strict=False)]
    weed = Path(sys.executable).parent / "weed"
    command = [
        *(str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-bucket={BUCKET}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0"),
        *("-s3.port.lance=0", *flags),
    ]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
    server = S3Server(f"http://127.0.0.1:{ports[3]}")
    try:
        _wait(server, process, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait()


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            obstore.put(server.bucket, "ready", b"yes", use_multipart=False)
            return
        except BaseError:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
