"""One call of the admin API: its key, what comes in, what goes out, every refusal in one shape."""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.edge.throttle import Throttle
from gateway.errors import ModelNotFound
from gateway.state.audit import actor
from gateway.state.ledger import BadQuestion
from gateway.state.tenants import BadField, Conflict, Missing
from gateway.store.redis import StoreAway
from shared.openai_errors import INVALID_REQUEST, error_body
from shared.wire import FLEET_TOKEN, REQUEST_ID

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Route = tuple[str, str, Handler]
"""Method, path below /admin/v1/, and who answers."""

ACTOR: Final = "x-loraplex-actor"
"""Who asks, for the events: the admin key is shared by all who have it."""

_ACTOR_MAX: Final = 100
_VERSION_DIGITS: Final = 15

_STATUS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (BadField, 400, "invalid_value"),
    (BadQuestion, 400, "invalid_value"),
    (Missing, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (StoreAway, 503, "store_away"),
)


class Credential(NamedTuple):
    """What proves that a caller may call."""

    who: str  # who has it
    given: Callable[[web.Request], str]  # as this request shows it
    wanted: str  # told to those who do not


def _bearer(request: web.Request) -> str:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


OF_ADMINS: Final = Credential(
    "admin", _bearer, "The admin API needs its own key as `Authorization: Bearer KEY`."
)
OF_THE_FLEET: Final = Credential(
    "fleet",
    lambda request: request.headers.get(FLEET_TOKEN, ""),
    f"This call needs the fleet token in the header `{FLEET_TOKEN}`.",
)


def guarded(
    handler: Handler, key: str, throttle: Throttle, credential: Credential = OF_ADMINS
) -> Handler:
    """The key first, from an address that has not failed too often; then every refusal in one
    shape. `key` is not empty."""
    secret = key.encode()

    async def call(request: web.Request) -> web.StreamResponse:
        peer = request.remote or ""
        if (wait_s := throttle.shut(peer, credential.who)) > 0:
            message = "Too many wrong keys came from your address; try again after the wait."
            return refusal(429, message, code="too_many_failed_keys", retry_s=wait_s)
        given = credential.given(request).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, secret):
            throttle.failed(peer)
            return refusal(401, credential.wanted, code="invalid_api_key")
        throttle.passed(peer, credential.who)
        actor.set(f"{credential.who} {request.headers.get(ACTOR, '')[:_ACTOR_MAX]} from {peer}")
        try:
            return await handler(request)
        except tuple(kind for kind, _, _ in _STATUS) as error:
            return _refused(request, error)
        except ModelNotFound as error:
            return refusal(404, error.message, code="model_not_found", param="model")
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, "The body is larger than this server takes.", code="too_large")

    return call


def _refused(request: web.Request, error: Exception) -> web.Response:
    status, code = next((s, c) for kind, s, c in _STATUS if isinstance(error, kind))
    if isinstance(error, Conflict) and "If-Match" in request.headers:
        status, code = 412, "precondition_failed"
    return refusal(status, str(error), code=code, param=getattr(error, "param", None))


def refusal(
    status: int, message: str, *, code: str, param: str | None = None, retry_s: float = 1.0
) -> web.Response:
    kind = INVALID_REQUEST if status < 500 else "server_error"
    headers = {REQUEST_ID: f"req_{uuid4().hex}"}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    headers |= {"Retry-After": str(math.ceil(retry_s))} if status in (429, 503) else {}
    body = error_body(message, type=kind, param=param, code=code)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def switched_off(request: web.Request) -> web.StreamResponse:
    return refusal(404, "The admin API is off; set `admin.key` to have it.", code="admin_off")


async def nowhere(request: web.Request) -> web.StreamResponse:
    return refusal(404, f"There is no {request.method} {request.path}.", code="unknown_url")


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
    if not (number.isascii() and number.isdigit() and len(number) <= _VERSION_DIGITS):
        raise BadField("If-Match", "must be an ETag as this API gave it")
    return int(number)


def asked(request: web.Request, name: str) -> str:
    value = request.query.get(name, "")
    if not value:
        raise BadField(name, f"is missing: give ?{name}=")
    return value


def number(request: web.Request, name: str, *, default: int, most: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    whole = text.isascii() and text.isdigit() and len(text) <= _VERSION_DIGITS
    if not (whole and 1 <= int(text) <= most):
        raise BadField(name, f"must be a whole number from 1 to {most}")
    return int(text)


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


def nothing() -> web.Response:
    """204: it is done, and there is nothing to show of it."""
    return web.Response(status=204, headers={REQUEST_ID: f"req_{uuid4().hex}"})


def listed(rows: list[dict[str, Any]]) -> web.Response:
    return answer({"object": "list", "data": rows})


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
