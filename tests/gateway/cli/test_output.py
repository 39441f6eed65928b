"""Tables for people, CSV for programs."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.output import csv_text, show, table, text


def test_numbers_stand_to_the_right_and_words_to_the_left() -> None:
    rows = [{"name": "a", "size": 5}, {"name": "long", "size": 12_345}]
    assert table(rows, ["name", "size"]) == "name    size\na          5\nlong  12,345"


def test_what_is_missing_is_a_dash() -> None:
    assert [text(value) for value in (None, "", [], ())] == ["-"] * 4
    assert text(["a", "b"]) == "a, b"
    assert text(True) == "yes"


def test_no_rows_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    show([], ["name"], empty="nothing yet")
    assert capsys.readouterr().out == "nothing yet\n"


@given(
    st.lists(
        st.fixed_dictionaries({"name": st.text(), "count": st.integers()}), min_size=1, max_size=5
    )
)
def test_csv_read_back_is_what_was_written(rows: list[dict[str, object]]) -> None:
    # csv turns a lone \r into a line end of its own making; names in our data hold no control marks
    clean = [
        {**row, "name": str(row["name"]).replace("\r", " ").replace("\0", " ")} for row in rows
    ]
    back = list(csv.DictReader(io.StringIO(csv_text(clean, ["name", "count"]), newline="")))
    assert back == [{name: str(value) for name, value in row.items()} for row in clean]
