"""One call of the admin API: its key, what comes in, what goes out, every refusal in one shape."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.errors import ModelNotFound
from gateway.ledger import BadQuestion
from gateway.store.redis import StoreAway
from gateway.tenants import BadField, Conflict, Missing
from shared.openai_errors import INVALID_REQUEST, error_body
from shared.wire import REQUEST_ID

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (BadField, 400, "invalid_value"),
    (BadQuestion, 400, "invalid_value"),
    (Missing, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (StoreAway, 503, "store_away"),
)


def guarded(handler: Handler, key: str) -> Handler:
    """The admin key first; then every refusal in one shape."""
    secret = key.encode()

    async def call(request: web.Request) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), secret)
        if scheme.lower() != "bearer" or not known:
            message = "The admin API needs its own key as `Authorization: Bearer KEY`."
            return _error(401, message, code="invalid_api_key")
        try:
            return await handler(request)
        except tuple(kind for kind, _, _ in _STATUS) as error:
            return _refused(request, error)
        except ModelNotFound as error:
            return _error(404, error.message, code="model_not_found", param="model")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "The body is larger than this server takes.", code="too_large")

    return call


def _refused(request: web.Request, error: Exception) -> web.Response:
    status, code = next((s, c) for kind, s, c in _STATUS if isinstance(error, kind))
    if isinstance(error, Conflict) and "If-Match" in request.headers:
        status, code = 412, "precondition_failed"
    return _error(status, str(error), code=code, param=getattr(error, "param", None))


def _error(status: int, message: str, *, code: str, param: str | None = None) -> web.Response:
    kind = INVALID_REQUEST if status < 500 else "server_error"
    headers = {REQUEST_ID: f"req_{uuid4().hex}"}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    headers |= {"Retry-After": "1"} if status == 503 else {}
    body = error_body(message, type=kind, param=param, code=code)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def switched_off(request: web.Request) -> web.StreamResponse:
    return _error(404, "The admin API is off; set `admin.key` to have it.", code="admin_off")


async def nowhere(request: web.Request) -> web.StreamResponse:
    return _error(404, f"There is no {request.method} {request.path}.", code="unknown_url")


# what comes in


async def parsed(request: web.Request, allowed: tuple[str, ...]) -> dict[str, Any]:
    """The body as an object with no other fields; an empty body is an empty object."""
    raw = await request.read()
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadField("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadField("body", "must be a JSON object")
    for name in body:
        if name not in allowed:
            there_are = ", ".join(allowed) or "none"
            raise BadField(name, f"unknown field; there are: {there_are}")
    return body


def if_match(request: web.Request) -> int | None:
    text = request.headers.get("If-Match", "*").strip()
    if text == "*":
        return None
    number = text.removeprefix("W/").strip('"')
    if not (number.isascii() and number.isdigit()):
        raise BadField("If-Match", "must be the ETag of a tenant")
    return int(number)


def asked(request: web.Request, name: str) -> str:
    value = request.query.get(name, "")
    if not value:
        raise BadField(name, f"is missing: give ?{name}=")
    return value


def moment(request: web.Request, name: str, *, default: float) -> float:
    """ISO 8601 (UTC when it names no zone), or seconds since 1970."""
    text = request.query.get(name, "").strip()
    if not text:
        return default
    try:
        if text.replace(".", "", 1).isdecimal():
            return datetime.fromtimestamp(float(text), UTC).timestamp()
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        hint = "a time such as 2026-11-29T15:00Z, or seconds since 1970"
        raise BadField(name, f"{text!r} is not {hint}") from None


# what goes out


def answer(value: Any, *, status: int = 200, etag: int | None = None) -> web.Response:
    headers = {REQUEST_ID: f"req_{uuid4().hex}"}
    headers |= {} if etag is None else {"ETag": f'"{etag}"'}
    return web.Response(
        status=status, body=orjson.dumps(value), content_type="application/json", headers=headers
    )


def listed(rows: list[dict[str, Any]]) -> web.Response:
    return answer({"object": "list", "data": rows})


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
