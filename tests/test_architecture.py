"""The rules of the house are executable, and they bite."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "replica", "shared", "loadtests")
FILE_LINES_MAX = 300
FUNCTION_LINES_MAX = 60


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def python(code: str, *flags: str, path: list[Path] | None = None) -> str:
    """Output of a fresh interpreter; with `path` it sees that and the standard library only."""
    if path is not None:
        flags = (*flags, "-I", "-S")
        code = f"import sys; sys.path[:0] = {[str(p) for p in path]}; {code}"
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_the_import_rules_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("gateway/core/router.py", "import time", "Cores are sans-IO"),
        ("gateway/core/ring.py", "import gateway.core.dispatcher", "Gateway core"),
        ("gateway/completion/handlers.py", "import torch", "No tensor outside the replica"),
        ("gateway/completion/forward.py", "import replica.core.scheduler", "Packages"),
        ("replica/core/scheduler.py", "import replica.engine.runner", "Replica: the shell imports"),
        ("replica/app.py", "import redis", "The replica knows no ring, no Redis"),
        ("gateway/helpers.py", "", "Gateway: the shell imports the core"),
    ],
)
def test_a_forbidden_import_breaks_the_build(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout
    broken = [row for row in done.stdout.splitlines() if row.endswith("BROKEN")]
    assert [row for row in broken if row.startswith(contract)], done.stdout


@pytest.mark.parametrize("module", ["gateway.cli.root", "gateway.app", "gateway.__main__"])
def test_the_gateway_loads_no_tensor_library(module: str) -> None:
    heavy = "{'torch', 'triton', 'transformers', 'numpy', 'openai', 'replica'}"
    assert python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_cores_need_nothing_installed_but_uhashring(tmp_path: Path) -> None:
    found = importlib.util.find_spec("uhashring")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, tmp_path / "uhashring")
    gateway = "import gateway.core.dispatcher, gateway.core.bucket; print('ok')"
    replica = "import replica.core.scheduler, replica.core.adapter_cache; print('ok')"
    assert python(gateway, path=[ROOT, tmp_path]) == "ok"
    assert python(replica, path=[ROOT]) == "ok"


@pytest.mark.parametrize("source", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable_in_one_sitting(source: Path) -> None:
    text = source.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name
