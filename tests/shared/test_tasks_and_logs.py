"""A background task that crashes says so; a log line is JSON and carries its request."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from shared.clock import ManualClock
from shared.logs import JsonFormatter, request_id
from shared.openai_errors import error_body, error_event, model_not_found
from shared.tasks import spawn, stop


async def test_a_crashed_task_is_reported_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def crash() -> None:
        raise RuntimeError("broken")

    task = spawn(crash(), name="the crasher")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [record.__dict__["task"] for record in caplog.records] == ["the crasher"]


async def test_stop_cancels_and_waits(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = spawn(forever(), name="forever")
    await asyncio.sleep(0)
    await stop(task)
    assert ended.is_set()
    assert not caplog.records


def test_a_log_line_is_json_with_the_request_id() -> None:
    token = request_id.set("req-1")
    try:
        record = logging.makeLogRecord({"msg": "hello %s", "args": ("you",), "tenant": "acme"})
        line = json.loads(JsonFormatter().format(record))
    finally:
        request_id.reset(token)
    assert line["message"] == "hello you"
    assert line["request_id"] == "req-1"
    assert line["tenant"] == "acme"


def test_a_manual_clock_never_steps_back() -> None:
    clock = ManualClock()
    assert clock.advance(2.5) == clock() == 2.5
    with pytest.raises(ValueError, match="step back"):
        clock.advance(-1)


def test_errors_have_the_shape_the_sdk_reads() -> None:
    body = json.loads(error_body("no", param="model", code="c"))
    assert body == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": "c"}
    }
    event = error_event("late")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert json.loads(model_not_found("a/b"))["error"]["code"] == "model_not_found"
