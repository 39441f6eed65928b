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

from pathlib import Path
from typing import Any

import gevent
import orjson
from locust import FastHttpUser, constant, events, task

from loadtests import outcome as outcomes
from loadtests import trace as traces
from loadtests.outcome import Outcome
from loadtests.report import figures
from loadtests.request import keys_of, request_body
from loadtests.trace import Arrival
from shared.clock import monotonic


def add_options(parser: Any) -> None:
    group = parser.add_argument_group("replay")
    group.add_argument("--trace", type=Path, help="JSON lines of arrivals (python -m loadtests)")
    group.add_argument("--keys", type=Path, help='JSON object {"tenant": "API key"}')
    group.add_argument("--base", default="base", help="model of arrivals that name no adapter")
    group.add_argument("--speed", type=float, default=1.0, help="2 replays twice as fast")
    group.add_argument(
        "--late-p99-ms", type=float, default=50.0, help="more lateness fails the run"
    )
    group.add_argument(
        "--by-adapter", action="store_true", help="one line of statistics a tenant and adapter"
    )
    group.add_argument("--outcomes", type=Path, help="write every request here, as JSON lines")
    group.add_argument("--summary", type=Path, help="write the figures here, as JSON")


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]


class Replay(FastHttpUser):
    fixed_count = 1  # one user replays the whole trace, whatever -u says
    concurrency = 10_000
    connection_timeout = 10.0
    network_timeout = 600.0
    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self._base: str = options.base
        self._by_adapter: bool = options.by_adapter
        try:
            if options.trace is None:
                raise traces.BadTrace("give the trace to replay: --trace FILE")
            if options.speed <= 0:
                raise traces.BadTrace("--speed is above 0")
            self._trace = traces.read(options.trace)
            self._keys = keys_of(options.keys, {str(row.tenant) for row in self._trace})
        except traces.BadTrace as error:
            self._stop(2, str(error))

    @task
    def replay(self) -> None:
        options = self.environment.parsed_options
        begin = monotonic() + 0.1
        done, sent = [], []
        for number, arrival in enumerate(self._trace):
            after = (arrival.at_s - self._trace[0].at_s) / options.speed
            gevent.sleep(max(begin + after - monotonic(), 0))
            row = Outcome(number, after, arrival.tenant, arrival.adapter or self._base)
            done.append(row)
            sent.append(gevent.spawn(self._send, row, arrival, begin + after))
        gevent.joinall(sent)
        told = figures(done)
        if options.summary is not None:
            options.summary.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        if options.outcomes is not None:
            outcomes.write(done, options.outcomes)
        late_ms, failed = told["late_ms"]["p99"], told["failed"]
        if late_ms > options.late_p99_ms:
            self._stop(1, f"fell behind: p99 lateness {late_ms:.1f} ms > {options.late_p99_ms} ms")
        else:
            self._stop(int(failed > 0), f"{len(done)} sent, {failed} failed, late {late_ms:.1f} ms")

    def _send(self, row: Outcome, arrival: Arrival, due: float) -> None:
        row.late_s = monotonic() - due
        headers = {
            "Authorization": f"Bearer {self._keys[arrival.tenant]}",
            "Accept-Encoding": "identity",  # a compressed stream would come in lumps
        }
        with self.client.post(
            "/v1/completions",
            json=request_body(row, arrival),
            headers=headers,
            stream=True,
            catch_response=True,
        ) as response:
            row.status = response.status_code
            if response.status_code == 200:
                row.take_headers(response.headers)
                row.failure = "the stream ended without [DONE]"
                try:
                    for event in iter(lambda: response.stream.readline(b"\n\n"), b""):
                        if row.take_event(event, monotonic() - due):
                            break
                except (OSError, ValueError) as error:
                    row.failure = f"the stream broke: {error!r}"
            else:
                code = response.status_code
                row.failure = f"HTTP {code}" if code else f"no answer: {response.error}"
            response.failure(row.failure) if row.failure else response.success()
        row.total_s = monotonic() - due
        if not row.failure:
            self._fire("end-to-end", row, row.total_s)
            self._fire("TTFT", row, row.first_s)
            self._fire("ITL", row, row.itl_s)

    def _fire(self, kind: str, row: Outcome, seconds: float | None) -> None:
        if seconds is None:
            return
        name = f"{row.tenant} {row.adapter}" if self._by_adapter else "/v1/completions"
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={"tenant": row.tenant, "adapter": row.adapter},
        )

    def _stop(self, code: int, why: str) -> None:
        print(f"replay: {why}", flush=True)
        self.environment.process_exit_code = code
        self.environment.runner.quit()
