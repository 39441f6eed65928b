"""Edge: what every HTTP call passes, whatever it asks for.

Every error leaves in OpenAI's shape, aiohttp's own included; every reply carries `x-request-id`; a
body is read once, within its bound; calls that change the replica prove that they run the fleet.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from replica.errors import BodyTooLarge, NotFound, NotPermitted, ReplicaError
from replica.protocol import parse_json
from shared.logs import request_id
from shared.openai_errors import INVALID_REQUEST, error_body
from shared.trace_context import TRACEPARENT, TRACESTATE, TraceHeaders
from shared.wire import FLEET_TOKEN, REQUEST_ID

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: names the request, and turns what was raised into a reply."""
    given = request.headers.get(REQUEST_ID, "")
    request_id.set(given if _ID.fullmatch(given) else uuid.uuid4().hex)
    try:
        response = await handler(request)
    except ReplicaError as error:
        response = error_response(error)
    except web.HTTPException as refusal:
        response = _own(request, refusal)
    except ConnectionError:  # the client went while it was being written to
        return web.Response(status=499)
    except Exception:
        _log.exception("handler failed", extra={"path": request.path})
        response = error_response(ReplicaError("This replica failed to answer; see its log."))
    if not response.prepared:
        response.headers[REQUEST_ID] = request_id.get()
    return response


def trace_of(request: web.Request) -> TraceHeaders:
    """Two parents are none; several states are one list."""
    parents = request.headers.getall(TRACEPARENT, ())
    states = request.headers.getall(TRACESTATE, ())
    return TraceHeaders(parents[0] if len(parents) == 1 else "", ",".join(states))


def error_response(error: ReplicaError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error.body(),
        headers=error.headers(),
        content_type="application/json",
    )


def json_response(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object of the body. Raises BodyTooLarge or BadRequest."""
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"The body has more than {limit} bytes.")
    return parse_json(await request.read())


def check_fleet(request: web.Request, token: str) -> None:
    """Raises NotPermitted unless the caller has the fleet token, or none is set."""
    if not token:
        return
    given = request.headers.get(FLEET_TOKEN)
    if given is None:  # controllers written for vLLM send what they have as its API key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        raise NotPermitted(f"This call needs the fleet token in the header `{FLEET_TOKEN}`.")


def _own(request: web.Request, refusal: web.HTTPException) -> web.Response:
    """aiohttp's refusals in OpenAI's shape."""
    if isinstance(refusal, web.HTTPNotFound):
        return error_response(NotFound(_no_route(request)))
    if isinstance(refusal, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        return error_response(BodyTooLarge(f"The body has more than {limit} bytes."))
    body = error_body(
        f"{request.method} {request.path}: {refusal.reason}.",
        type=INVALID_REQUEST if refusal.status < 500 else "server_error",
        code=refusal.reason.lower().replace(" ", "_"),
    )
    headers = {"Allow": refusal.headers["Allow"]} if "Allow" in refusal.headers else {}
    return web.Response(
        status=refusal.status, body=body, headers=headers, content_type="application/json"
    )


def _no_route(request: web.Request) -> str:
    path = request.path
    plain = path.replace("/v1/v1/", "/v1/").rstrip("/")
    hint = f" Did you mean {plain}?" if plain and plain != path else ""
    return f"There is no {request.method} {path}.{hint}"
