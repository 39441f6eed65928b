"""`loraplex usage`: times that cannot be meant are refused before any request."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gateway.cli.failure import USAGE, Failure
from gateway.cli.root import app


def refused(*words: str) -> Failure:
    here = {"LORAPLEX_ADMIN_KEY": "k", "LORAPLEX_GATEWAY": "http://127.0.0.1:1"}
    failure = CliRunner().invoke(app, ["usage", *words], env=here).exception
    assert isinstance(failure, Failure)
    return failure


@pytest.mark.parametrize(
    "words",
    [
        ("--from", "2026-01-02", "--to", "2026-01-01"),
        ("--from", "2026-01-01T12:00+00:00", "--to", "2026-01-01T12:00+01:00"),
        ("--from", "1767312000", "--to", "2026-01-01T00:00Z"),
        ("--from", "9000-01-01"),
    ],
)
def test_a_start_after_the_end_is_a_usage_error(words: tuple[str, ...]) -> None:
    failure = refused(*words)
    assert failure.code == USAGE
    assert "--from" in str(failure)
    assert "later than" in str(failure)


@pytest.mark.parametrize("flag", ["--from", "--to"])
def test_a_time_that_is_none_is_named_by_its_option(flag: str) -> None:
    failure = refused(flag, "yesterday")
    assert failure.code == USAGE
    assert str(failure).startswith(f"{flag} 'yesterday'")


def test_times_in_order_are_asked_for() -> None:
    failure = refused("--from", "2026-01-01", "--to", "2026-01-02")
    assert "no gateway answers" in str(failure)
