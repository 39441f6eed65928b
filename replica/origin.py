"""Which source of adapters a replica's settings mean, built and opened."""

from __future__ import annotations

from pathlib import Path

from replica.config import ReplicaConfig
from replica.disk_cache import CacheTaken, DiskCache
from replica.engine.adapter_files import largest_bytes
from replica.engine.adapter_store import AdapterFolder
from replica.engine.model_config import ModelConfig
from replica.object_store import ObjectStore
from replica.remote_folder import RemoteFolder
from replica.source import LocalSource, Source
from replica.verdicts import Verdicts
from shared.clock import monotonic
from shared.settings import BadSettings


def source_of(config: ReplicaConfig, model: ModelConfig) -> Source:
    """Raises BadSettings."""

    def folder(root: Path) -> AdapterFolder:
        return AdapterFolder(
            root,
            config.max_lora_rank,
            model,
            config.dtype,
            page_tokens=config.page_tokens,
            base_dir=config.base,
            pinned=config.device.startswith("cuda"),
        )

    if not config.adapter_store:
        return LocalSource(config.adapters, folder(config.adapters))
    try:
        store = ObjectStore(
            config.adapter_store, options=config.adapter_store_options, clock=monotonic
        )
        cache = DiskCache(config.adapters, max_bytes=config.disk_cache_bytes)
    except ValueError as error:
        raise BadSettings(f"adapter_store: {error}") from None
    except CacheTaken as error:
        raise BadSettings(f"adapters: {error}") from None
    except OSError as error:
        raise BadSettings(f"adapters: {config.adapters} cannot be written: {error}") from None
    judge = f"{model} {config.max_lora_rank} {config.dtype} {config.page_tokens}"
    return RemoteFolder(
        store,
        cache,
        Verdicts(config.adapters / "verdicts", judge=judge),
        folder(cache.adapters),
        largest_bytes=largest_bytes(model, config.max_lora_rank),
        clock=monotonic,
    )
