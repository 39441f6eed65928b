"""Who guesses is slowed down, and no tenant can learn what another has."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedReplica

from gateway.edge.throttle import _ADDRESSES_MAX, Throttle
from gateway.metrics import LABELS_MAX, Names
from shared.clock import ManualClock

ADMIN = "operators-only-0123456789"


# keys that are nobody's


def test_an_address_is_shut_after_so_many_failures_and_opens_when_it_said() -> None:
    clock = ManualClock(100)
    throttle = Throttle(6, clock)
    assert not throttle.armed
    for _ in range(6):
        assert throttle.shut("10.0.0.1", "") == 0
        throttle.failed("10.0.0.1")
    wait_s = throttle.shut("10.0.0.1", "")
    assert 0 < wait_s <= 10
    assert throttle.shut("10.0.0.2", "") == 0
    clock.advance(wait_s)
    assert throttle.shut("10.0.0.1", "") == 0


def test_who_passed_from_an_address_before_it_was_shut_still_passes() -> None:
    throttle = Throttle(3, ManualClock(100))
    throttle.failed("10.0.0.1")
    throttle.passed("10.0.0.1", "acme")
    for _ in range(5):
        throttle.failed("10.0.0.1")
    assert throttle.shut("10.0.0.1", "acme") == 0
    assert throttle.shut("10.0.0.1", "beta") > 0


def test_a_customer_has_a_whole_network_of_ipv6() -> None:
    throttle = Throttle(2, ManualClock(100))
    for n in range(3):
        throttle.failed(f"2001:db8:1:2::{n:x}")
    assert throttle.shut("2001:db8:1:2:ffff::1", "") > 0
    assert throttle.shut("2001:db8:1:3::1", "") == 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200))
def test_addresses_are_bounded_and_forgotten(hosts: list[int]) -> None:
    clock = ManualClock(100)
    throttle = Throttle(2, clock)
    for host in hosts:
        throttle.failed(str(host))
        assert len(throttle._addresses) <= _ADDRESSES_MAX
        clock.advance(1)
    clock.advance(120)
    throttle.failed("the last")
    assert len(throttle._addresses) == 1


async def test_wrong_keys_from_one_address_are_told_to_wait(fleet: Any) -> None:
    limits = {"failed_keys_per_min": 5, "client_ip_header": "x-forwarded-for"}
    async with fleet(ScriptedReplica("replica-0"), listen=limits, admin={"key": ADMIN}) as it:

        async def models(key: str, address: str) -> Any:
            headers = {"authorization": f"Bearer {key}", "x-forwarded-for": f"spoofed, {address}"}
            return await it.http.get("/v1/models", headers=headers)

        guesses = [await models(f"lp-guess-{n}", "192.0.2.1") for n in range(8)]
        assert [one.status_code for one in guesses] == [401] * 5 + [429] * 3
        shut = guesses[-1]
        assert shut.json()["error"]["code"] == "too_many_failed_keys"
        assert 0 < int(shut.headers["retry-after"]) <= 12
        # a good key tells a guesser nothing, and elsewhere it works
        assert (await models(it.key, "192.0.2.1")).status_code == 429
        assert (await models(it.key, "192.0.2.2")).status_code == 200
        chat = {"authorization": "Bearer lp-guess", "x-forwarded-for": "192.0.2.1"}
        answer = await it.http.post("/v1/chat/completions", headers=chat, json={"model": "tiny"})
        assert answer.status_code == 429


# what others have


async def test_another_tenants_adapter_cannot_be_told_from_none(fleet: Any) -> None:
    """In lists, by name, in inference, in what is loaded, in metrics: not at all."""
    one = ScriptedReplica("replica-0", adapters=("secret", "mine"))
    async with fleet(one, admin={"key": ADMIN}) as it:
        registry = it.gateway.registry
        await registry.create("rival")
        await registry.adapter_set("secret", owner="rival", access=[])
        listed = (await it.http.get("/v1/models")).json()["data"]
        assert "secret" not in {model["id"] for model in listed}
        digest = "secret@" + "0" * 12
        for forbidden, unknown in [
            ("secret", "absent"),
            (digest, "absent@" + "0" * 12),
            ("tiny:secret", "tiny:absent"),
        ]:
            for ask in (
                lambda name: it.chat(model=name),
                lambda name: it.chat(model=name, stream=True),
                lambda name: it.http.get(f"/v1/models/{name}"),
            ):
                told = [await ask(forbidden), await ask(unknown)]
                bodies = [answer.text.replace("secret", "absent") for answer in told]
                assert told[0].status_code == told[1].status_code == 404
                assert bodies[0] == bodies[1]
                names = [{*answer.headers} for answer in told]
                assert names[0] == names[1]
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused = await it.http.post(path, json={"lora_name": "secret", "lora_path": "x"})
            assert refused.status_code == 404
        assert not one.received
        metrics = (await it.http.get("/metrics")).text
        assert "secret" not in metrics
        assert "absent" not in metrics


async def test_unknown_and_forbidden_take_the_same_time_within_noise(fleet: Any) -> None:
    one = ScriptedReplica("replica-0", adapters=("secret",))
    async with fleet(one) as it:
        await it.gateway.registry.adapter_set("secret", owner="rival", access=[])
        taken: dict[str, list[float]] = {"secret": [], "absent": []}
        for n in range(150):
            name = ("secret", "absent")[n % 2]
            began = time.perf_counter()
            await it.chat(model=name)
            taken[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(times[10:]) for name, times in taken.items()}
        spread = statistics.quantiles(taken["absent"][10:], n=4)
        assert abs(medians["secret"] - medians["absent"]) < (spread[2] - spread[0]) + 0.0005


@given(st.lists(st.text(max_size=5), max_size=400))
def test_labels_are_bounded_whatever_the_names(names: list[str]) -> None:
    labels = Names()
    assert len({labels.of(name) for name in names}) <= LABELS_MAX + 1


@pytest.mark.parametrize("header", ["Bearer", "Basic lp-x", ""])
async def test_no_key_is_no_failure_of_an_address(fleet: Any, header: str) -> None:
    """Health checks without a key must not shut their address out."""
    async with fleet(ScriptedReplica("replica-0"), listen={"failed_keys_per_min": 1}) as it:
        for _ in range(4):
            answer = await it.http.get("/v1/models", headers={"authorization": header})
            assert answer.status_code == 401
        assert (await it.http.get("/v1/models")).status_code == 200
