"""`model` in a reply is put by its place: nothing else changes, whatever stands around it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import DONE, chunk, chunks, event, usage_event

from gateway.edge.rename import correction, model_at, renamed, renamed_events, renamed_whole

TEXT = st.text(max_size=8) | st.sampled_from(['"model":"x"', "model", "\\", '\\"', "{}[],:"])
KEYS = TEXT | st.just("model")
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)
RIGHT = (b"", b"")
STYLES = st.sampled_from([0, orjson.OPT_INDENT_2, orjson.OPT_APPEND_NEWLINE])


@given(
    before=st.dictionaries(TEXT.filter(lambda key: key != "model"), VALUES, max_size=4),
    after=st.dictionaries(TEXT.filter(lambda key: key != "model"), VALUES, max_size=4),
    old=TEXT,
    new=TEXT,
    style=STYLES,
)
def test_only_the_outermost_model_changes(before, after, old, new, style) -> None:
    value = {**before, "model": old, **after}
    text = orjson.dumps(value, option=style)
    assert orjson.loads(renamed(text, new)) == {**value, "model": new}
    assert renamed_whole(text, new) == renamed(text, new)
    at = model_at(text)
    assert at is not None
    assert orjson.loads(text[at[0] : at[1]]) == old
    assert renamed(text, old) == text
    assert renamed(renamed(text, new), old) == text


@given(value=st.dictionaries(TEXT.filter(lambda key: key != "model"), VALUES, max_size=5))
def test_where_no_name_is_told_nothing_changes(value) -> None:
    text = orjson.dumps(value)
    assert renamed(text, "x") == text
    assert correction(b"data: " + text + b"\n\n", "x") == RIGHT


@pytest.mark.parametrize("value", [None, 7, True, ["a"], {"model": "a"}])
def test_a_model_that_is_no_string_stays(value: object) -> None:
    text = orjson.dumps({"model": value, "x": "y"})
    assert renamed(text, "b") == text


def test_every_event_of_a_stream_is_renamed_and_comments_and_errors_are_not() -> None:
    comment, error = b": keep-alive\n\n", event({"error": {"message": "x", "model": "a"}})
    blob = b"".join([*chunks("a"), comment, usage_event("a"), error, DONE])
    expected = b"".join([*chunks("b/ü"), comment, usage_event("b/ü"), error, DONE])
    assert renamed_events(blob, "b/ü") == expected
    assert renamed_events(blob.replace(b"\n\n", b"\r\n\r\n"), "b/ü") == expected.replace(
        b"\n\n", b"\r\n\r\n"
    )


def test_numbers_and_escapes_stay_as_they_were_written() -> None:
    text = b'data: { "x" : 1.0e-07 ,"y":12345678901234567890123, "z":"\\u00e9", "model" : "a" }\n\n'
    assert renamed(text, "b") == text.replace(b'"a"', b'"b"')


def test_whether_a_stream_needs_it_is_seen_in_its_first_event() -> None:
    quoting = event(chunk("a", {"content": '"model":"b"'}))
    assert correction(quoting, "b") == (b'"model":"a"', b'"model":"b"')
    assert correction(quoting, "a") == RIGHT
    assert correction(b'data: {"model": "\\u00fc"}\n\n', "ü") == RIGHT
    assert correction(b": keep-alive\n\n" + DONE, "a") == RIGHT
