"""vLLM's CPU build as a peer: its own server, on the same cores, from an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Final

import aiohttp

from loadtests.bench.process import free_port

_START_S: Final = 420
"""It compiles the model when it has not seen it before: minutes on two cores."""

_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.asynccontextmanager
async def serving(
    python: Path, base: Path, name: str, *, batch: int
) -> AsyncIterator[tuple[int, str]]:
    """Its process id and its address, once it answers. float32, up to `batch` sequences at once.

    Raises SystemExit when it does not start.
    """
    port = free_port()
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server"]  # `vllm` fails in that build
    words += ["--model", str(base), "--served-model-name", name, "--dtype", "float32"]
    words += ["--max-model-len", "1024", "--max-num-seqs", str(batch)]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    here = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=log, stderr=log, env=here | _ENVIRONMENT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await _healthy(url, process, log)
            yield process.pid, url
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # it ends what it started
            await process.wait()


async def _healthy(url: str, process: Process, log: IO[bytes]) -> None:
    with contextlib.suppress(TimeoutError):
        async with aiohttp.ClientSession(url) as http, asyncio.timeout(_START_S):
            while process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/health") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(0.5)
    log.seek(0)
    raise SystemExit(f"vLLM did not start:\n{log.read()[-3000:].decode(errors='replace')}")
