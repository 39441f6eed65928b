"""What the documents promise is there: commands, their help, the example configuration."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gateway.cli.root import app
from gateway.config import GatewayConfig
from shared import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def commands(group: typer.Typer = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command as its words; groups too."""
    for command in group.registered_commands:
        yield (*path, command.name or "")
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        assert inner.name is not None
        yield (*path, inner.name)
        yield from commands(inner.typer_instance, (*path, inner.name))


COMMANDS = sorted(commands())
PROCESSES = {("gateway",), ("replica",), ("lesson",), ("plan",), ("simulate",), ("trace",)} | {
    ("bench", part) for part in ("kernels", "engine", "residency", "agreement")
}  # these become another program


def run(*words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    if words[:1] in PROCESSES or words[:2] in PROCESSES:
        done = loraplex(*words)
        return done.returncode, done.stdout + done.stderr
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def loraplex(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from gateway.cli import main; main()", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def shell_lines(text: str) -> list[str]:
    """The lines of every ```sh block."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    code, output = run(*command, "--help")
    assert code == 0, output
    assert "example" in output.lower()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_option_that_is_none_is_a_usage_error(command: tuple[str, ...]) -> None:
    code, output = run(*command, "--no-such-option")
    assert code == 2, output
    assert "no-such-option" in output


def test_the_readme_names_only_commands_that_exist() -> None:
    names = {" ".join(command) for command in COMMANDS}
    said = {
        line.split("loraplex ", 1)[1]
        for line in [*shell_lines(README), *re.findall(r"`([^`\n]+)`", README)]
        if line.startswith("loraplex ") and not line.startswith("loraplex --")
    }
    assert said, "the README shows no command at all"
    for line in said:
        words = [word for word in shlex.split(line, comments=True) if re.match(r"[a-z-]+$", word)]
        assert words[0] in names or " ".join(words[:2]) in names, line


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(shell_lines(README))))
    assert {"demo", "test"} <= said <= targets


def test_the_readme_links_only_to_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_changelog_names_this_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in CHANGELOG


def test_the_example_configuration_loads_and_is_the_default(tmp_path: Path) -> None:
    example = loraplex("gateway", "--example-config")
    assert example.returncode == 0, example.stderr
    path = tmp_path / "gateway.yaml"
    path.write_text(example.stdout)
    assert settings.load(GatewayConfig, path, {}) == GatewayConfig()
    checked = loraplex("gateway", "--config", str(path), "--check-config")
    assert checked.returncode == 0, checked.stderr


def test_the_locks_name_no_build_that_is_on_no_index() -> None:
    for lock in sorted((ROOT / ".locks").glob("*.lock")):
        lines = lock.read_text().splitlines()
        assert not [line for line in lines if re.match(r"(nvidia|cuda)-|.*\+", line)], lock
    demo = (ROOT / ".locks" / "demo.lock").read_text().splitlines()
    dev = (ROOT / ".locks" / "dev.lock").read_text().splitlines()
    gateway = (ROOT / ".locks" / "gateway.lock").read_text().splitlines()
    assert "torch==2.13.0" in demo
    assert set(gateway) <= set(demo) <= set(dev)
    assert not [line for line in gateway if line.startswith(("torch", "triton"))]
