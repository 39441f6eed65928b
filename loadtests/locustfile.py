"""Replay a trace against a gateway, open loop: every request leaves when the trace says.

    locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8080 \\
        --trace trace.jsonl --keys keys.json --summary result.json

Latency counts from the moment a request was due, not from when this process got round to it, and
how late it got round is measured: a run whose lateness at the 99th percentile passes
`--late-p99-ms` was not the trace that it claims to be, and fails. Exit code 0: every request was
answered in full, in time; 1: not.

Three habits of Locust would falsify this, hence: `concurrency` raised, for its 10 would close the
loop; `stream.readline(b"\\n\\n")`, for iter_content waits for 1 KB and hides the first token;
events of our own (TTFT, end-to-end, and ITL, a request's mean gap between events that carry text),
for the built-in time of a stream is that of its headers.

Locust patches the standard library when imported: never import this module in another process.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gevent
import orjson
from locust import FastHttpUser, constant, events, task

from loadtests import trace as traces
from loadtests.stats import jain, summarise
from loadtests.trace import Arrival
from shared.clock import monotonic
from shared.ids import TenantId


def add_options(parser: Any) -> None:
    group = parser.add_argument_group("replay")
    group.add_argument("--trace", type=Path, help="JSON lines of arrivals (python -m loadtests)")
    group.add_argument("--keys", type=Path, help='JSON object {"tenant": "API key"}')
    group.add_argument("--base", default="base", help="model of arrivals that name no adapter")
    group.add_argument("--speed", type=float, default=1.0, help="2 replays twice as fast")
    group.add_argument(
        "--late-p99-ms", type=float, default=50.0, help="more lateness fails the run"
    )
    group.add_argument("--summary", type=Path, help="write the figures here, as JSON")


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Reply:
    """How one arrival went; times in seconds from when it was due."""

    arrival: Arrival
    late_s: float = 0.0
    first_s: float | None = None
    total_s: float = 0.0
    events: int = 0
    failure: str = ""


class Replay(FastHttpUser):
    fixed_count = 1  # one user replays the whole trace, whatever -u says
    concurrency = 10_000
    connection_timeout = 10.0
    network_timeout = 600.0
    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self._base: str = options.base
        try:
            if options.trace is None:
                raise traces.BadTrace("give the trace to replay: --trace FILE")
            if options.speed <= 0:
                raise traces.BadTrace("--speed is above 0")
            self._trace = traces.read(options.trace)
            self._keys = _keys(options.keys, {arrival.tenant for arrival in self._trace})
        except traces.BadTrace as error:
            self._stop(2, str(error))

    @task
    def replay(self) -> None:
        options = self.environment.parsed_options
        replies = [Reply(arrival) for arrival in self._trace]
        begin = monotonic() + 0.1
        sent = []
        for number, reply in enumerate(replies):
            due = begin + (reply.arrival.at_s - self._trace[0].at_s) / options.speed
            gevent.sleep(max(due - monotonic(), 0))
            sent.append(gevent.spawn(self._send, number, reply, due))
        gevent.joinall(sent)
        figures = _figures(replies, monotonic() - begin)
        if options.summary is not None:
            options.summary.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
        late_ms, failed = figures["late_ms"]["p99"], figures["failed"]
        if late_ms > options.late_p99_ms:
            self._stop(1, f"fell behind: p99 lateness {late_ms:.1f} ms > {options.late_p99_ms} ms")
        else:
            self._stop(
                int(failed > 0), f"{len(replies)} sent, {failed} failed, late {late_ms:.1f} ms"
            )

    def _send(self, number: int, reply: Reply, due: float) -> None:
        reply.late_s = monotonic() - due
        arrival = reply.arrival
        body = {
            "model": arrival.adapter or self._base,
            # Begins with its number, so that no two prompts share a prefix.
            "prompt": f"{number} " + "a " * (arrival.prompt_tokens - 1),
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {
            "Authorization": f"Bearer {self._keys[arrival.tenant]}",
            "Accept-Encoding": "identity",  # a compressed stream would come in lumps
        }
        last = due
        with self.client.post(
            "/v1/completions", json=body, headers=headers, stream=True, catch_response=True
        ) as response:
            if response.status_code == 200:
                reply.failure = "the stream ended without [DONE]"
                try:
                    for event in iter(lambda: response.stream.readline(b"\n\n"), b""):
                        last = monotonic()
                        if _take(reply, event, last - due):
                            break
                except (OSError, ValueError) as error:
                    reply.failure = f"the stream broke: {error!r}"
            else:
                code = response.status_code
                reply.failure = f"HTTP {code}" if code else f"no answer: {response.error}"
            response.failure(reply.failure) if reply.failure else response.success()
        reply.total_s = monotonic() - due
        if reply.failure:
            return
        self._fire("end-to-end", reply.total_s)
        if reply.first_s is not None:
            self._fire("TTFT", reply.first_s)
            if reply.events > 1:
                self._fire("ITL", (last - due - reply.first_s) / (reply.events - 1))

    def _fire(self, kind: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name="/v1/completions",
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )

    def _stop(self, code: int, why: str) -> None:
        print(f"replay: {why}", flush=True)
        self.environment.process_exit_code = code
        self.environment.runner.quit()


def _take(reply: Reply, event: bytes, at_s: float) -> bool:
    """Count one SSE event; True when it ends the stream."""
    data = event.strip().removeprefix(b"data:").strip()
    if not event.startswith(b"data:"):
        return False  # a comment that keeps the connection open
    if data == b"[DONE]":
        reply.failure = ""
        return True
    chunk = orjson.loads(data)
    if "error" in chunk:
        reply.failure = f"error in the stream: {chunk['error'].get('message')}"
        return True
    if any(choice.get("text") for choice in chunk.get("choices", ())):
        reply.events += 1
        reply.first_s = at_s if reply.first_s is None else reply.first_s
    return False


def _keys(path: Path | None, tenants: set[TenantId]) -> dict[TenantId, str]:
    """Tenant to API key; without a file LORAPLEX_KEY is everybody's."""
    shared = os.environ.get("LORAPLEX_KEY", "")
    try:
        given = {} if path is None else orjson.loads(path.read_bytes())
        keys = {tenant: str(given.get(tenant, shared)) for tenant in tenants}
    except (OSError, ValueError, AttributeError) as error:
        raise traces.BadTrace(f"--keys {path}: {error}") from error
    if missing := sorted(tenant for tenant, key in keys.items() if not key):
        raise traces.BadTrace(f"no key for {missing[0]}: name it in --keys, or set LORAPLEX_KEY")
    return keys


def _figures(replies: list[Reply], wall_s: float) -> dict[str, Any]:
    asked: dict[str, int] = defaultdict(int)
    served: dict[str, int] = defaultdict(int)
    for reply in replies:
        asked[reply.arrival.tenant] += 1
        served[reply.arrival.tenant] += not reply.failure
    good = [reply for reply in replies if not reply.failure]
    return {
        "sent": len(replies),
        "failed": len(replies) - len(good),
        "wall_s": wall_s,
        "late_ms": asdict(summarise(reply.late_s * 1e3 for reply in replies)),
        "ttft_ms": asdict(summarise(r.first_s * 1e3 for r in good if r.first_s is not None)),
        "end_to_end_ms": asdict(summarise(reply.total_s * 1e3 for reply in good)),
        "events": sum(reply.events for reply in replies),
        "jain_of_served_share": jain([served[tenant] / asked[tenant] for tenant in sorted(asked)]),
    }
