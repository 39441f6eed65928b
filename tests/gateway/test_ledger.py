"""The ledger: every finished request once, whatever fails in which order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from stores import Relay

from gateway.state.ledger import BadQuestion, Ledger, Record
from gateway.store.redis import Store, StoreAway
from gateway.store.spool import Spool
from shared.clock import ManualClock
from shared.ids import ReplicaId, RequestId, TenantId

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
ALL_DAY = (NOON - 12 * 3600, NOON + 12 * 3600)


@pytest.fixture
def prefix() -> str:
    return f"{uuid.uuid4().hex}:"


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=prefix, timeout_s=2)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def ledger(store: Store, tmp_path: Path) -> AsyncIterator[Ledger]:
    it = on(store, tmp_path)
    await it.start()
    yield it
    await it.close()


def on(store: Store, folder: Path, *, name: str = "spool") -> Ledger:
    return Ledger(store, folder / name, ManualClock(NOON + 86_400))


def record(**changed: Any) -> Record:
    plain = Record(
        request=RequestId(uuid.uuid4().hex),
        tenant=TenantId("acme"),
        adapter="poet",
        digest="sha256:0123456789abcdef",
        replica=ReplicaId("replica-0"),
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=20,
        queue_s=0.001,
        first_token_s=0.1,
        total_s=0.5,
        outcome="ok",
        estimated=False,
        at=NOON,
    )
    return replace(plain, **changed)


def stream(valkey_url: str, prefix: str) -> list[dict[str, Any]]:
    with redis.Redis.from_url(valkey_url) as client:
        return [orjson.loads(entry[b"record"]) for _, entry in client.xrange(f"{prefix}records")]


async def total(ledger: Ledger) -> int:
    rows = await ledger.usage(*ALL_DAY, ())
    return rows[0]["requests"] if rows else 0


# what is entered


async def test_a_record_is_entered_whole_and_added_up(
    ledger: Ledger, valkey_url: str, prefix: str
) -> None:
    one = record(outcome="cut", estimated=True)
    ledger.record(one)
    assert await ledger.usage(*ALL_DAY, ("tenant", "adapter", "version", "replica", "hour")) == [
        {
            "tenant": "acme",
            "adapter": "poet",
            "version": "0123456789ab",
            "replica": "replica-0",
            "hour": "2026-11-29T12:00Z",
            "requests": 1,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 20,
            "estimated": 1,
            "ok": 0,
            "cut": 1,
            "failed": 0,
            "refused": 0,
            "spend": 0.0,
        }
    ]
    assert [Record(**entry) for entry in stream(valkey_url, prefix)] == [one]
    assert ledger.backlog_bytes == 0


async def test_a_record_that_comes_twice_counts_once(
    ledger: Ledger, store: Store, tmp_path: Path, valkey_url: str, prefix: str
) -> None:
    other = on(store, tmp_path)
    await other.start()
    one = record()
    for _ in range(3):
        ledger.record(one)
        other.record(one)
    await asyncio.gather(total(ledger), total(other))
    assert await total(ledger) == 1
    assert len(stream(valkey_url, prefix)) == 1
    await other.close()


async def test_usage_splits_by_any_subset_and_every_split_has_the_same_sum(ledger: Ledger) -> None:
    for n in range(60):
        ledger.record(
            record(
                tenant=f"t{n % 2}",
                adapter=f"a{n % 3}",
                replica=f"r{n % 4}" if n % 5 else "",
                at=NOON + 600 * n,
                prompt_tokens=n,
            )
        )
    for by, rows_expected in [
        ((), 1),
        (("tenant",), 2),
        (("adapter",), 3),
        (("replica",), 5),
        (("hour",), 10),
        (("hour", "tenant"), 20),
        (("tenant", "adapter"), 6),
    ]:
        rows = await ledger.usage(*ALL_DAY, by)
        assert len(rows) == rows_expected
        assert sum(row["requests"] for row in rows) == 60
        assert sum(row["prompt_tokens"] for row in rows) == sum(range(60))
        keys = [tuple(row[name] for name in by) for row in rows]
        assert keys == sorted(set(keys))


async def test_usage_counts_the_hours_that_it_is_asked_for(ledger: Ledger) -> None:
    for hour in range(4):
        ledger.record(record(at=NOON + hour * 3600))
    rows = await ledger.usage(NOON + 3600, NOON + 3 * 3600, ("hour",))
    assert [row["hour"] for row in rows] == ["2026-11-29T13:00Z", "2026-11-29T14:00Z"]
    assert await ledger.usage(NOON + 5400, NOON + 5401, ("hour",)) == [rows[0]]
    assert await ledger.usage(NOON + 3600, NOON + 3600, ("hour",)) == []
    assert await ledger.usage(NOON + 7200, NOON, ("hour",)) == []


async def test_names_of_any_letters_keep_apart(ledger: Ledger) -> None:
    names = ['a"b', "a b", "a,b", "ä\U0001f600", "a/b:c@d", '["x"]']
    for name in names:
        ledger.record(record(adapter=name))
    rows = await ledger.usage(*ALL_DAY, ("adapter",))
    assert [row["adapter"] for row in rows] == sorted(names)


async def test_a_question_that_makes_no_sense_names_its_field(ledger: Ledger) -> None:
    with pytest.raises(BadQuestion, match="customer") as caught:
        await ledger.usage(*ALL_DAY, ("customer",))
    assert caught.value.param == "by"
    with pytest.raises(BadQuestion) as caught:
        await ledger.usage(0, NOON, ("tenant",))
    assert caught.value.param == "from"


async def test_the_stream_is_bounded(
    ledger: Ledger, valkey_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.state.records.STREAM_MAX", 200)
    for _ in range(1000):
        ledger.record(record())
    assert await total(ledger) == 1000
    assert len(stream(valkey_url, prefix)) < 400


# outages


async def test_an_outage_loses_nothing_and_counts_nothing_twice(
    valkey_url: str, prefix: str, tmp_path: Path
) -> None:
    async with Relay(valkey_url, tmp_path / "r") as relay:
        store = Store(relay.url, prefix=prefix, timeout_s=0.2)
        await store.start()
        ledger = on(store, tmp_path)
        await ledger.start()
        for n in range(300):
            ledger.record(record())
            if n in (100, 200):
                relay.freeze()
            if n == 150:
                relay.thaw()
            if n == 250:
                await relay.cut()
                relay.thaw()
            if n % 10 == 0:
                await asyncio.sleep(0.02)
        assert ledger.backlog_bytes > 0
        assert ledger.degraded
        with pytest.raises(StoreAway):
            await ledger.usage(*ALL_DAY)
        await relay.mend()
        assert await store.back(timeout_s=5)
        deadline = time.monotonic() + 5
        while await total(ledger) < 300:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert await total(ledger) == 300
        assert len(stream(valkey_url, prefix)) == 300
        assert not ledger.degraded
        await ledger.close()
        await store.close()


async def test_recording_never_waits(valkey_url: str, prefix: str, tmp_path: Path) -> None:
    async with Relay(valkey_url, tmp_path / "r") as relay:
        store = Store(relay.url, prefix=prefix, timeout_s=0.2)
        await store.start()
        ledger = on(store, tmp_path)
        await ledger.start()
        relay.freeze()
        began = time.monotonic()
        for _ in range(2000):
            ledger.record(record())
        assert time.monotonic() - began < 1
        relay.thaw()
        await ledger.close()
        await store.close()


async def test_a_closed_ledger_leaves_what_the_store_did_not_take_to_the_next(
    store: Store, tmp_path: Path
) -> None:
    away = Store(f"unix://{tmp_path}/none")
    first = on(away, tmp_path)
    await first.start()
    for _ in range(5):
        first.record(record())
    await first.close()
    await away.close()
    second = on(store, tmp_path)
    await second.start()
    assert await total(second) == 5
    await second.close()


async def test_closing_enters_what_was_just_recorded(
    ledger: Ledger, store: Store, tmp_path: Path
) -> None:
    short = on(store, tmp_path)
    await short.start()
    short.record(record())
    await short.close()
    assert await total(ledger) == 1


async def test_a_killed_gateway_loses_no_finished_request(
    ledger: Ledger, store: Store, tmp_path: Path
) -> None:
    """It dies with records that never reached the store; whoever starts next enters them."""
    code = f"""
        import asyncio, os, pathlib, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from gateway.state.ledger import Ledger, Record
        from gateway.store.redis import Store
        async def main():
            store = Store("unix:///nowhere")
            ledger = Ledger(store, pathlib.Path({str(tmp_path)!r}) / "spool")
            await ledger.start()
            for n in range(7):
                counts, times = (1, 0, 1), (0.0, 0.0, 0.0)
                who = (f"killed-{{n}}", "acme", "poet", "", "r")
                ledger.record(Record(*who, *counts, *times, "ok", False, {NOON}))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    process = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", textwrap.dedent(code)], check=False
    )
    assert process.returncode == -9
    assert await total(ledger) == 0  # it holds another spool
    successor = on(store, tmp_path)
    await successor.start()
    assert await total(successor) == 7
    assert Spool.orphans(tmp_path / "spool") == []
    await successor.close()


async def test_a_disk_that_refuses_is_made_up_for_by_memory(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    ledger = on(store, tmp_path / "file")
    await ledger.start()
    for _ in range(5):
        ledger.record(record())
    assert await total(ledger) == 5
    assert ledger.lost == 0
    await ledger.close()


async def test_an_unreadable_line_hides_only_itself(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    for line in (b"\x00\x00", b"{}", b"[1]", orjson.dumps({"request": "r"})):
        spool.append(line)
    spool.close()
    ledger = on(store, tmp_path)
    await ledger.start()
    ledger.record(record())
    assert await total(ledger) == 1
    assert ledger.lost == 4
    assert ledger.backlog_bytes == 0
    await ledger.close()
