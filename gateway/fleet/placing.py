"""Carry out what placement orders: POST /prefetch to replicas, beside the requests.

Law: at most one order is under way at a replica, and one of a tier waits for it, the newest: a
newer order says all that an older one did. Nothing is retried here. What had no effect shows in no
report, and the core orders it again, so often and no more (gateway/core/orders.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import orjson

from gateway.core.orders import Order
from gateway.edge.exchange import Flow, Headers, Sink, UpstreamError
from gateway.edge.upstream import Upstream
from shared import tasks
from shared.ids import ReplicaId
from shared.messages import Tier
from shared.wire import FLEET_TOKEN, PREFETCH_PATH

_log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""An order is answered when it is taken, not when it is done."""


class Placer:
    def __init__(
        self,
        upstreams: Mapping[ReplicaId, Upstream],
        *,
        token: str,
        ordered: Callable[[Tier, str, int], None] = lambda tier, result, adapters: None,
    ) -> None:
        """`ordered` is told of each order: its tier, what came of it, how many adapters."""
        self._upstreams = upstreams
        self._ordered = ordered
        self._token = token
        self._waiting: dict[ReplicaId, dict[Tier, Order]] = {}
        self._at_work: dict[ReplicaId, asyncio.Task[None]] = {}

    def carry_out(self, order: Order) -> None:
        """Begin it, or after what is under way at its replica."""
        if order.replica not in self._upstreams:
            return
        self._waiting.setdefault(order.replica, {})[order.tier] = order
        if order.replica not in self._at_work:
            work = self._work(order.replica)
            self._at_work[order.replica] = tasks.spawn(work, name=f"orders of {order.replica}")

    async def close(self) -> None:
        await tasks.stop(*self._at_work.values())

    async def _work(self, replica: ReplicaId) -> None:
        waiting = self._waiting[replica]
        try:
            while waiting:
                await self._post(waiting.pop(next(iter(waiting))))
        finally:
            del self._at_work[replica]

    async def _post(self, order: Order) -> None:
        upstream, answer = self._upstreams.get(order.replica), _Answer()
        if upstream is None:  # it has left the fleet
            return
        try:
            await upstream.exchange(
                self._request(upstream, order), answer, first_byte_s=ANSWER_S, idle_s=ANSWER_S
            )
        except UpstreamError as error:
            answer.why = str(error)
        taken = answer.status == 202
        self._ordered(order.tier, "taken" if taken else "not_taken", len(order.adapters))
        if not taken:
            told = {"replica": order.replica, "status": answer.status, "why": answer.text()}
            _log.warning("order of placement not taken", extra=told)

    def _request(self, upstream: Upstream, order: Order) -> bytes:
        body = orjson.dumps({"adapters": order.adapters, "tier": order.tier})
        token = f"{FLEET_TOKEN}: {self._token}\r\n" if self._token else ""
        head = (
            f"POST {upstream.prefix}{PREFETCH_PATH} HTTP/1.1\r\nhost: {upstream.host}\r\n{token}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Answer(Sink):
    def __init__(self) -> None:
        self.status = 0
        self.why = ""
        self._said = b""

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        self.status = status

    def body(self, data: bytes) -> bool:
        self._said = (self._said + data)[:512]
        return False

    def text(self) -> str:
        return self.why or self._said.decode(errors="replace")
