"""A few paced streams through a real gateway: none cut, none late without being counted."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from loadtests.paced_client import Client, Seen
from loadtests.soak import Plan, _at, _slope, passed, soak, table


async def test_a_small_soak_ends_with_every_stream_whole() -> None:
    figures = await soak(Plan(streams=20, seconds=3, shortest_s=0.5, longest_s=1.5, seed=1))
    assert passed(figures), figures
    assert figures["streams_finished"] > 20
    assert figures["gateway_outcomes"] == {"ok": figures["streams_finished"]}
    assert figures["events"] > 5 * figures["streams_finished"]
    assert figures["late_ms"]["p50"] < 1000
    assert figures["rss_mib"]["first"] > 10
    assert str(figures["events"]) in table(figures)


async def test_a_stream_that_is_cut_or_loses_an_event_is_seen() -> None:
    seen = Seen()
    loop = asyncio.get_running_loop()

    class Transport:
        def write(self, data: bytes) -> None: ...
        def close(self) -> None: ...

    def event(left: int) -> bytes:
        return b"data: " + orjson.dumps({"left": left, "sent": 0.0}) + b"\n\n"

    def stream(*parts: bytes) -> None:
        client = Client(b"", seen, loop.create_future())
        client.connection_made(Transport())  # type: ignore[arg-type]
        for part in parts:
            client.data_received(part)
        client.connection_lost(None)

    done = b"data: [DONE]\n\n"
    stream(event(1)[:9], event(1)[9:], event(0) + done)
    assert (seen.finished, seen.cut, seen.lost_events, seen.events) == (1, 0, 0, 2)
    stream(event(3), event(2))
    stream(event(3), event(0) + done)
    stream(b"HTTP/1.1 503 \r\n\r\n")
    assert (seen.finished, seen.cut, seen.refused, seen.lost_events) == (2, 1, 1, 2)


def test_a_slope_is_the_least_squares_lines_and_percentiles_are_of_the_order() -> None:
    assert _slope([1.0, 3.0, 5.0]) == pytest.approx(2)
    assert _slope([2.0, 1.0, 2.0, 1.0]) == pytest.approx(-0.2)
    assert _slope([7.0]) == 0
    assert [_at([1, 2, 3, 4], p) for p in (0, 50, 99, 100)] == [1, 3, 4, 4]
