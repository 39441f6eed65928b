"""Seats and feed: what the device is told is what the rows say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.core.pages import RELEASED
from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, PENDING, Row

pytest.importorskip("triton")
GREEDY = Sampling(max_tokens=9, temperature=0)
SEATS, WIDTH, ZERO_PAGE = 6, 8, 99


def _row(
    seq: str,
    *,
    start: int = 0,
    tokens: Sequence[int] = (1,),
    pages: tuple[int, ...] = (0,),
    slot: int = BASE_SLOT,
    samples: bool = True,
) -> Row:
    return Row(seq, slot, start, tuple(tokens), pages, samples, GREEDY, 0)


TABLES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(
        lambda passed, pages: (*[RELEASED] * passed, *pages)[:WIDTH],
        st.integers(0, WIDTH - 1),
        st.lists(st.integers(0, 9), min_size=1, max_size=WIDTH),
    ),
    min_size=1,
    max_size=SEATS,
)


@given(st.lists(TABLES, min_size=1, max_size=8))
def test_a_seats_table_begins_with_the_pages_of_its_row(
    steps: list[dict[str, tuple[int, ...]]],
) -> None:
    from replica.engine.cuda.seats import Seats

    seats = Seats(seats=SEATS, pages=WIDTH, zero_page=ZERO_PAGE)
    tables = np.full(SEATS * WIDTH, -1)
    for step in steps:
        rows = [_row(seq, pages=pages) for seq, pages in step.items()]
        taken, places, pages = seats.take(rows)
        assert len(set(taken)) == len(rows), "a seat is given twice"
        tables[places] = pages
        for row, seat in zip(rows, taken, strict=True):
            begins = tables[seat * WIDTH : seat * WIDTH + len(row.pages)]
            named = (ZERO_PAGE if page == RELEASED else page for page in row.pages)
            assert begins.tolist() == [*named]


def test_only_new_pages_are_told() -> None:
    from replica.engine.cuda.seats import Seats

    seats = Seats(seats=SEATS, pages=WIDTH, zero_page=ZERO_PAGE)
    pages = (4, 5)
    seat = seats.take([_row("a", pages=pages)])[0][0]
    assert seats.take([_row("a", pages=pages)]) == ([seat], [], [])
    first = seat * WIDTH
    assert seats.take([_row("a", pages=(4, 5, 9))]) == ([seat], [first + 2], [9])
    moved = seats.take([_row("a", pages=(RELEASED, RELEASED, 9, 7))])
    assert moved == ([seat], [first, first + 1, first + 3], [ZERO_PAGE, ZERO_PAGE, 7])
    assert seats.take([_row("a", pages=(RELEASED, RELEASED, 9, 7))]) == ([seat], [], [])


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(LENGTHS, st.integers(0, 20))
def test_every_token_is_fed_once_at_its_position_and_padding_is_none(
    lengths: list[int], padding: int
) -> None:
    from replica.engine.cuda import feed

    rows = [
        _row(f"s{i}", start=3 * i, tokens=range(100, 100 + n), slot=i - 1)
        for i, n in enumerate(lengths)
    ]
    width = sum(lengths) + padding
    columns = feed.mixed(rows, range(len(rows)), {}, width)
    assert columns.shape == (feed.COLUMNS, width)
    expected = [
        (100 + i, 0, row.start + i, seat, row.slot)
        for seat, row in enumerate(rows)
        for i in range(len(row.tokens))
    ]
    assert [tuple(column) for column in columns.T[: len(expected)].tolist()] == expected
    assert (columns[2, len(expected) :] == -1).all()
    assert (columns[4, len(expected) :] == BASE_SLOT).all()


@given(LENGTHS, st.integers(1, 9))
def test_attention_sees_every_token_once_and_padding_alone(lengths: list[int], block: int) -> None:
    from replica.engine.cuda import feed

    rows = [_row(f"s{i}", tokens=range(n), samples=i % 2 == 0) for i, n in enumerate(lengths)]
    total = sum(lengths)
    single, firsts, counts, last = feed.work(rows, block, total + 2)
    covered = [
        *single,
        *(t for at, n in zip(firsts, counts, strict=True) for t in range(at, at + n)),
    ]
    assert sorted(covered) == list(range(total + 2))
    assert max(counts, default=0) <= block
    ends = np.cumsum(lengths) - 1
    assert last == [int(end) for row, end in zip(rows, ends, strict=True) if row.samples]


@given(LENGTHS, st.integers(1, 9))
def test_a_captured_step_reads_the_same_and_what_it_lacks_is_the_last_column(
    lengths: list[int], block: int
) -> None:
    from replica.engine.cuda import feed
    from replica.engine.cuda.mixed import Mixed

    rows = [_row(f"s{i}", tokens=range(n), samples=i % 2 == 0) for i, n in enumerate(lengths)]
    total = sum(lengths)
    mixed = Mixed(
        sizes=(16, 256), max_running=7, max_step_tokens=250, block=block, device=torch.device("cpu")
    )
    size = mixed.sizes[total > 15]
    packed = mixed.pack(size, rows, range(len(rows)), {})
    assert packed is not None
    mixed.buffer(size).copy_(torch.from_numpy(packed))
    columns, single, firsts, counts, last = mixed.inputs(size)
    assert columns.tolist() == feed.mixed(rows, range(len(rows)), {}, size).tolist()
    assert columns[2, size - 1] == -1, "it has no position"
    for ours, told in zip(
        (single, firsts, counts, last), feed.work(rows, block, total), strict=True
    ):
        assert ours[: len(told)].tolist() == told
        padding = 0 if ours is counts else size - 1
        assert (ours[len(told) :] == padding).all()
        assert len(ours) % 4 == 0, "wide loads may begin behind it"


def test_steps_that_no_graph_holds_are_told() -> None:
    from replica.engine.cuda.mixed import Mixed

    mixed = Mixed(
        sizes=(256,), max_running=40, max_step_tokens=512, block=8, device=torch.device("cpu")
    )
    many = [_row(f"s{i}", tokens=(1, 2)) for i in range(33)]
    assert mixed.pack(256, many, range(33), {}) is None
    scored = _row("s", tokens=(1, 2))._replace(targets=(2,))
    assert mixed.pack(256, [scored], [0], {}) is None
    assert mixed.pack(256, many[:32], range(32), {}) is not None


def test_a_pending_token_names_where_it_was_drawn() -> None:
    from replica.engine.cuda import feed

    rows = [_row("a", start=7, tokens=(PENDING,)), _row("b", start=2, tokens=(5,), slot=1)]
    columns = feed.decoding(rows, [3, 0], {"a": 9, "b": 1}, 4)
    assert columns[:, 0].tolist() == [PENDING, 9, 7, 3, BASE_SLOT]
    assert columns[[0, 2, 3, 4], 1].tolist() == [5, 2, 0, 1]
    assert columns[2, 2:].tolist() == [-1, -1]
