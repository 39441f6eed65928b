"""The short way is the long way, only shorter; and no end is seen that is not in the bill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted import BASE, Fleet, ScriptedReplica, read_reply, until

from gateway.completion.forward import FIRST_COMMENT_S
from gateway.completion.passage import Passage
from gateway.store.spool import Spool


def raw(it: Fleet, *more: bytes, **body: Any) -> bytes:
    text = orjson.dumps({"model": BASE, "messages": [], **body})
    lines = [b"Host: x", b"Authorization: Bearer " + it.key.encode(), *more]
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines)
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)


async def connected(it: Fleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = it.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answered(it: Fleet, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    reader, writer = await connected(it)
    writer.write(request)
    status, headers, parts = await read_reply(reader)
    writer.close()
    for name in (b"x-request-id", b"date", b"x-loraplex-queue-ms"):
        headers.pop(name, None)
    return status, headers, b"".join(parts)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many came by each step."""
    count = {"sent": 0, "left": 0}
    send, turn_off, go_on = Passage.send, Passage._turn_off, Passage._go_on

    def counted(name: str, step: Any) -> Any:
        def do(*args: Any) -> Any:
            count[name] += 1
            return step(*args)

        return do

    monkeypatch.setattr(Passage, "send", counted("sent", send))
    monkeypatch.setattr(Passage, "_turn_off", counted("left", turn_off))
    monkeypatch.setattr(Passage, "_go_on", counted("left", go_on))
    return count


SLOWLY = b"X-Client-Request-Id: 1"  # takes the long way


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "shout"},
        {"stream": True},
        {"model": "shout", "stream": True, "stream_options": {"include_usage": True}},
        {"model": "nobody"},
        {"model": 7},
        {"max_tokens": 0},
        {"lora_path": "x"},
    ],
)
async def test_both_ways_give_the_same_reply_and_the_same_bill(fleet, ways, body: dict) -> None:
    async with fleet(ScriptedReplica("replica-0", adapters=("shout",))) as it:
        await answered(it, raw(it))  # opens a connection
        await answered(it, raw(it))
        before = await bill(it)
        short = await answered(it, raw(it, **body))
        between = await bill(it)
        long = await answered(it, raw(it, SLOWLY, **body))
        after = await bill(it)
        assert short == long
        assert difference(before, between) == difference(between, after)
        assert ways["sent"] >= 2


async def bill(it: Fleet) -> dict[str, dict[str, Any]]:
    rows = await it.usage()
    return {row["adapter"]: {k: v for k, v in row.items() if k != "tenant"} for row in rows}


def difference(before: dict, after: dict) -> dict:
    return {
        name: {k: v - before.get(name, {}).get(k, 0) for k, v in row.items() if k != "adapter"}
        for name, row in after.items()
        if row != before.get(name)
    }


@pytest.mark.parametrize("way", ["resets", "raves", "dies_mid_stream"])
async def test_what_fails_on_the_short_way_is_told_as_on_the_long(fleet, ways, way: str) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one, health={"failures": 50}) as it:
        await answered(it, raw(it))
        one.answer = getattr(one, way)
        told = []
        for more in ((), (SLOWLY,)):
            await until(lambda: bool(it.gateway.pump.dispatcher._fleet.open))
            told.append(await answered(it, raw(it, *more, stream=True)))
        assert told[0] == told[1]


async def test_the_replica_that_refuses_is_left_for_another(fleet, ways) -> None:
    both = [ScriptedReplica(f"replica-{n}", adapters=("shout",)) for n in range(2)]
    async with fleet(*both) as it:
        for _ in range(3):
            _, headers, _ = await answered(it, raw(it, model="shout"))
        home = next(one for one in both if one.name.encode() == headers[b"x-loraplex-replica"])
        home.answer = home.fails(503)
        status, headers, _ = await answered(it, raw(it, model="shout"))
        assert b"200" in status
        assert headers[b"x-loraplex-replica"] != home.name.encode()
        assert it.gateway.pump.dispatcher.in_flight == 0


async def test_no_client_sees_the_end_before_the_bill_is_on_disk(fleet, monkeypatch) -> None:
    """As SIGKILL at any moment would find it: what was let out is in the file."""
    order: list[str] = []
    append = Spool.append

    def noted(self: Spool, *lines: bytes) -> None:
        append(self, *lines)
        order.extend(f"bill {orjson.loads(line)['request']}" for line in lines)

    monkeypatch.setattr(Spool, "append", noted)
    let_go = Passage.let_go

    def told(self: Passage) -> None:
        order.append(f"end {self._errand.request}")
        let_go(self)

    monkeypatch.setattr(Passage, "let_go", told)
    async with fleet(ScriptedReplica("replica-0", capacity=64)) as it:
        await asyncio.gather(
            *[answered(it, raw(it, stream=n % 2 == 1)) for n in range(24)],
        )
    ends = [step for step in order if step.startswith("end ")]
    assert ends
    for end in ends:
        assert order.index(end.replace("end", "bill")) < order.index(end)


async def test_a_reply_is_held_until_its_record_is_written(fleet, monkeypatch) -> None:
    """Both ways: a disk that hangs hangs the end, and nothing else of the reply."""
    async with fleet(ScriptedReplica("replica-0")) as it:
        await answered(it, raw(it))
        spilled: list[int] = []
        spill = it.gateway.ledger.spill
        for more in ((), (SLOWLY,)):
            reader, writer = await connected(it)
            sizes: list[int] = []

            def noted(sizes: list[int] = sizes, reader: Any = reader) -> None:
                sizes.append(bytes(reader._buffer).count(b"[DONE]"))
                spill()

            monkeypatch.setattr(it.gateway.ledger, "spill", noted)
            writer.write(raw(it, *more, stream=True))
            _, _, parts = await read_reply(reader)
            assert parts[-1].endswith(b"data: [DONE]\n\n")
            assert sizes
            assert sizes[0] == 0, "the end was out before its record was written"
            spilled += sizes
            writer.close()
        assert spilled


async def test_a_client_that_leaves_gives_back_its_place_and_is_billed_as_cut(fleet, ways) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        await answered(it, raw(it))
        one.answer = one.freezes
        _, writer = await connected(it)
        writer.write(raw(it))
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 1)
        writer.close()
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 0)
        await until(lambda: len(one.left) == 1)
        (row,) = await it.usage()
        assert row["cut"] == 1


async def test_requests_that_come_together_are_answered_in_their_order(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0", adapters=("shout",), capacity=64)) as it:
        reader, writer = await connected(it)
        models = [BASE, "shout", "nobody", BASE, "shout"] * 4
        writer.write(b"".join(raw(it, model=model) for model in models))
        for model in models:
            status, _, parts = await read_reply(reader)
            if model == "nobody":
                assert b"404" in status
            else:
                assert orjson.loads(parts[0])["model"] == model
        writer.close()


async def test_a_stream_that_has_to_wait_says_so_within_a_second(fleet, tmp_path: Path) -> None:
    one = ScriptedReplica("replica-0", capacity=1)
    async with fleet(one) as it:
        one.answer = one.freezes
        held = []
        for _ in range(2):  # its place, and the one above it
            reader, writer = await connected(it)
            writer.write(raw(it))
            held.append(writer)
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 2)
        reader, writer = await connected(it)
        asked = asyncio.get_running_loop().time()
        writer.write(raw(it, stream=True))
        head = await reader.readuntil(b": keep-alive\n\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert asyncio.get_running_loop().time() - asked < FIRST_COMMENT_S + 0.5
        for one_of in (*held, writer):
            one_of.close()


async def test_a_drain_waits_for_the_short_way_and_ends_it_in_the_end(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one, forward={"drain_s": 0.2}) as it:
        await answered(it, raw(it))
        one.answer = one.freezes
        reader, writer = await connected(it)
        writer.write(raw(it))
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 1)
        await it.gateway.drain(asyncio.Event())
        status, _, parts = await read_reply(reader)
        assert b"503" in status
        assert orjson.loads(parts[0])["error"]["code"] == "server_shutting_down"
        writer.close()


async def test_a_wrong_key_is_told_and_counted_once(fleet, ways) -> None:
    async with fleet(ScriptedReplica("replica-0"), listen={"failed_keys_per_min": 3}) as it:
        said = []
        for _ in range(5):
            status, _, _ = await answered(it, raw(it).replace(it.key.encode(), b"lp-nobodys-key"))
            said.append(status.split()[1])
        assert said == [b"401", b"401", b"401", b"429", b"429"]
        assert ways == {"sent": 0, "left": 0}


async def test_a_step_that_fails_takes_no_other_request_with_it(fleet, monkeypatch) -> None:
    async with fleet(ScriptedReplica("replica-0", adapters=("shout",), capacity=64)) as it:
        await answered(it, raw(it))
        place = it.gateway.pump.place

        def broken(arrival: Any) -> Any:
            if arrival.adapter == "shout":
                raise RuntimeError("as no code should")
            return place(arrival)

        monkeypatch.setattr(it.gateway.pump, "place", broken)
        replies = await asyncio.gather(
            *[answered(it, raw(it, model=model)) for model in (BASE, "shout", BASE, "shout", BASE)]
        )
        assert [status.split()[1] for status, _, _ in replies] == [b"200", b"500"] * 2 + [b"200"]
        monkeypatch.undo()
        assert b"200" in (await answered(it, raw(it, model="shout")))[0]
