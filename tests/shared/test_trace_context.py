"""`traceparent` by W3C's rules: what is right is kept to the bit, what is wrong is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.trace_context import TraceContext, TraceHeaders, read

RIGHT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(
    st.builds(
        TraceContext,
        st.integers(1, 2**128 - 1),
        st.integers(1, 2**64 - 1),
        st.integers(0, 3),
        st.sampled_from(["", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"]),
    )
)
def test_what_is_written_is_read_again(context: TraceContext) -> None:
    assert read(context.headers) == context
    assert context.headers.lines.startswith(b"traceparent: 00-")


def test_the_sampled_flag_and_the_ids_are_what_they_say() -> None:
    context = read(TraceHeaders(RIGHT, "a=b"))
    assert context is not None
    assert context.trace == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert context.span_id == 0x00F067AA0BA902B7
    assert context.sampled
    assert context.state == "a=b"
    assert not context.by(1, sampled=False).sampled
    assert context.by(1, sampled=False).trace_id == context.trace_id


def test_a_later_version_may_say_more_and_this_one_may_not() -> None:
    assert read(TraceHeaders("cc" + RIGHT[2:] + "-what-the-future-will-be")) is not None
    assert read(TraceHeaders(RIGHT + "-more")) is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-1-2-03",
        "ff" + RIGHT[2:],
        "00-" + "0" * 32 + RIGHT[35:],
        RIGHT[:36] + "0" * 16 + "-01",
        RIGHT.upper(),
        RIGHT[:-1],
        RIGHT + "0",
        RIGHT.replace("-", "_"),
        "cc" + RIGHT[2:] + "more",
    ],
)
def test_a_header_that_breaks_the_rules_is_none(header: str) -> None:
    assert read(TraceHeaders(header, "a=b")) is None


def test_headers_go_on_as_they_came_where_nobody_reads_them() -> None:
    assert TraceHeaders("nonsense", "a=b").lines == b"traceparent: nonsense\r\ntracestate: a=b\r\n"
    assert TraceHeaders().lines == b""
