"""`loraplex adapter check`: the replica's own checks, and what people read of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from gateway.cli import adapter_check
from gateway.cli.failure import USAGE, Failure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("check")
    model = tiny_model(folder / "base")
    tiny_adapter(folder / "good", model)
    tiny_adapter(folder / "bad", model, extra={"use_dora": True, "bias": "all"})
    return folder


def test_a_good_adapter_ends_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter_check.check(folder / "good", base=folder / "base", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["servable"], found["findings"]) == (True, [])
    assert adapter_check.describe(found).splitlines()[-1].startswith("can be served: rank 4 on ")
    nameless = adapter_check.describe(found | {"servable": None})
    assert nameless.splitlines()[-1].endswith("name it with --base to compare shapes")


def test_each_fault_is_said_with_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        adapter_check.check(folder / "bad", base=folder / "base")
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert "error: unsupported_feature:use_dora (use_dora)" in said
    assert "error: incomplete_weights (bias)" in said
    assert "train without it" in said
    assert said.splitlines()[-1] == "cannot be served"


def test_a_folder_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="PATH") as raised:
        adapter_check.check(tmp_path / "nothing")
    assert raised.value.code == USAGE


def test_a_base_that_is_none_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from replica.adapter_check import main

    assert main([str(folder / "good"), "--base", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
