"""What the command line keeps in the data directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.cli.failure import Failure
from gateway.cli.home import Home, Keys


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "data")
    home.make()
    return home


def test_keys_come_back_and_nobody_else_can_read_them(home: Home) -> None:
    keys = Keys(admin="lpa-1", tenants={"acme": "lp-1"})
    home.save_keys(keys)
    assert home.keys() == keys
    assert stat.S_IMODE(home.keys_file.stat().st_mode) == 0o600


def test_without_a_file_there_are_no_keys_and_no_fleet(home: Home) -> None:
    assert home.keys() == Keys()
    assert home.running() == {}


def test_one_fleet_a_data_directory(home: Home) -> None:
    with home.claimed():
        home.announce({"url": "http://127.0.0.1:1", "pid": 7})
        with pytest.raises(Failure, match=r"already runs .* http://127.0.0.1:1 \(process 7\)"):
            home.claimed().__enter__()
    assert home.running() == {}
    with home.claimed():
        pass


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_file_is_named(home: Home, text: str) -> None:
    home.keys_file.write_text(text)
    with pytest.raises(Failure, match=str(home.keys_file)):
        home.keys()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match=r"LORAPLEX_DATA"):
        Home(tmp_path / "file" / "data").make()


def test_a_read_only_place_is_named_though_its_folders_are_there(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"cannot write to the data directory {home.root}: .*LORAPLEX_DATA"
    (home.root / "run" / "lock").mkdir()  # what even root cannot open to write
    with pytest.raises(Failure, match=said):
        home.claimed().__enter__()
    monkeypatch.setattr(os, "access", lambda path, mode: path != home.store)
    with pytest.raises(Failure, match=f"{home.store} is not writable.*LORAPLEX_DATA"):
        home.make()
