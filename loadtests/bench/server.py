"""The gateway as the benchmarks meet it: everything on, one command, one process and its store.

    python -m loadtests.bench.server --port 19300 --replica http://127.0.0.1:19101 …

starts an embedded store, one tenant with the key `sk-1234` and limits that it never reaches, and a
gateway over plain OpenAI servers, on which every adapter name exists. Authentication, quotas in
the store, the fair queue, routing, metering and the ledger all work as in production.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop

from gateway import app, workers
from gateway.config import GatewayConfig
from gateway.state.registry import Registry
from gateway.state.tenants import LIMIT_MAX, Limits
from gateway.store.embedded import embedded
from gateway.store.redis import Store
from shared import logs

KEY: Final = "sk-1234"
_TENANT: Final = "bench"


def main(
    replica: Annotated[list[str], typer.Option(help="URL of an OpenAI server; repeat it.")],
    port: Annotated[int, typer.Option(help="Tenants' port; 0 takes a free one.")] = 0,
    capacity: Annotated[int, typer.Option(help="Requests one replica runs at once.")] = 256,
    processes: Annotated[
        int, typer.Option("--workers", min=1, max=workers.WORKERS_MAX, help="On the one port.")
    ] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Folder of store and spool; a temporary one if none.")
    ] = None,
) -> None:
    logs.configure(level="WARNING")
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        place = data or Path(folder)
        with embedded(place) as url:
            config = configuration(replica, url, place / "spool", port=port, capacity=capacity)
            uvloop.run(_serve(config, processes))


def configuration(
    replicas: list[str], store: str, spool: Path, *, port: int, capacity: int
) -> GatewayConfig:
    fleet = [
        {"id": f"replica-{n}", "url": url, "kind": "openai", "models": ["*"], "capacity": capacity}
        for n, url in enumerate(replicas)
    ]
    return GatewayConfig.model_validate(
        {
            "listen": {"port": port},
            "store": {"url": store, "spool": spool, "timeout_s": 0.5},
            "fleet": {"replicas": fleet},
        }
    )


async def _serve(config: GatewayConfig, processes: int) -> None:
    await _admit(config)
    await (app.run(config) if processes == 1 else workers.run(config, processes))


async def _admit(config: GatewayConfig) -> None:
    """The tenant and its key, unless the store has them from an earlier run."""
    store = Store(config.store.url, prefix=config.store.prefix)
    registry = Registry(store)
    await store.start()
    await registry.start()
    try:
        if registry.tenant_for_key(KEY) is None:
            limits = Limits(requests_per_min=LIMIT_MAX, tokens_per_min=LIMIT_MAX)
            await registry.create(_TENANT, limits=limits)
            await registry.key_create(_TENANT, KEY)
    finally:
        await registry.close()
        await store.close()


if __name__ == "__main__":
    typer.run(main)
