"""A row is itself alone: neighbours, dirty pages, preemption and broken adapters change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, load, pool_pages
from hypothesis import given
from hypothesis import strategies as st

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Step
from replica.engine.adapter_store import AdapterFolder, HostAdapter
from replica.engine.runner import BROKEN, Runner
from replica.engine.tiny import tiny_adapter, tiny_model
from shared.ids import AdapterId

PAGES, PAGE_TOKENS = 128, 16
SLOTS = ("small", "wide", "deep")
IDLE = len(SLOTS)  # a slot that rows use only where a test fills it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    config = tiny_model(folder / "base", seed=2)
    tiny_adapter(folder / "adapters" / "small", config, 1, r=1, targets=("v_proj",))
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tiny_adapter(folder / "adapters" / "wide", config, 2, r=16, targets=every)
    tiny_adapter(folder / "adapters" / "deep", config, 3, r=6, targets=("down_proj", "q_proj"))
    return folder


def _host(folder: Path, name: str, runner: Runner) -> HostAdapter:
    return AdapterFolder(folder / "adapters", 16, runner.config).read(AdapterId(name))


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    runner = Runner(
        base_dir=folder / "base",
        slots=len(SLOTS) + 1,
        max_rank=16,
        pages=pool_pages(PAGES, len(SLOTS) + 1),
        page_tokens=PAGE_TOKENS,
        threads=1,
    )
    for slot, name in enumerate(SLOTS):
        load(runner, slot, _host(folder, name, runner), PAGES)
    return runner


def _driver(runner: Runner) -> Driver:
    return Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)


def _alone(runner: Runner, prompt: list[int], slot: int, sampling: Sampling) -> list[int]:
    driver = _driver(runner)
    driver.add("x", prompt, slot, sampling)
    return driver.generate(8)["x"]


REQUESTS = st.tuples(
    st.lists(st.integers(0, 264), min_size=1, max_size=20),
    st.integers(BASE_SLOT, len(SLOTS) - 1),
    st.sampled_from([0.0, 0.8]),
)


@given(st.lists(REQUESTS, min_size=2, max_size=6), st.sampled_from([2, 5, 1 << 20]))
def test_batched_is_alone(
    runner: Runner, requests: list[tuple[list[int], int, float]], chunk: int
) -> None:
    driver = _driver(runner)
    alone = {}
    for i, (prompt, slot, temperature) in enumerate(requests):
        sampling = Sampling(max_tokens=8, temperature=temperature, seed=i)
        driver.add(f"{i}", prompt, slot, sampling)
        alone[f"{i}"] = _alone(runner, prompt, slot, sampling)
    assert driver.generate(8, chunk) == alone


def test_a_preempted_sequence_goes_on_where_it_stopped(runner: Runner) -> None:
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3)
    whole = _alone(runner, [5, 6, 7, 8, 9], 1, sampling)
    driver = _driver(runner)
    driver.add("x", [5, 6, 7, 8, 9], 1, sampling)
    driver.add("other", [100, 101, 102], BASE_SLOT)
    for _ in range(4):
        driver.run()
    driver.preempt("x")
    driver.run()
    driver.preempt("x")
    assert driver.generate(8, chunk=3)["x"] == whole


def test_a_row_that_only_fills_pages_draws_nothing(runner: Runner) -> None:
    driver = _driver(runner)
    driver.add("long", list(range(3, 30)))
    assert driver.run(chunk=20) == {}
    assert set(driver.run(chunk=20)) == {"long"}


def test_logits_of_chosen_rows_only(runner: Runner) -> None:
    driver = _driver(runner)
    driver.add("done", [7, 8, 9])
    driver.add("more", list(range(3, 30)))
    logits = driver.logits(chunk=5)
    assert set(logits) == {"done"}
    assert logits["done"].shape == (runner.config.vocab_size,)
    assert logits["done"].dtype == torch.float32


def test_an_adapter_that_breaks_ends_its_own_rows_only(runner: Runner, folder: Path) -> None:
    """Weights the store would refuse; then its pages pass to others, and the slot to a good one."""
    prompt = [11, 12, 13, 14, 15, 16]
    base = _alone(runner, prompt, BASE_SLOT, Sampling(max_tokens=8, temperature=0))
    wide = _alone(runner, prompt, 1, Sampling(max_tokens=8, temperature=0))
    bad = _host(folder, "wide", runner)
    bad.flat.fill_(float("nan"))
    load(runner, IDLE, bad, PAGES)
    driver = _driver(runner)
    for seq, slot in (("b1", BASE_SLOT), ("w", 1), ("bad", IDLE), ("b2", BASE_SLOT)):
        driver.add(seq, prompt, slot)
    first = driver.run()
    assert first == {"b1": base[0], "w": wide[0], "bad": BROKEN, "b2": base[0]}
    driver.end("bad")
    assert driver._free  # the broken sequence's pages are given out again, last come last served
    driver._free = driver._free[-2:] + driver._free[:-2]
    driver.add("after", prompt, BASE_SLOT)
    assert driver.generate(8) == {"b1": base, "w": wide, "b2": base, "after": base}
    load(runner, IDLE, _host(folder, "wide", runner), PAGES)
    assert _alone(runner, prompt, IDLE, Sampling(max_tokens=8, temperature=0)) == wide
    runner.clear(IDLE)


def test_a_cleared_slot_is_an_error_and_the_base_goes_on(runner: Runner, folder: Path) -> None:
    load(runner, IDLE, _host(folder, "small", runner), PAGES)
    runner.clear(IDLE)
    driver = _driver(runner)
    driver.add("x", [5, 6, 7], IDLE)
    with pytest.raises(ValueError, match=f"slot {IDLE} is empty"):
        driver.run()
    driver.end("x")
    driver.add("base", [5, 6, 7])
    assert len(driver.generate(3)["base"]) == 3


def test_reloading_a_slot_replaces_the_adapter(runner: Runner, folder: Path) -> None:
    greedy = Sampling(max_tokens=8, temperature=0)
    prompt = [40, 41, 42, 43]
    for slot, name in enumerate(SLOTS):
        load(runner, IDLE, _host(folder, name, runner), PAGES)
        assert _alone(runner, prompt, IDLE, greedy) == _alone(runner, prompt, slot, greedy)
    runner.clear(IDLE)


def test_logprobs_come_with_the_tokens_that_ask(runner: Runner) -> None:
    driver = _driver(runner)
    driver.add("x", [5, 6, 7], sampling=Sampling(max_tokens=1, temperature=0, logprobs=2))
    driver.add("y", [5, 6, 7], sampling=Sampling(max_tokens=1, temperature=0))
    step = driver.step()
    drawn = runner.run_with_logprobs(step)
    expected = runner.logits(step)["x"].log_softmax(-1)
    assert drawn["x"].logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert [token for token, _ in drawn["x"].top] == expected.topk(2).indices.tolist()
    assert drawn["y"].logprob is None
    assert drawn["x"].token == drawn["y"].token


def test_a_step_without_rows_is_nothing(runner: Runner) -> None:
    assert runner.run(Step(())) == {}


def test_bfloat16_stays_near_float32(folder: Path, runner: Runner) -> None:
    narrow = Runner(
        base_dir=folder / "base",
        dtype="bfloat16",
        slots=1,
        max_rank=16,
        pages=pool_pages(PAGES, 1),
        page_tokens=PAGE_TOKENS,
    )
    load(narrow, 0, _host(folder, "wide", narrow), PAGES)
    wide = _driver(runner)
    other = _driver(narrow)
    wide.add("x", list(range(30, 50)), 1)
    other.add("x", list(range(30, 50)), 0)
    a, b = wide.logits()["x"], other.logits()["x"]
    assert (a - b).abs().max() < 0.1 * a.std()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_cpus_logits(folder: Path, runner: Runner) -> None:
    other = Runner(
        base_dir=folder / "base",
        device="cuda",
        slots=len(SLOTS) + 1,
        max_rank=16,
        pages=pool_pages(PAGES, len(SLOTS) + 1),
        page_tokens=PAGE_TOKENS,
    )
    for slot, name in enumerate(SLOTS):
        load(other, slot, _host(folder, name, other), PAGES)
    ours, theirs = _driver(runner), _driver(other)
    for i in range(12):
        for driver in (ours, theirs):
            driver.add(f"{i}", range(20 + i, 26 + 3 * i), i % (len(SLOTS) + 1) - 1)
    for _ in range(6):
        cpu, cuda = ours.logits(chunk=9), theirs.logits(chunk=9)
        assert set(cpu) == set(cuda)
        for seq, logits in cpu.items():
            torch.testing.assert_close(cuda[seq].cpu(), logits, rtol=0, atol=1e-3)
            for driver in (ours, theirs):
                driver.sequences[seq].tokens.append(int(logits.argmax()))
    drawn = theirs.run()
    assert all(0 <= token < other.config.vocab_size for token in drawn.values())
