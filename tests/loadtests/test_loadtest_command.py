"""What `make loadtest` refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loadtests.loadtest import main

app = typer.Typer()
app.command()(main)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--generator", "curl"], "no generator"),
        (["--base", "somewhere"], "go together"),
        (["--rate", "-1"], "above 0"),
        (["no-such-file.jsonl"], "No such file"),
        (["empty.jsonl"], "empty"),
    ],
)
def test_wrong_usage_ends_with_two_and_says_why(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert says in done.output
