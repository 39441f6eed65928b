"""Settings come from the file, then the environment; what is unknown is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import Field

from shared.settings import BadSettings, Settings, example, load


class Inner(Settings):
    wait_s: float = Field(1.5, gt=0)
    """Seconds to wait."""


class Outer(Settings):
    inner: Inner = Inner()
    name: str = "x"
    """A name."""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "inner: {wait_s: 2}\nname: file\n")
    got = load(Outer, path, {"LORAPLEX_INNER__WAIT_S": "3", "LORAPLEX_UNRELATED": "9"})
    assert got == Outer(inner=Inner(wait_s=3), name="file")


def test_text_from_the_environment_stays_text() -> None:
    assert load(Outer, None, {"LORAPLEX_NAME": "0123"}).name == "0123"
    assert load(Outer, None, {"LORAPLEX_NAME": ""}).name == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("inner: {wait_z: 2}", "inner.wait_z"),
        ("inner: {wait_s: -1}", "inner.wait_s"),
        ("inner: {wait_s: soon}", "inner.wait_s"),
        ("- a list", "mapping"),
        ("a: [", "config.yaml"),
    ],
)
def test_a_fault_names_the_file_and_the_key(tmp_path: Path, text: str, names: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadSettings) as caught:
        load(Outer, path, {})
    assert names in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="absent"):
        load(Outer, tmp_path / "absent.yaml", {})


def test_an_environment_key_into_a_plain_field_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "name: file")
    with pytest.raises(BadSettings, match="not a section"):
        load(Outer, path, {"LORAPLEX_NAME__DEEPER": "1"})


def test_the_example_loads_as_it_is_and_describes_every_field() -> None:
    text = example(Outer)
    assert Outer.model_validate(yaml.safe_load(text)) == Outer()
    assert "# Seconds to wait." in text
    assert "# A name." in text
