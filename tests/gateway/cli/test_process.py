"""One process of the fleet, with real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gateway.cli.process import Child, Died, how

READY = "import sys; print('part ready on http://127.0.0.1:7', flush=True)"


def child(tmp_path: Path, program: str) -> Child:
    (tmp_path / "part.py").write_text(textwrap.dedent(program))
    return Child(name="part", log=tmp_path / "part.log", environ={"PYTHONPATH": str(tmp_path)})


async def test_its_ready_line_names_its_url_and_it_ends_when_told(tmp_path: Path) -> None:
    part = child(tmp_path, f"{READY}\nsys.stdin.read()\nimport time; time.sleep(60)")
    assert await part.start(["part"], timeout_s=30) == "http://127.0.0.1:7"
    await part.stop(grace_s=10)
    assert how(await part.exited()) == "was killed by SIGTERM"


async def test_what_it_prints_later_goes_to_its_log(tmp_path: Path) -> None:
    part = child(tmp_path, f"{READY}\nprint('later'); print('loud', file=sys.stderr)")
    await part.start(["part"], timeout_s=30)
    assert await part.exited() == 0
    async with asyncio.timeout(10):
        while "later" not in part.log.read_text():  # noqa: ASYNC110 (a file has no event)
            await asyncio.sleep(0.01)
    assert "loud" in part.tail()


async def test_an_early_death_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    part = child(tmp_path, "import sys; print('no memory', file=sys.stderr); sys.exit(3)")
    with pytest.raises(Died, match=r"exit code 3 before it was ready[\s\S]*no memory"):
        await part.start(["part"], timeout_s=30)


async def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    part = child(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(Died, match="not ready in"):
        await part.start(["part"], timeout_s=0.5)
    assert await part.exited() == -signal.SIGKILL


async def test_one_that_ignores_the_polite_signal_is_killed(tmp_path: Path) -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    part = child(tmp_path, f"{ignore}\n{READY}\ntime.sleep(60)")
    await part.start(["part"], timeout_s=30)
    await part.stop(grace_s=0.2)
    assert await part.exited() == -signal.SIGKILL


async def test_it_can_start_again_under_the_same_name(tmp_path: Path) -> None:
    part = child(tmp_path, f"{READY}\nimport time; time.sleep(60)")
    await part.start(["part"], timeout_s=30)
    first = part.pid
    part.kill()
    await part.exited()
    await part.start(["part"], timeout_s=30)
    assert part.pid != first
    await part.stop(grace_s=10)


async def test_the_end_of_its_log_is_that_of_this_start(tmp_path: Path) -> None:
    part = child(tmp_path, "import sys; print('an old trouble', file=sys.stderr); sys.exit(3)")
    with pytest.raises(Died, match="an old trouble"):
        await part.start(["part"], timeout_s=30)
    part = child(tmp_path, "import sys; print('a new one', file=sys.stderr); sys.exit(4)")
    with pytest.raises(Died, match="a new one") as caught:
        await part.start(["part"], timeout_s=30)
    assert "an old trouble" not in str(caught.value)
    assert "an old trouble" in part.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux only")
def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(f"{READY}\nimport time; time.sleep(60)")
    program = f"""
        import asyncio, pathlib, time
        from gateway.cli.process import Child
        async def main():
            log = pathlib.Path({str(tmp_path / "part.log")!r})
            part = Child(name="part", log=log, environ={{}})
            await part.start(["part"], timeout_s=30)
            print(part.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert supervisor.stdout is not None
    part = int(supervisor.stdout.readline())
    handle = os.pidfd_open(part)  # readable once the process has ended
    try:
        supervisor.kill()
        supervisor.communicate()
        assert select.select([handle], [], [], 10)[0], "the part outlived its supervisor"
    finally:
        os.close(handle)
