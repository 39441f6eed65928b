"""A plain OpenAI server as a replica: `GET /v1/models` is its heartbeat and all it says of itself.

Such a server tells nothing of residency, so it is inferred: an adapter it serves counts as in a
slot. Then no load is ever expected, and what routes is the ring under the load bound, which keeps
each adapter on few servers, the best that can be done without knowing. What it serves is what it
lists, and what the configuration names beside that; `*` there stands for every name (a server that
loads on demand): such a name is passed on, and is the server's to refuse.

Its busyness is not told either: `capacity` of the configuration bounds what we send.
"""

from __future__ import annotations

import asyncio
import logging
from secrets import token_hex
from typing import Any, Final

import orjson

from gateway.config import ReplicaEntry
from gateway.edge.exchange import (
    ConnectFailed,
    Flow,
    Headers,
    ReplyTimeout,
    ReplyTooLong,
    ReplyUnfit,
    Sink,
    UpstreamError,
)
from gateway.edge.upstream import Upstream
from gateway.fleet.pump import Pump
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, ReplicaReport, Tier

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
_LIST_BYTES_MAX: Final = 8 << 20
_NO_LIST: Final = (404, 405)  # alive, but it does not list its models


class OpenAIServer:
    """Polls one server; `run` until cancelled."""

    def __init__(
        self,
        entry: ReplicaEntry,
        upstream: Upstream,
        pump: Pump,
        *,
        silence_heartbeats: float,
        poll_s: float = POLL_S,
    ) -> None:
        self._entry = entry
        self._replica = ReplicaId(entry.id)
        self._upstream = upstream
        self._pump = pump
        self._poll_s = poll_s
        self._silence_s = silence_heartbeats * poll_s
        self._boot, self._seq = token_hex(8), 0

    async def run(self) -> None:
        up = False
        while True:
            try:
                report = self._report(await self._listed())
            except UpstreamError as error:
                if up:
                    self._pump.replica_lost(self._replica)
                if isinstance(error, (ReplyTimeout, ConnectFailed)):
                    self._upstream.abandon(self._silence_s, "the replica fell silent")
                level = logging.WARNING if up else logging.DEBUG
                _log.log(level, "poll failed", extra={"replica": self._replica, "why": str(error)})
                up = False
                # what comes back may have been started anew, cold: it has its slow start
                self._boot = token_hex(8)
            else:
                self._pump.report(report)
                up = True
            await asyncio.sleep(self._poll_s)

    async def _listed(self) -> list[dict[str, Any]]:
        """The models it lists; none when it has no such list. Raises UpstreamError."""
        answer = _Answer()
        await self._upstream.exchange(
            (
                f"GET {self._upstream.prefix}/v1/models HTTP/1.1\r\n"
                f"host: {self._upstream.host}\r\n\r\n"
            ).encode(),
            answer,
            first_byte_s=self._silence_s,
            idle_s=self._silence_s,
        )
        return [] if answer.status in _NO_LIST else _models(bytes(answer.content))

    def _report(self, listed: list[dict[str, Any]]) -> ReplicaReport:
        """Raises ReplyUnfit when nobody names the base."""
        names = [model["id"] for model in listed]
        roots = [model["id"] for model in listed if not model.get("parent")]
        base = self._entry.base or next(iter(roots), "")
        if not base:
            raise ReplyUnfit("it lists no model: name its base in fleet.replicas")
        adapters = dict.fromkeys((*names, *self._entry.models))
        adapters.pop(base, None)
        self._seq += 1
        return ReplicaReport(
            replica=self._replica,
            boot=self._boot,
            seq=self._seq,
            base=base,
            slots=len(adapters),
            capacity=self._entry.capacity,
            running=0,
            waiting=0,
            pages_total=0,
            pages_free=0,
            max_model_len=max((_length(model) for model in listed), default=0),
            heartbeat_s=self._poll_s,
            adapters=tuple(AdapterState(AdapterId(name), "", Tier.GPU) for name in adapters),
        )


class _Answer(Sink):
    """The sink of one poll."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        if status != 200 and status not in _NO_LIST:
            raise ReplyUnfit(f"the server answered /v1/models with status {status}")
        self.status = status

    def body(self, data: bytes) -> bool:
        self.content += data
        if len(self.content) > _LIST_BYTES_MAX:
            raise ReplyTooLong(f"a list of models of more than {_LIST_BYTES_MAX} bytes")
        return False


def _models(content: bytes) -> list[dict[str, Any]]:
    try:
        listed = orjson.loads(content)["data"]
        return [model for model in listed if isinstance(model["id"], str)]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ReplyUnfit(f"/v1/models is not a list of models: {error!r}") from error


def _length(model: dict[str, Any]) -> int:
    length = model.get("max_model_len")
    return length if isinstance(length, int) else 0
