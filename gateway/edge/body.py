"""The body of a request, within its limits: how large, how slow, how packed.

A body that came with its head is read without a timer. `Content-Encoding` gzip and deflate are
unpacked by the parser piece by piece, and the size is counted after it, so that a small bomb is
refused as soon as it has grown over the limit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from gateway.config import ListenConfig
from gateway.errors import BadRequest, BodyTooLarge, BodyTooSlow, UnknownEncoding

_ENCODINGS: Final = frozenset(("gzip", "deflate", "identity"))


async def read_body(request: web.Request, limits: ListenConfig) -> bytes:
    """Raises BodyTooLarge, BodyTooSlow, UnknownEncoding or BadRequest.

    The application's `client_max_size` is the limit for what has no length, or is compressed.
    """
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.lower() not in _ENCODINGS:
        raise UnknownEncoding(f"Content-Encoding {encoding!r} is not known; use gzip or none.")
    if (request.content_length or 0) > limits.body_max_bytes:
        raise _too_large(limits)
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(limits.body_timeout_s):
            return await request.read()
    except TimeoutError:
        raise BodyTooSlow(
            f"The body was not complete {limits.body_timeout_s:g} s after the head."
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limits) from None
    except web.RequestPayloadError as error:
        why = str(error).splitlines()[-1].strip() or "it is not complete"
        raise BadRequest(f"The body could not be read: {why}") from None


def _too_large(limits: ListenConfig) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than this server's limit of {limits.body_max_bytes} bytes."
    )
