"""The README's walk-through: create a tenant, give it a key, change its quota while it chats, read
its bill. Every command of it runs here, against a real gateway.

The commands are kept in `walk_through.sh` beside this file; where the README has the walk-through,
it is the same to the letter.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_fleet import LORAPLEX
from scripted import ScriptedReplica, until
from typer.testing import CliRunner

from gateway.cli.failure import Failure
from gateway.cli.root import app

ADMIN_KEY = "operators-only-0123456789"
WALK = Path(__file__).with_name("walk_through.sh")
README = Path(__file__).parents[3] / "README.md"
HEADING = "## A tenant, from its key to its bill"


def commands() -> list[str]:
    lines = WALK.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def test_the_readme_shows_the_commands_that_are_tested() -> None:
    text = README.read_text()
    if HEADING not in text:
        pytest.skip("the README has no walk-through")
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    assert WALK.read_text().strip() in section


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """One command line as a shell reads it, but for `$(…)` and the environment, which are ours."""
    monkeypatch.chdir(tmp_path)
    environment = {"LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    def call(line: str, url: str) -> str:
        exported = ""
        if line.startswith("export "):
            exported, _, inner = line.removeprefix("export ").partition("=")
            line = inner.removeprefix("$(").removesuffix(")")
        words = shlex.split(line, comments=True)
        assert words.pop(0) == "loraplex", line
        here = {**environment, "LORAPLEX_GATEWAY": url}
        result = CliRunner().invoke(app, words, env=here)
        if isinstance(result.exception, Failure):
            raise result.exception
        assert result.exit_code == 0, (line, result.output, result.exception)
        if exported:
            environment[exported] = result.stdout.strip()
        return result.stdout

    call.file = lambda name: (tmp_path / name).read_text()  # type: ignore[attr-defined]
    call.environment = environment  # type: ignore[attr-defined]
    yield call
    assert os.getcwd() == str(tmp_path)


async def test_every_command_of_the_walk_through_does_what_it_says(fleet: Any, run: Any) -> None:
    one = ScriptedReplica("replica-0", adapters=("pirate",))
    async with fleet(one, admin={"key": ADMIN_KEY}) as it:
        said, chatting = dict[str, str](), ""
        for line in commands():
            if line == "loraplex tenant set poets --requests-per-min 2":
                one.speak.clear()  # the chat before it is in the middle of its answer
                chat = await asyncio.create_subprocess_exec(
                    *LORAPLEX,
                    *shlex.split(chatting)[1:],
                    env={**os.environ, **run.environment, "LORAPLEX_GATEWAY": it.url},
                    stdout=asyncio.subprocess.PIPE,
                )
                await until(lambda: len(one.received) == 2, within_s=30)
                said[line] = await asyncio.to_thread(run, line, it.url)
                one.speak.set()
                answer, _ = await chat.communicate()
                assert (chat.returncode, answer.decode()) == (0, "Hello wörld!\n")
                continue
            if " chat " in line:
                chatting = line
            said[line] = await asyncio.to_thread(run, line, it.url)
        shown = json.loads(said["loraplex tenant show poets --json"])
        assert shown["limits"]["requests_per_min"] == 2
        bill = json.loads(said["loraplex usage --by tenant,adapter --json"])
        [mine] = [row for row in bill if row["tenant"] == "poets"]
        assert (mine["adapter"], mine["requests"], mine["completion_tokens"]) == ("pirate", 2, 8)
        assert mine["spend"] == pytest.approx(2 * (7 * 0.5 + 4 * 1.5) / 1e6)
        exported = run.file("bill.csv").splitlines()
        assert len(exported) == 3
        assert "poets" in exported[1]
        assert "tenant.changed" in said["loraplex events --limit 5"]
