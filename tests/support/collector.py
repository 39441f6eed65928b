"""An OpenTelemetry collector's OTLP/HTTP door: real HTTP, real protobuf, and everything is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from local_fleet import eventually


@dataclass(frozen=True)
class Seen:
    """One span as it came over the wire; ids in hex, "" for no parent."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    began: int  # ns since the epoch
    ended: int
    error: bool
    about: dict[str, Any]
    service: str
    instance: str
    state: str


@dataclass
class Collector:
    port: int = 0
    spans: list[Seen] = field(default_factory=list)
    status: int = 200  # what it answers
    raw: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def trace(self, trace: str, *, services: int = 2, within_s: float = 10) -> list[Seen]:
        """Its spans, once so many services have sent theirs; the order is that of their begin."""

        def mine() -> list[Seen]:
            return [one for one in [*self.spans] if one.trace == trace]

        eventually(lambda: len({one.service for one in mine()}) >= services, within_s)
        return sorted(mine(), key=lambda one: (one.began, -one.ended))

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        self.raw.append(body)
        for group in message.resource_spans:
            about = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                for one in scope.spans:
                    self.spans.append(
                        Seen(
                            one.name,
                            one.trace_id.hex(),
                            one.span_id.hex(),
                            one.parent_span_id.hex(),
                            one.kind,
                            one.start_time_unix_nano,
                            one.end_time_unix_nano,
                            one.status.code == 2,
                            _plain(one.attributes),
                            about["service.name"],
                            about["service.instance.id"],
                            one.trace_state,
                        )
                    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Door(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            right = self.path == "/v1/traces" and collector.status == 200
            if right:
                collector.take(body)
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.daemon_threads = True
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
