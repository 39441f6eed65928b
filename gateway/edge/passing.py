"""Which of a client's headers the replica gets: all it may want, none that is ours or the hop's.

Unknown headers pass, since engines and tracing have their own. These do not: what is about the
connection (RFC 9110 §7.6.1, and what `Connection` names), the tenant's key and cookies, what
describes the body (it is ours: unpacked, perhaps spliced), the encodings that the client can read
(we have to read the reply), its names for the request (`x-request-id` is ours, and an idempotency
key is one tenant's), and every `x-loraplex-*`, among them the fleet's token. Its trace context goes
on too, but apart from these lines, since there may be a span of ours between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_KEPT: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"expect", b"accept-encoding"),
        *(b"authorization", b"api-key", b"x-api-key", b"cookie"),
        *(b"x-request-id", b"x-client-request-id", b"idempotency-key"),
        *(b"traceparent", b"tracestate"),
    )
)
_REMEMBERED_MAX: Final = 1024
_PASSES: Final[dict[bytes, bool]] = {}  # names as clients write them: few, and asked of each time
_KEPT_PREFIXES: Final = (b"x-loraplex-", b"proxy-", b"content-", b"http2-")


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines as the client wrote them; the parser has let no line end or NUL through."""
    lines, hop = [], b""
    for name, value in headers:
        passes = _PASSES.get(name)
        if passes is None:
            passes = _passes(name)
        if passes:
            lines.append(b"%b: %b\r\n" % (name, value))
        elif name.lower() == b"connection":
            hop += b"," + value.lower()
    if hop.strip(b", ") in (b"", b"keep-alive", b"close"):
        return b"".join(lines)
    named = {word.strip() for word in hop.split(b",")}
    return b"".join([line for line in lines if line.partition(b":")[0].lower() not in named])


def _passes(name: bytes) -> bool:
    lower = name.lower()
    passes = lower not in _KEPT and not lower.startswith(_KEPT_PREFIXES)
    if len(_PASSES) < _REMEMBERED_MAX:
        _PASSES[name] = passes
    return passes
