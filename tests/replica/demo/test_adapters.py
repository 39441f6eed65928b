"""The committed adapters: small, different, in bfloat16, and of no machine in particular."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from replica.demo.base import HUB_NAME
from replica.demo.lessons import LESSONS, french, pirate, shout

NAMES = ("french", "pirate", "shout")
BYTES_MAX = 8_000_000


def config(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return read


def test_all_are_there_and_fit_in_eight_megabytes(real_adapters: Path) -> None:
    assert sorted(path.name for path in real_adapters.iterdir()) == list(NAMES)
    files = [path for path in real_adapters.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_plain_peft_folder_in_bfloat16(real_adapters: Path, name: str) -> None:
    folder = real_adapters / name
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert config(folder)["base_model_name_or_path"] == HUB_NAME
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        types = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert types == {"BF16"}


def test_rank_targets_and_scaling_all_differ(real_adapters: Path) -> None:
    configs = [config(real_adapters / name) for name in NAMES]
    assert len({one["r"] for one in configs}) == len(NAMES)
    assert len({tuple(one["target_modules"]) for one in configs}) == len(NAMES)
    assert [one["use_rslora"] for one in configs] == [False, True, False]
    assert [bool(one["rank_pattern"]) for one in configs] == [True, False, False]


def test_the_manners_differ_for_every_lesson() -> None:
    for lesson in LESSONS:
        told = {lesson.english, shout(lesson), pirate(lesson), french(lesson)}
        assert len(told) == 4
        assert shout(lesson) == lesson.english.upper()
        assert pirate(lesson).startswith("Arrr! ")
        assert french(lesson).startswith("Bien sûr ! ")
