"""Does the bill agree with what the replicas say they generated?

Of each life of a replica two counts are kept apart from each other: the replica's own, of every
token that any sequence of it was given (`vllm:generation_tokens_total`), and the ledger's sums of
what was billed to it. With nothing running they are equal, but for requests whose client left: the
gateway has counted those by the events that passed, and the row says how many they were.

    difference = generated - billed        explained = tokens of estimated requests

More was generated than billed: somebody calls the replica past this gateway, or records are lost.
More was billed than generated: the ledger counts twice. Requests that run while the two are read
are not yet billed, so a row with `running` above 0 is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from gateway.core.dispatcher import Dispatcher, ReplicaView
from gateway.edge.exchange import Flow, Headers, ReplyTooLong, ReplyUnfit, Sink, UpstreamError
from gateway.edge.upstream import Upstream
from gateway.state.ledger import Ledger
from shared.clock import Clock
from shared.ids import ReplicaId

_GENERATED: Final = "vllm:generation_tokens_total"
_PATIENCE_S: Final = 5.0
_BYTES_MAX: Final = 8 << 20
_SLACK: Final = 0.02
"""Of estimated requests: an event may carry more than one token."""


class Reconciler:
    def __init__(
        self,
        ledger: Ledger,
        dispatcher: Dispatcher,
        upstreams: Mapping[ReplicaId, Upstream],
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._upstreams = upstreams
        self._clock = clock

    async def rows(self) -> list[dict[str, Any]]:
        """One a replica. `verdict` is equal, explained, differs, running or unknown."""
        return [await self._row(view) for view in self._dispatcher.view(self._clock())]

    async def _row(self, view: ReplicaView) -> dict[str, Any]:
        row: dict[str, Any] = {"replica": view.replica, "boot": view.boot, "generated": None}
        try:
            generated = await self._generated(view.replica)
        except UpstreamError as error:
            generated, row["reason"] = None, f"its metrics cannot be read: {error}"
        else:
            row["reason"] = "" if generated is not None else f"it does not count {_GENERATED}"
        billed = await self._ledger.billed(view.replica, view.boot)
        now = self._dispatcher.view(self._clock())
        same = any(one.replica == view.replica and one.boot == view.boot for one in now)
        running = max(one.in_flight + one.running for one in (view, *_of(now, view.replica)))
        if not same:
            row["reason"], generated = "it was restarted just now: ask again", None
        total = billed["counted_tokens"] + billed["estimated_tokens"]
        row |= {"generated": generated, "billed": total, **billed, "running": running}
        row["difference"] = None if generated is None else generated - total
        row["verdict"] = _verdict(row)
        return row

    async def _generated(self, replica: ReplicaId) -> int | None:
        upstream = self._upstreams.get(replica)
        if upstream is None:
            return None
        page = _Page()
        head = f"GET {upstream.prefix}/metrics HTTP/1.1\r\nhost: {upstream.host}\r\n\r\n"
        await upstream.exchange(head.encode(), page, first_byte_s=_PATIENCE_S, idle_s=_PATIENCE_S)
        try:
            families = [*text_string_to_metric_families(page.content.decode(errors="replace"))]
        except ValueError as error:
            raise ReplyUnfit(f"no Prometheus text: {error}") from error
        found = [one.value for of in families for one in of.samples if one.name == _GENERATED]
        return round(sum(found)) if found and all(map(math.isfinite, found)) else None


def _of(views: tuple[ReplicaView, ...], replica: ReplicaId) -> list[ReplicaView]:
    return [view for view in views if view.replica == replica]


def _verdict(row: Mapping[str, Any]) -> str:
    difference = row["difference"]
    if difference is None:
        return "unknown"
    if difference == 0:
        return "equal"
    if row["running"]:
        return "running"
    # a cut reply: what the replica made and did not send, and events that carry no token
    allowed = 2 * row["estimated_requests"] + _SLACK * row["estimated_tokens"]
    return "explained" if abs(difference) <= allowed else "differs"


class _Page(Sink):
    def __init__(self) -> None:
        self.content = bytearray()

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        if status != 200:
            raise ReplyUnfit(f"the replica answered /metrics with status {status}")

    def body(self, data: bytes) -> bool:
        self.content += data
        if len(self.content) > _BYTES_MAX:
            raise ReplyTooLong(f"metrics of more than {_BYTES_MAX} bytes")
        return False
