"""Starts the Triton kernels' tests in the interpreter, and holds the shipped tables valid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replica.engine.kernels import tiling

KERNELS = Path(tiling.__file__).parent


def test_the_triton_kernels_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).with_name("test_gathered.py"), "-q", "-n0"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_of_tilings_that_exist(path: Path) -> None:
    device = json.loads(path.read_text())["device"]
    table = tiling.table(device)
    assert table, f"{device} does not find {path.name}"
    planes: dict[tuple[str, bool], set[int]] = {}
    for line, cut in table.items():
        assert cut.shrink.TR <= 16 or not cut.shrink.rows
        assert not (cut.expand.rows and cut.shrink.reduce)
        if "m0" not in line:
            module = line.split(" ")[0]
            planes.setdefault((module, cut.shrink.rows), set()).add(cut.shrink.BK)
    assert all(len(sizes) == 1 for sizes in planes.values()), "BK reaches results: one a module"
