"""One of our own replicas as a place to load adapters on, by the calls that vLLM has.

It reports versions itself, so an adapter keeps its plain name there, and a new version takes the
place of the old in one step (`load_inplace`; what runs finishes on the old). Whether its content is
the version on record shows in its next report. Its own store lists adapters too; unloaded is only
what was loaded from here in this gateway's life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from gateway.core.dispatcher import Dispatcher
from gateway.edge.upstream import Upstream
from gateway.engines.asking import asked
from gateway.engines.engine import error_of, name_here, name_there
from gateway.engines.polled import LOAD_S
from gateway.state.adapter_records import AdapterRecord
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState
from shared.wire import FLEET_TOKEN, LOAD_PATH, UNLOAD_PATH


class NativePlace:
    def __init__(
        self,
        replica: ReplicaId,
        upstream: Upstream,
        dispatcher: Dispatcher,
        desired: Callable[[], Iterable[AdapterRecord]],
        *,
        token: str,
    ) -> None:
        self.replica: Final = replica
        self.failures: dict[AdapterId, AdapterState] = {}
        self._upstream = upstream
        self._dispatcher = dispatcher
        self._desired = desired
        self._lines = f"{FLEET_TOKEN}: {token}\r\n" if token else ""
        self._given: set[str] = set()

    @property
    def held(self) -> frozenset[str] | None:
        if not self._dispatcher.serves(self.replica):
            return None
        names = {name_there(one.name, one.current) for one in self._desired()} | self._given
        return frozenset(name for name in names if self._has(name))

    def _has(self, name: str) -> bool:
        adapter, digest = name_here(name)
        held = self._dispatcher.digest_at(self.replica, AdapterId(adapter))
        return held is not None and name_there(adapter, held) == name_there(adapter, digest)

    async def load(self, name: str, path: str) -> str:
        adapter, _ = name_here(name)
        self._given.add(name)
        in_place = self._dispatcher.digest_at(self.replica, AdapterId(adapter)) is not None
        return await self._ask(
            LOAD_PATH, {"lora_name": adapter, "lora_path": path, "load_inplace": in_place}
        )

    async def unload(self, name: str) -> str:
        why = await self._ask(UNLOAD_PATH, {"lora_name": name_here(name)[0]})
        if not why:
            self._given.discard(name)
        return why

    async def _ask(self, path: str, body: dict[str, Any]) -> str:
        answer = await asked(self._upstream, path, body, lines=self._lines, limit_s=LOAD_S)
        return "" if answer.status == 200 else error_of(answer)
