"""Each refusal as a client reads it."""

from __future__ import annotations

import orjson
import pytest

from gateway import errors
from gateway.errors import GatewayError, QuotaExceeded

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, GatewayError)
]


def made(kind: type[GatewayError]) -> GatewayError:
    try:
        return kind()
    except TypeError:
        pass
    return errors.WrongMethod("GET", "/x", "POST") if kind is errors.WrongMethod else kind("why")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_the_shape_that_clients_read(kind: type[GatewayError]) -> None:
    error = made(kind)
    body = orjson.loads(error.body())
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["code"] is None or body["error"]["code"].isidentifier()
    assert 400 <= kind.status < 600
    assert error.event() == b"data: " + error.body() + b"\n\n" or kind is errors.ModelNotFound
    assert (kind.status >= 500) == (kind.type == errors.SERVER_ERROR)


def test_reasons_are_few_words_fit_for_a_label() -> None:
    assert all(kind.reason.isidentifier() for kind in ALL)


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.2, "1", "200"), (61.01, "62", "61010")],
)
def test_a_wait_is_never_told_too_short(wait_s: float, seconds: str, milliseconds: str) -> None:
    headers = QuotaExceeded("x", retry_after_s=wait_s).headers()
    assert headers["Retry-After"] == seconds
    assert headers["retry-after-ms"] == milliseconds


def test_what_no_retry_cures_says_so() -> None:
    assert QuotaExceeded("x", should_retry=False).headers() == {"x-should-retry": "false"}
