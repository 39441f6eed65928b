"""Any split of the bytes gives the same frames, and nothing is lost or invented."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.framing import Events, FrameTooLong, Lines, each_event, event_at, event_data

line = st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b""))
event = st.sampled_from(
    [b"data: a\n\n", b": keep-alive\n\n", b"data: x\ndata: y\n\n", b"data: \xc3\xa9\r\n\r\n"]
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(at)]


@given(st.lists(line), st.lists(st.integers(0, 10_000)))
def test_lines_do_not_depend_on_how_the_bytes_were_split(
    lines: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(item + b"\n" for item in lines)
    framer = Lines()
    got = [frame for piece in pieces(data, cuts) for frame in framer.feed(piece)]
    assert got == [item for item in lines if item.strip()]


@given(st.lists(event), st.binary(max_size=8), st.lists(st.integers(0, 10_000)))
def test_events_come_whole_and_together_they_are_the_input(
    events: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    tail = tail.replace(b"\n", b"").replace(b"\r", b"")
    data = b"".join(events) + tail
    framer = Events()
    blobs = [framer.feed(piece) for piece in pieces(data, cuts)]
    assert b"".join(blobs) + framer.rest == data
    assert framer.rest == tail
    for blob in blobs:
        assert not blob or blob.endswith((b"\n\n", b"\r\n\r\n"))
    assert [one for blob in blobs for one in each_event(blob)] == events


@given(st.lists(event, min_size=1))
def test_an_event_is_found_by_any_of_its_bytes(events: list[bytes]) -> None:
    blob, first = b"".join(events), 0
    for one in events:
        last = first + len(one)
        for at in range(first, last):
            assert event_at(blob, at) == (first, last)
        first = last


def test_the_payload_of_an_event_is_its_data_lines() -> None:
    assert event_data(b"data: x\ndata:y\n\n") == b"x\ny"
    assert event_data(b": comment\n\n") is None


def test_a_frame_that_never_ends_is_refused() -> None:
    with pytest.raises(FrameTooLong):
        Lines(limit_bytes=10).feed(b"x" * 11)
    with pytest.raises(FrameTooLong):
        Events(limit_bytes=10).feed(b"data: " + b"x" * 11)
