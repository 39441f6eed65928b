"""Several gateways on one port, for several cores: one supervisor, N workers, one ready line.

A worker is a whole gateway in a process of its own; the kernel spreads connections over them
(SO_REUSEPORT). What must be exact is in the store, so quotas, keys and the bill are those of one
gateway. What is a worker's own: its fair queue and its count of requests in flight (it sees the
others' load in the replicas' reports, as it would another machine's gateway), its metrics, and
what an operator drains. So worker i has the admin port `admin.port` + i, where its `/metrics` are
too; and while the store is away each grants its part of `quota.local_share`.

A worker that ends unasked is started again, after a pause that grows while it keeps dying. The
configuration is read once: a worker gets it on its stdin, and takes the end of stdin, which is the
end of its supervisor, for a SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Final

from gateway.config import GatewayConfig
from gateway.edge.listener import reserved
from shared import tasks
from shared.clock import monotonic

_log = logging.getLogger(__name__)

WORKERS_MAX: Final = 64
_PAUSE_S: Final = 0.25
_PAUSE_MAX_S: Final = 15.0
_STEADY_S: Final = 60.0  # one that lived so long has no trouble of its own
_READY: Final = b" ready on "


class WorkerFailed(Exception):
    """A worker ended before it was ready for the first time; it has said why on stderr."""


class Supervisor:
    def __init__(self, config: GatewayConfig, workers: int) -> None:
        """Raises OSError when the tenants' port cannot be had."""
        self._held = reserved(config.listen.host, config.listen.port)
        host, port = self._held.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._workers = [Worker(_share(config, port, workers, n), n) for n in range(workers)]
        self._stopping = False
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Every worker listens when it returns. Raises WorkerFailed."""
        try:
            await asyncio.gather(*[worker.start() for worker in self._workers])
        except WorkerFailed:
            for worker in self._workers:
                worker.signal(signal.SIGTERM)
            await self.ended()
            raise
        self._keepers = [
            tasks.spawn(self._keep(worker), name=f"keep worker {worker.number}")
            for worker in self._workers
        ]

    def stop(self) -> None:
        """Pass a SIGTERM on: the first drains, the second hurries."""
        self._stopping = True
        for worker in self._workers:
            worker.signal(signal.SIGTERM)

    async def ended(self) -> None:
        await asyncio.gather(*[worker.ended() for worker in self._workers])
        await tasks.stop(*self._keepers)
        self._held.close()

    async def _keep(self, worker: Worker) -> None:
        pause_s = _PAUSE_S
        while True:
            began = monotonic()
            code = await worker.ended()
            if self._stopping:
                return
            if monotonic() - began > _STEADY_S:
                pause_s = _PAUSE_S
            _log.error(
                "worker ended; it is started again",
                extra={"worker": worker.number, "code": code, "pause_s": pause_s},
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            if self._stopping:
                return
            try:
                await worker.start()
            except WorkerFailed as error:
                _log.error("worker not started", extra={"why": str(error)})
            if self._stopping:  # the signal came while it was not there to get it
                worker.signal(signal.SIGTERM)


class Worker:
    """One process; `start` may be called again after it has ended."""

    def __init__(self, config: GatewayConfig, number: int) -> None:
        self.number = number
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Return once it listens. Raises WorkerFailed."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "--worker"),
            stdin=asyncio.subprocess.PIPE,  # left open: its end is ours
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is the supervisor's to pass on
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._config.model_dump_json().encode() + b"\n")
        line = await self._process.stdout.readline()
        if _READY not in line:
            code = await self._process.wait()
            raise WorkerFailed(f"worker {self.number} ended with exit code {code}")

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def ended(self) -> int:
        return await self._process.wait() if self._process is not None else 0


async def run(config: GatewayConfig, workers: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError, WorkerFailed."""
    supervisor = Supervisor(config, workers)
    stop = asyncio.Event()

    def asked() -> None:
        stop.set()
        supervisor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    if config.admin.port is None:
        _log.warning("no admin.port: no worker's metrics, and /admin is any one worker's")
    try:
        await supervisor.start()
    except WorkerFailed:
        if stop.is_set():  # stopped before it was there
            return
        raise
    if not stop.is_set():
        print(f"loraplex gateway ready on {supervisor.url}", flush=True)
    await stop.wait()
    await supervisor.ended()


def read_config() -> GatewayConfig:
    """What a worker is told on its stdin, which stays open."""
    return GatewayConfig.model_validate_json(sys.stdin.buffer.readline())


async def supervisor_gone() -> None:
    """Return when stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        await reader.read()
    finally:
        transport.close()


def _share(config: GatewayConfig, port: int, workers: int, number: int) -> GatewayConfig:
    """Worker `number`'s configuration: the shared port, an admin port and a share of its own."""
    admin = config.admin
    if admin.port:
        admin = admin.model_copy(update={"port": admin.port + number})
    share = config.quota.local_share / workers
    return config.model_copy(
        update={
            "listen": config.listen.model_copy(update={"port": port}),
            "admin": admin,
            "quota": config.quota.model_copy(update={"local_share": share}),
        }
    )
