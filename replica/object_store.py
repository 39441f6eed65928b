"""ObjectStore: adapters in S3, Google Cloud, Azure or a folder, each below one prefix by its name.

    <prefix>/<name>/adapter_config.json
    <prefix>/<name>/adapter_model.safetensors

Laws: nothing is read above the prefix; a download is of one version, by the entity tag that the
listing named, or fails; it goes on where a broken connection left it, as long as each attempt
brings something; it never takes more bytes than were promised. Calls block, for `download_s` at
most, and belong on threads of their own. Faults are BadAdapter: `unreachable`, which may pass, or
what the store says of the adapter (`changed`, `too_large`).

obstore (the Rust object_store crate) speaks the protocols; its own retries are off, because only
here is it known what has already been brought.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError, NotFoundError, PreconditionError
from obstore.store import from_url

from replica.engine.adapter_files import CONFIG_MAX_BYTES, WEIGHTS_FILE
from replica.engine.bad_adapter import BadAdapter
from replica.engine.peft_config import CONFIG_FILE
from shared.clock import Clock
from shared.ids import AdapterId

_log = logging.getLogger(__name__)

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)

_OBJECTS_MAX: Final = 200_000
"""Objects of one listing that are looked at."""
_PIECE_BYTES: Final = 256 << 10
_PROGRESS_S: Final = 5.0
_VAIN_MAX: Final = 4
"""Attempts in a row that bring nothing."""
_BACKOFF_S: Final = (0.2, 5.0)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    path: str  # below the prefix
    size_bytes: int
    etag: str | None
    changed_at: str

    @property
    def tag(self) -> str:
        """What changes when its content does."""
        return self.etag or f"{self.changed_at} {self.size_bytes}"


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """What the store has under one name; a file it lacks is None."""

    config: RemoteFile | None = None
    weights: RemoteFile | None = None
    pickled: bool = False  # it has an adapter_model.bin

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple("" if file is None else file.tag for file in (self.config, self.weights))

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in (self.config, self.weights) if file is not None)

    def fault(self, weights_max_bytes: int) -> BadAdapter | None:
        """What is wrong with it for all to see, before anything is downloaded."""
        if self.config is None:
            return BadAdapter("missing_config", f"no {CONFIG_FILE}: upload it too", CONFIG_FILE)
        if self.config.size_bytes > CONFIG_MAX_BYTES:
            has = f"{CONFIG_FILE} has {self.config.size_bytes} bytes: save it with PEFT"
            return BadAdapter("bad_config", has, CONFIG_FILE)
        if self.weights is None and self.pickled:
            text = "the weights are a pickle, which could run code: save them with safetensors"
            return BadAdapter("pickle_not_allowed", text, "adapter_model.bin")
        if self.weights is None:
            return BadAdapter("missing_weights", f"no {WEIGHTS_FILE}: upload it too", WEIGHTS_FILE)
        if self.weights.size_bytes > weights_max_bytes:
            text = (
                f"{WEIGHTS_FILE} has {self.weights.size_bytes} bytes; what fits this base and rank "
                f"cap has {weights_max_bytes} at most: save the adapter alone"
            )
            return BadAdapter("too_large", text, WEIGHTS_FILE)
        return None


class ObjectStore:
    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, str] | None = None,
        clock: Clock,
        request_s: float = 20.0,
        connect_s: float = 5.0,
        download_s: float = 900.0,
    ) -> None:
        """`options` are the client's own (endpoint, region, …); credentials also come from the
        environment. Raises ValueError with what is wrong with them."""
        if url.partition("://")[0] not in SCHEMES:
            raise ValueError(
                f"{url!r} is no URL of an object store: {', '.join(SCHEMES)} are known"
            )
        self.url = url.rstrip("/")
        try:
            self._store = from_url(
                self.url, **_settings(self.url, dict(options or {}), request_s, connect_s)
            )
        except (BaseError, ValueError, TypeError) as error:
            raise ValueError(f"{url}: {_reason(error)}") from None
        self._clock = clock
        self._download_s = download_s
        self._closing = threading.Event()
        self._dice = random.Random(self.url)  # spreads retries; nothing depends on it

    def close(self) -> None:
        """Every call that is under way fails soon."""
        self._closing.set()

    def list(self) -> dict[AdapterId, RemoteAdapter]:
        """Every folder directly below the prefix. Raises BadAdapter `unreachable`."""
        found: dict[str, dict[str, Any]] = {}
        for at, meta in enumerate(self._objects()):
            name, _, file = meta["path"].partition("/")
            if at >= _OBJECTS_MAX:
                _log.error("store has too many objects", extra={"url": self.url, "read": at})
                break
            if name.startswith(".") or not file:
                continue
            entry = found.setdefault(name, {})
            if file in FILES:
                kind = "config" if file == CONFIG_FILE else "weights"
                changed_at = meta["last_modified"].isoformat()
                entry[kind] = RemoteFile(meta["path"], meta["size"], meta["e_tag"], changed_at)
            elif file.startswith("adapter_model") and file.endswith(".bin"):
                entry["pickled"] = True
        return {AdapterId(name): RemoteAdapter(**entry) for name, entry in sorted(found.items())}

    def download(self, file: RemoteFile, into: Path) -> None:
        """Bring the file, going on from what `into` already has. Raises BadAdapter and OSError."""
        begun_at, vain = self._clock(), 0
        progress = _Progress(self.url, file, self._clock)
        with into.open("ab") as out:
            while (have := out.tell()) < file.size_bytes:
                try:
                    self._go_on(file, out, have, progress)
                except (NotFoundError, FileNotFoundError):
                    raise BadAdapter("changed", f"{file.path} left the store; try again") from None
                except PreconditionError:
                    raise BadAdapter("changed", f"{file.path} was replaced; try again") from None
                except BaseError as error:
                    out.flush()
                    vain = vain + 1 if out.tell() == have else 0
                    late = self._clock() - begun_at > self._download_s
                    if vain >= _VAIN_MAX or late or self._closing.is_set():
                        raise self._unreachable(error, file.path) from None
                    _log.warning(
                        "download interrupted",
                        extra={"file": file.path, "bytes": out.tell(), "reason": _reason(error)},
                    )
                    self._closing.wait(self._backoff_s(vain))
            out.flush()
            os.fsync(out.fileno())

    def _go_on(self, file: RemoteFile, out: Any, have: int, progress: _Progress) -> None:
        wanted: Any = {} if file.etag is None else {"if_match": file.etag}
        if have:
            wanted["range"] = {"offset": have}
        got = obstore.get(self._store, file.path, options=wanted)
        if got.meta["size"] != file.size_bytes:
            raise BadAdapter("changed", f"{file.path} was replaced; try again")
        for piece in got.stream(min_chunk_size=_PIECE_BYTES):
            if out.tell() + len(piece) > file.size_bytes:
                raise BadAdapter("too_large", f"{file.path} is longer than its listing says")
            out.write(piece)
            if self._closing.is_set():
                raise BaseError("this replica is closing")
            progress.at(out.tell())
        if out.tell() < file.size_bytes:
            raise BaseError("the connection ended early")

    def _objects(self) -> Iterator[Any]:
        try:
            for metas in obstore.list(self._store):
                yield from metas
        except BaseError as error:
            raise self._unreachable(error, self.url) from None

    def _backoff_s(self, vain: int) -> float:
        least, most = _BACKOFF_S
        return min(least * float(2**vain), most) * self._dice.uniform(0.5, 1.0)

    def _unreachable(self, error: Exception, what: str) -> BadAdapter:
        return BadAdapter("unreachable", f"{what}: {_reason(error)}; it will be tried again")


class _Progress:
    """A line in the log every few seconds, and at the end of what took that long."""

    def __init__(self, url: str, file: RemoteFile, clock: Clock) -> None:
        self._file, self._clock = file, clock
        self._begun_at = self._said_at = clock()
        self._from: int | None = None

    def at(self, have: int) -> None:
        now = self._clock()
        if self._from is None:
            self._from = have
        if now - self._said_at >= _PROGRESS_S:
            self._said_at = now
            rate = (have - self._from) / (now - self._begun_at)
            facts = {"bytes": have, "of_bytes": self._file.size_bytes, "bytes_per_s": round(rate)}
            _log.info("downloading", extra={"file": self._file.path, **facts})


def _settings(
    url: str, options: dict[str, str], request_s: float, connect_s: float
) -> dict[str, Any]:
    if url.startswith("file://"):
        return {}
    plain = options.get("endpoint", options.get("aws_endpoint", "")).startswith("http://")
    return {
        "config": options,
        "client_options": {
            "timeout": timedelta(seconds=request_s),
            "connect_timeout": timedelta(seconds=connect_s),
            "allow_http": plain,
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=request_s)},
    }


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
