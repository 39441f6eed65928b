"""RemoteFolder: the adapters of an object store, read through a cache on the local disk.

It answers as `AdapterFolder` does, and never lets a slow store be felt: `scan` tells what is known
and returns at once, while listing and first looks at adapters go on behind it. An adapter that was
never seen is downloaded once, to learn its digest and whether it can be served; that verdict is
kept on the disk by the version's entity tags, so that neither an eviction nor a restart asks the
store again. What the listing alone tells (no weights, a pickle, too many bytes) costs no download,
and a config that cannot be served none of the weights.

Faults of the store are not the adapter's: a name goes on with the version it has until a newer one
was looked at; one that has none is refused as `unreachable` and tried again, after a pause that
doubles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from replica.disk_cache import DiskCache
from replica.engine.adapter_files import WEIGHTS_FILE
from replica.engine.adapter_store import AdapterFolder, Found, Refused
from replica.engine.bad_adapter import BadAdapter
from replica.engine.host_adapter import HostAdapter
from replica.engine.peft_config import CONFIG_FILE, PeftConfig, load_config
from replica.engine.threads import lone
from replica.object_store import ObjectStore, RemoteAdapter, RemoteFile
from replica.source import NOT_FOUND, PASSING
from replica.verdicts import Verdicts
from shared.clock import Clock
from shared.ids import AdapterId

_log = logging.getLogger(__name__)

_LOOKS: Final = 2
_FIRST_LIST_S: Final = 5.0
"""The first scan waits this long for the first listing."""
_RETRY_S: Final = (1.0, 300.0)


@dataclass(slots=True)
class _Failure:
    reason: BadAdapter
    retry_at: float
    pause_s: float


class RemoteFolder:
    def __init__(
        self,
        store: ObjectStore,
        cache: DiskCache,
        verdicts: Verdicts,
        folder: AdapterFolder,
        *,
        largest_bytes: int,
        clock: Clock,
        list_s: float = 5.0,
    ) -> None:
        """`folder` reads what is in the cache; more than `largest_bytes` of weights fit no base;
        between two listings are at least `list_s`."""
        self._store = store
        self._cache = cache
        self._verdicts = verdicts
        self._folder = folder
        self._largest_bytes = largest_bytes
        self._clock = clock
        self._list_s = list_s
        self._lock = threading.Lock()
        self._listed: dict[AdapterId, RemoteAdapter] = {}
        self._listing: Future[None] | None = None
        self._listed_at = self._told_at = float("-inf")
        self._said: dict[AdapterId, Found | Refused] = {}  # by name, as last scanned
        self._looking: set[AdapterId] = set()  # keys
        self._flights: dict[AdapterId, Future[None]] = {}  # by key
        self._failures: dict[AdapterId, _Failure] = {}  # by key
        # Two pools besides the caller's, so that listing, first looks and loads never wait for
        # each other.
        self._looks = ThreadPoolExecutor(_LOOKS, "look", initializer=lone)
        self._lister = ThreadPoolExecutor(1, thread_name_prefix="list")

    def close(self) -> None:
        """What is under way ends soon, with a fault."""
        self._store.close()
        for pool in (self._looks, self._lister):
            pool.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    # --- as AdapterFolder

    def scan(self) -> list[Found | Refused]:
        """What is known of every adapter that the store was last seen to have, by name."""
        first = self._list_if_due()
        if first is not None:
            with suppress(TimeoutError):
                first.result(timeout=_FIRST_LIST_S)
        said = {name: self._answer(name, remote) for name, remote in sorted(self._listed.items())}
        self._said = {name: answer for name, answer in said.items() if answer is not None}
        return list(self._said.values())

    def read(self, adapter: AdapterId) -> HostAdapter:
        """Blocks for a download when it is not on the disk. Raises BadAdapter."""
        remote = self._remote(adapter)
        key = self._key(adapter, remote)
        for _ in range(2):
            self._fetch(key, remote)
            with self._cache.hold(key) as there:
                if there:
                    return self._read_cached(adapter, key)
        raise BadAdapter("disk_full", "the adapter left the cache before it was read; try again")

    def at_hand(self, adapter: AdapterId) -> bool:
        """Whether reading it needs only the local disk."""
        remote = self._listed.get(adapter)
        return remote is not None and self._key(adapter, remote) in self._cache

    def locate(self, path: str) -> AdapterId:
        """A name, or the store's URL and a name."""
        name = path.removeprefix(f"{self._store.url}/").strip("/")
        if not name or "/" in name or name.startswith("."):
            raise BadAdapter(
                "outside_root", f"{path} names no adapter of {self._store.url}", "lora_path"
            )
        return AdapterId(name)

    def fetch(self, adapter: AdapterId) -> None:
        """Bring what the store has now, and judge it. Blocks; raises BadAdapter."""
        self._list()  # it may be new, or replaced
        remote = self._remote(adapter)
        key = self._key(adapter, remote)
        self._fetch(key, remote)
        if self._verdicts.get(key) is None:
            self._judge(adapter, key)

    def _read_cached(self, adapter: AdapterId, key: AdapterId) -> HostAdapter:
        try:
            return replace(self._folder.read(key), adapter=adapter)
        except BadAdapter as bad:
            if bad.code not in PASSING:  # what was whole when it came is no more
                self._cache.remove(key)
            raise

    # --- the listing

    def _list_if_due(self) -> Future[None] | None:
        """Begin a listing; returns the first one, which is worth waiting for."""
        with self._lock:
            due = self._clock() - self._listed_at >= self._list_s
            if due and (self._listing is None or self._listing.done()):
                first = self._listing is None
                self._listing = self._lister.submit(self._list)
                return self._listing if first else None
        return None

    def _list(self) -> None:
        began_at = self._clock()
        try:
            listed = self._store.list()
        except BadAdapter as bad:
            _log.error("store not listed", extra={"url": self._store.url, "reason": bad.message})
        else:
            self._take(listed, began_at)
        self._listed_at = self._clock()

    def _take(self, listed: dict[AdapterId, RemoteAdapter], began_at: float) -> None:
        with self._lock:
            if began_at < self._told_at:
                return  # one that began later was quicker
            self._listed, self._told_at = listed, began_at
        keys = {self._key(name, remote) for name, remote in listed.items()}
        self._verdicts.keep_only(keys)
        self._folder.keep_only(keys)
        for key in self._failures.keys() - keys:
            self._failures.pop(key, None)

    def _remote(self, adapter: AdapterId) -> RemoteAdapter:
        remote = self._listed.get(adapter)
        if remote is None:
            raise BadAdapter(NOT_FOUND, f"No adapter found for {adapter} in {self._store.url}")
        return remote

    def _key(self, adapter: AdapterId, remote: RemoteAdapter) -> AdapterId:
        text = json.dumps([self._store.url, adapter, *remote.tags])
        return AdapterId(hashlib.sha256(text.encode()).hexdigest()[:32])

    # --- verdicts

    def _answer(self, name: AdapterId, remote: RemoteAdapter) -> Found | Refused | None:
        """None: it is being looked at for the first time."""
        plain = remote.fault(self._largest_bytes)
        if plain is not None:
            return _refused(name, plain)
        key = self._key(name, remote)
        verdict = self._verdicts.get(key)
        if verdict is not None:
            return replace(verdict, adapter=name)
        failure = self._failures.get(key)
        if failure is None or failure.retry_at <= self._clock():
            self._look(name, key, remote)
        before = self._said.get(name)
        if isinstance(before, Found) or failure is None:
            return before
        return _refused(name, failure.reason)

    def _look(self, name: AdapterId, key: AdapterId, remote: RemoteAdapter) -> None:
        """Begin to learn what it is, unless that is under way."""
        with self._lock:
            if key in self._looking:
                return
            self._looking.add(key)
        self._looks.submit(self._examine, name, key, remote)

    def _examine(self, name: AdapterId, key: AdapterId, remote: RemoteAdapter) -> None:
        try:
            self._fetch(key, remote)
            self._judge(name, key)
        except BadAdapter as bad:
            self._conclude(name, key, _refused(name, bad))
        except Exception as error:
            _log.exception("adapter not looked at", extra={"adapter": name})
            self._conclude(name, key, Refused(name, "unreadable", repr(error)))
        finally:
            with self._lock:
                self._looking.discard(key)

    def _judge(self, name: AdapterId, key: AdapterId) -> None:
        with self._cache.hold(key):
            self._conclude(name, key, self._folder.examine(key))

    def _conclude(self, name: AdapterId, key: AdapterId, verdict: Found | Refused) -> None:
        if isinstance(verdict, Refused) and verdict.reason_code in PASSING:
            old = self._failures.get(key)
            pause_s = _RETRY_S[0] if old is None else min(old.pause_s * 2, _RETRY_S[1])
            reason = BadAdapter(verdict.reason_code, verdict.message, verdict.param)
            self._failures[key] = _Failure(reason, self._clock() + pause_s, pause_s)
            facts = {"adapter": name, "reason": verdict.message, "again_in_s": pause_s}
            _log.warning("adapter not fetched", extra=facts)
            return
        self._failures.pop(key, None)
        self._verdicts.keep(key, verdict)
        if isinstance(verdict, Refused):
            self._cache.remove(key)

    # --- downloads

    def _fetch(self, key: AdapterId, remote: RemoteAdapter) -> None:
        """One flight a key: who comes while it is under way waits for it and shares its end."""
        with self._lock:
            flight = self._flights.get(key)
            ours = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if ours:
            try:
                self._bring(key, remote)
            except BaseException as error:
                flight.set_exception(error)
            else:
                flight.set_result(None)
            finally:
                with self._lock:
                    del self._flights[key]
        flight.result()

    def _bring(self, key: AdapterId, remote: RemoteAdapter) -> None:
        bad = remote.fault(self._largest_bytes)
        if bad is not None:
            raise bad
        assert remote.config is not None
        assert remote.weights is not None
        self._cache.bring(
            key, remote.size_bytes, partial(self._fill, remote.config, remote.weights)
        )

    def _fill(self, config: RemoteFile, weights: RemoteFile, folder: Path) -> None:
        self._store.download(config, folder / CONFIG_FILE)
        text = (folder / CONFIG_FILE).read_bytes()
        PeftConfig.of(load_config(text), (CONFIG_FILE, WEIGHTS_FILE))
        self._store.download(weights, folder / WEIGHTS_FILE)


def _refused(adapter: AdapterId, bad: BadAdapter) -> Refused:
    return Refused(adapter, bad.code, bad.message, bad.param)
