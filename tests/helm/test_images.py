"""Images cannot be built without a container engine; what they name must exist all the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["gateway", "replica"])
def dockerfile(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param / "Dockerfile").read_text().replace("\\\n", " ")


def copied(dockerfile: str) -> list[str]:
    """What comes from the repository, not from another stage."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_what_an_image_copies_exists_and_is_not_ignored(dockerfile: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore  # everything stays out but what is named
    assert copied(dockerfile)
    for source in copied(dockerfile):
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignore, source


def test_an_image_runs_as_a_numbered_user_other_than_root(dockerfile: str) -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", dockerfile, re.MULTILINE)
    assert int(user) > 0


def test_the_gateways_image_has_no_torch() -> None:
    text = (ROOT / "gateway/Dockerfile").read_text()
    (lock,) = set(re.findall(r"\S+\.lock", text))
    assert not re.search(r"^(torch|triton)\b", (ROOT / lock).read_text(), re.MULTILINE)


def test_the_replicas_image_has_torch() -> None:
    text = (ROOT / "replica/Dockerfile").read_text()
    (lock,) = set(re.findall(r"\S+\.lock", text))
    assert re.search(r"^torch==", (ROOT / lock).read_text(), re.MULTILINE)
