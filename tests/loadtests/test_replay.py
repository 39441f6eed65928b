"""Both replays against a small streaming server on a real socket.

Locust patches the standard library on import, so it only ever runs as a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadtests import outcome as outcomes
from loadtests import trace as traces
from loadtests.replay import Target
from loadtests.replay import replay as replay_here
from loadtests.report import figures, report
from loadtests.trace import Arrival
from shared.clock import monotonic
from shared.ids import AdapterId, TenantId

ROOT = Path(__file__).parents[2]
GAP_S = 0.1


@dataclass
class Server:
    """Streams four tokens, GAP_S apart, as a gateway would."""

    url: str = ""
    seen: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)  # how the next answers go wrong

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((monotonic(), request.headers["Authorization"], body))
        fault = self.breaks.pop() if self.breaks else ""
        if fault == "refused":
            return web.json_response({"error": {"message": "no"}}, status=429)
        told = {
            "x-loraplex-replica": "r0",
            "x-loraplex-placement": "home",
            "x-loraplex-queue-ms": "2",
        }
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | told)
        await reply.prepare(request)
        await reply.write(b": waiting\n\n")
        for _ in range(4):
            await asyncio.sleep(GAP_S)
            await reply.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        if fault == "lost":
            await reply.write(b'data: {"error":{"message":"replica lost"}}\n\n')
        elif fault != "cut":
            await reply.write(b"data: [DONE]\n\n")
        return reply


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@dataclass
class Result:
    code: int
    output: str
    figures: dict[str, Any]


ROWS = tuple(
    Arrival(number * 0.05, TenantId(tenant), adapter, 10, 4)
    for number, (tenant, adapter) in enumerate([("a", AdapterId("x")), ("b", None)] * 10)
)


async def replay(folder: Path, url: str, *options: str, rows: tuple[Arrival, ...] = ROWS) -> Result:
    traces.write(rows, folder / "trace.jsonl")
    (folder / "keys.json").write_text(json.dumps({"a": "key-a", "b": "key-b"}))
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    command += ["--host", url, "--trace", str(folder / "trace.jsonl"), "--only-summary"]
    command += ["--keys", str(folder / "keys.json"), "--summary", str(folder / "summary.json")]
    process = await asyncio.create_subprocess_exec(
        *command,
        *options,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await asyncio.wait_for(process.communicate(), 60))[0].decode()
    summary = folder / "summary.json"
    figures = json.loads(summary.read_bytes()) if summary.exists() else {}
    return Result(await process.wait(), output, figures)


async def test_a_replay_is_open_loop_and_times_the_first_token_from_when_it_was_due(
    server: Server, tmp_path: Path
) -> None:
    result = await replay(tmp_path, server.url, "--late-p99-ms", "5000", "--base", "smol")
    assert result.code == 0, result.output
    assert result.figures["sent"] == 20
    assert result.figures["failed"] == 0
    assert result.figures["events"] == 80
    assert result.figures["jain_of_served_share"] == 1
    # One after the other they would take 20 x 0.4 s.
    assert server.seen[-1][0] - server.seen[0][0] < 5
    slack_ms = result.figures["late_ms"]["max"] + 150
    assert GAP_S * 1e3 <= result.figures["ttft_ms"]["p50"] < GAP_S * 1e3 + slack_ms
    assert result.figures["end_to_end_ms"]["p50"] >= 4 * GAP_S * 1e3
    for kind in ("TTFT", "ITL", "end-to-end"):
        assert kind in result.output
    # Each with its tenant's key and its model, and no two with the same prompt.
    sent = {(key, body["model"], body["max_tokens"]) for _, key, body in server.seen}
    assert sent == {("Bearer key-a", "x", 4), ("Bearer key-b", "smol", 4)}
    assert len({body["prompt"] for _, _, body in server.seen}) == 20


async def test_a_replay_that_fell_behind_fails_though_every_answer_came(
    server: Server, tmp_path: Path
) -> None:
    result = await replay(tmp_path, server.url, "--late-p99-ms", "0")
    assert result.code == 1
    assert result.figures["failed"] == 0
    assert "fell behind" in result.output


async def test_answers_that_broke_fail_the_replay_and_are_told_apart(
    server: Server, tmp_path: Path
) -> None:
    server.breaks = ["lost", "refused", "cut"]
    result = await replay(tmp_path, server.url, "--late-p99-ms", "5000", rows=ROWS[:4])
    assert result.code == 1
    assert result.figures["failed"] == 3
    for told in ("replica lost", "HTTP 429", "ended without [DONE]"):
        assert told in result.output


async def test_a_tenant_without_a_key_stops_the_replay_before_anything_is_sent(
    server: Server, tmp_path: Path
) -> None:
    rows = (Arrival(0.0, TenantId("stranger"), None, 1, 1),)
    result = await replay(tmp_path, server.url, rows=rows)
    assert result.code == 2, result.output
    assert "no key for stranger" in result.output
    assert server.seen == []


async def test_both_generators_send_the_same_work_and_see_the_same_times(
    server: Server, tmp_path: Path
) -> None:
    result = await replay(
        tmp_path, server.url, "--late-p99-ms", "5000", "--outcomes", str(tmp_path / "locust.jsonl")
    )
    assert result.code == 0, result.output
    by_locust = outcomes.read(tmp_path / "locust.jsonl")
    sent, server.seen = server.seen, []
    target = Target(url=server.url, keys={"a": "key-a", "b": "key-b"})
    by_asyncio = await replay_here(ROWS, target)
    assert [key_body for _, *key_body in server.seen] == [key_body for _, *key_body in sent]
    for done in (by_locust, by_asyncio):
        assert [row.failure for row in done] == [""] * len(ROWS)
        assert {(row.replica, row.placement, row.queue_ms) for row in done} == {("r0", "home", 2.0)}
        for row in done:
            assert row.first_s is not None
            assert row.itl_s is not None
            assert row.first_s >= GAP_S * 0.9
            assert row.itl_s == pytest.approx(GAP_S, abs=0.08)


async def test_every_way_to_fail_is_an_outcome_of_its_own(server: Server, tmp_path: Path) -> None:
    server.breaks = ["cut", "lost", "refused"]
    target = Target(url=server.url, keys={"a": "key-a", "b": "key-b"})
    done = await replay_here(ROWS[:4], target)
    assert {row.failure for row in done} == {
        "",
        "HTTP 429",
        "error in the stream: replica lost",
        "the stream ended without [DONE]",
    }
    told = figures(done)
    assert (told["sent"], told["failed"]) == (4, 3)
    gone = await replay_here(ROWS[:1], replace(target, url="http://127.0.0.1:1"))
    assert gone[0].failure.startswith("no answer")
    outcomes.write(done, tmp_path / "run.jsonl")
    assert outcomes.read(tmp_path / "run.jsonl") == done
    assert len(outcomes.as_csv(done).splitlines()) == 5


async def test_the_report_says_when_the_generator_fell_behind(server: Server) -> None:
    target = Target(url=server.url, keys={"a": "key-a", "b": "key-b"})
    done = await replay_here(ROWS, target)
    for row in done:
        row.late_s = 0.0
    assert "fell behind" not in report(done, title="run")
    done[0].late_s = 1.0
    text = report(done, title="run")
    assert "fell behind" in text
    assert text.count("<svg") == 8
    assert "r0" in text


def test_a_report_of_nothing_is_still_a_page() -> None:
    assert report((), title="empty").endswith("</html>\n")
