"""One short exchange with a server, its whole reply at once."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.edge.exchange import Flow, Headers, ReplyTooLong, Sink
from gateway.edge.upstream import Upstream
from gateway.engines.engine import Answer

_BYTES_MAX: Final = 8 << 20


async def asked(
    upstream: Upstream,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    lines: str = "",
    limit_s: float,
) -> Answer:
    """GET, or POST of a JSON body. Raises UpstreamError."""
    content = b"" if body is None else orjson.dumps(body)
    head = f"{'GET' if body is None else 'POST'} {upstream.prefix}{path} HTTP/1.1\r\n"
    head += f"host: {upstream.host}\r\n{lines}"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
    answer = _Whole()
    await upstream.exchange(
        head.encode() + b"\r\n" + content, answer, first_byte_s=limit_s, idle_s=limit_s
    )
    return Answer(answer.status, bytes(answer.content))


class _Whole(Sink):
    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        self.status = status

    def body(self, data: bytes) -> bool:
        self.content += data
        if len(self.content) > _BYTES_MAX:
            raise ReplyTooLong(f"a reply of more than {_BYTES_MAX} bytes")
        return False
