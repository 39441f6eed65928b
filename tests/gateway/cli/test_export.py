"""Exports: the same rows in every form, whole or not at all, trimmed only when they are safe."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from scripted import ScriptedReplica, until
from typer.testing import CliRunner

from gateway.cli import usage as usage_module
from gateway.cli.export import Form, write
from gateway.cli.failure import Failure
from gateway.cli.root import app
from gateway.cli.usage import RECORD
from gateway.state.prices import Price

KEY = "operators-only-0123456789"


def run(url: str, *words: str, typed: str = "") -> tuple[int, str]:
    here = {"LORAPLEX_ADMIN_KEY": KEY, "LORAPLEX_GATEWAY": url}
    result = CliRunner().invoke(app, list(words), env=here, input=typed)
    if isinstance(result.exception, Failure):
        return result.exception.code, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def rows_of(path: Path, form: Form) -> list[dict[str, Any]]:
    if form is Form.CSV:
        found: list[dict[str, Any]] = [*csv.DictReader(path.read_text().splitlines())]
    elif form is Form.JSON:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        found = pq.read_table(path).to_pylist()
    return [{**row, "prompt_tokens": int(row["prompt_tokens"])} for row in found]


async def test_every_form_has_every_record_and_a_trim_keeps_the_sums(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_PAGE", 2)  # several pages
    async with fleet(ScriptedReplica("replica-0"), admin={"key": KEY}) as it:
        await it.gateway.registry.price_set("*", "*", Price(1000, 100, 2000))
        ids = [(await it.chat(stream=bool(n % 2))).headers["x-request-id"] for n in range(5)]
        await until(lambda: it.gateway.ledger.backlog_bytes == 0)

        async def call(*words: str) -> tuple[int, str]:
            return await asyncio.to_thread(run, it.url, "usage", *words)

        for form in Form:
            path = tmp_path / f"bill.{form}"
            assert (await call("export", "--format", form, "--output", str(path)))[0] == 0
            rows = rows_of(path, form)
            assert sorted(row["request"] for row in rows) == sorted(ids)
            assert {*rows[0]} == {*RECORD}
            assert {float(row["spend"]) for row in rows} == {(5 * 1000 + 2 * 100 + 4 * 2000) / 1e9}
        path = tmp_path / "all.csv"
        words = ("export", "--output", str(path), "--trim")
        code, said = await call(*words, "--from", "2026-01-01")
        assert (code, "leave --from" in said) == (2, True)
        assert (await call(*words, "--yes"))[0] == 0
        assert len(rows_of(path, Form.CSV)) == 5
        assert (await call("export", "--output", str(path)))[0] == 0
        assert rows_of(path, Form.CSV) == []
        _, said = await call("--json")
        assert json.loads(said)[0]["requests"] == 5
        sums = tmp_path / "sums.parquet"
        assert (await call("--format", "parquet", "--output", str(sums)))[0] == 0
        assert pq.read_table(sums).to_pylist()[0]["requests"] == 5


@pytest.mark.parametrize("form", Form)
def test_an_export_that_fails_leaves_the_file_that_was_there(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "bill"
    path.write_text("of last month")

    def rows() -> Any:
        yield {"id": "1-0"}
        raise Failure("the gateway went away")

    with pytest.raises(Failure, match="went away"):
        write(rows(), RECORD, form, path)
    assert path.read_text() == "of last month"
    assert [*tmp_path.iterdir()] == [path]
