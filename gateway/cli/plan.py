"""What `loraplex up` was asked for, checked before anything starts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.cli.extra import require_replica
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.home import Home
from gateway.config import GatewayConfig, StoreConfig
from shared.settings import BadSettings, load

DEMO_BASE: Final = "demo"
REPLICAS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Plan:
    home: Home
    replicas: int
    base: Path | None  # None: the demo base, prepared first
    adapters: Path | None  # None: the base's own folder in the data directory
    config: GatewayConfig
    threads: int  # of one replica

    @property
    def external_store(self) -> bool:
        """The configuration names a store of the user's, so none is started.

        It does when `store.url` is another than the default: the values are compared, since the
        example that `loraplex gateway --example-config` prints spells every default out. (A Redis
        that really is there can be named in another way: redis://localhost:6379/0.)
        """
        return _changed(self.config, "url")

    @property
    def spool(self) -> Path:
        """In the data directory, unless the configuration names another than the default."""
        if _changed(self.config, "spool"):
            return self.config.store.spool
        return self.home.store / "ledger.spool"


def _changed(config: GatewayConfig, name: str) -> bool:
    default = StoreConfig.model_fields[name].default
    return bool(getattr(config.store, name) != default)


def plan(
    *,
    home: Home,
    replicas: int,
    base: str,
    adapters: Path | None,
    port: int | None,
    config: Path | None,
) -> Plan:
    """Raises Failure: exit code 2 for what was asked wrongly, 1 for what this machine lacks."""
    if not 1 <= replicas <= REPLICAS_MAX:
        raise usage_failure(f"--replicas {replicas}: from 1 to {REPLICAS_MAX}.")
    require_replica()
    settings = _settings(config, port)
    _check_port(settings.listen.host, settings.listen.port)
    if settings.admin.port == 0:
        raise usage_failure("admin.port: 0 takes any port, and `up` could not know which.")
    return Plan(
        home=home,
        replicas=replicas,
        base=None if base == DEMO_BASE else _base_folder(Path(base)),
        adapters=None if adapters is None else _adapters_folder(adapters),
        config=settings,
        threads=max(1, len(os.sched_getaffinity(0)) // replicas),
    )


def _settings(path: Path | None, port: int | None) -> GatewayConfig:
    if path is not None and not path.is_file():
        raise usage_failure(f"--config {path}: no such file. See `loraplex gateway --help`.")
    try:
        settings = load(GatewayConfig, path)
    except BadSettings as error:
        raise usage_failure(str(error)) from error
    if port is None:
        return settings
    return settings.model_copy(update={"listen": settings.listen.model_copy(update={"port": port})})


def _check_port(host: str, port: int) -> None:
    """Say so now rather than after a minute of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Failure(
                f"cannot listen on {host}:{port}: {error.strerror}. "
                "Choose another port with --port, or --port 0 for a free one."
            ) from error


def _base_folder(path: Path) -> Path:
    if not path.is_dir():
        raise usage_failure(
            f"--base {path}: no such folder. Give a Hugging Face model folder, or `demo`."
        )
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise usage_failure(f"--base {path}: not a model folder, it has no {name}.")
    if not any(path.glob("*.safetensors")):
        raise usage_failure(f"--base {path}: it has no .safetensors file.")
    return path.resolve()


def _adapters_folder(path: Path) -> Path:
    if not path.is_dir():
        raise usage_failure(
            f"--adapters {path}: no such folder. Give the folder that holds one PEFT folder "
            "for each adapter."
        )
    return path.resolve()
