"""The CUDA engine whole, against the reference engine: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, PENDING, Row, Step
from replica.engine.adapter_store import AdapterFolder
from replica.engine.choice import read_for
from replica.engine.flight import StepRunner
from replica.engine.runner import Runner
from replica.engine.weights import load_base, tiny_adapter, tiny_model
from shared.ids import AdapterId

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
PAGES, PAGE_TOKENS, SLOTS, RANK = 24, 16, 2, 20

SLOT = BASE_SLOT if INTERPRETED else 0  # there adapters take long, and one test has them

needs_triton = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in its own process, below"
)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after another."""
    if INTERPRETED:
        from replica.engine.cuda import decode

        monkeypatch.setattr(decode, "_PROGRAMS", 1)


class Pair:
    """The two engines on one base, with the same adapters in the same slots."""

    def __init__(self, folder: Path, *, sizes: Sequence[int] = (48,), **base: Any) -> None:
        """`sizes` of steps with prompts that are padded; the others are launched as they come."""
        from replica.engine.cuda.runner import CudaRunner

        config = tiny_model(folder / "base", **base)
        self.reference = Runner(
            base_dir=folder / "base", slots=SLOTS, max_rank=RANK, pages=3 * PAGES,
            page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        self.ours = CudaRunner(
            weights=load_base(folder / "base", torch.float32, DEVICE),
            slots=SLOTS, max_rank=RANK, pages=3 * PAGES, page_tokens=PAGE_TOKENS, max_running=4,
            max_step_tokens=64, max_model_len=128, graph_sizes=(1, 2, 4),
            mixed_sizes=sizes,
        )  # fmt: skip
        (folder / "adapters").mkdir()
        store = AdapterFolder(folder / "adapters", RANK, config)
        free = list(range(PAGES, 3 * PAGES))
        runners: tuple[StepRunner, ...] = (self.reference, self.ours)
        for slot, rank in enumerate((RANK, 3)):
            tiny_adapter(folder / "adapters" / f"a{slot}", config, seed=slot, r=rank)
            host = store.read(AdapterId(f"a{slot}"))
            for runner in runners:
                pages = [free.pop() for _ in range(runner.pages_of(host))]
                arrival = runner.load(slot, host, pages)
                while arrival is not None and not arrival.query():
                    time.sleep(0.001)

    def check(self, chunk: int, *, adapted: bool, prompt: int = 22, turns: int = 3) -> None:
        """Three sequences, two adapters and none, in chunks; then one leaves and they decode."""
        wide, narrow = (0, 1) if adapted or not INTERPRETED else (BASE_SLOT, BASE_SLOT)
        drivers = [
            Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
            for runner in (self.reference, self.ours)
        ]
        for driver in drivers:
            driver.add("base", range(3, 3 + prompt), BASE_SLOT)
            driver.add("wide", range(5, 13), wide)
            driver.add("narrow", range(90, 93), narrow)
        for turn in range(turns):
            ours, theirs = (driver.logits(chunk) for driver in reversed(drivers))
            assert ours.keys() == theirs.keys()
            for seq, expected in theirs.items():
                torch.testing.assert_close(ours[seq].cpu(), expected, rtol=1e-3, atol=1e-3)
                for driver in drivers:
                    driver.sequences[seq].tokens.append(int(expected.argmax()))
            if turn == 1:
                for driver in drivers:
                    driver.end("narrow")


@needs_triton
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_both_engines_give_the_same_logits(family: str, tmp_path: Path) -> None:
    """Mistral has passed a page before its last chunk, and another when it decodes."""
    window = {"sliding_window": 13} if family == "mistral" else {}
    lengths = {"prompt": 47, "turns": 4} if family == "mistral" else {}
    sizes = () if family == "qwen3" else (48,)
    pair = Pair(tmp_path, family=family, extra=window, layers=1, inner=64, sizes=sizes)
    pair.check(chunk=18, adapted=family == "llama", **lengths)


@needs_triton
def test_heads_that_are_no_power_of_two_and_a_whole_prompt(tmp_path: Path) -> None:
    Pair(tmp_path, heads=3, kv_heads=1, hidden=72, inner=64).check(chunk=40, adapted=False)


@needs_triton
def test_a_step_is_fed_what_the_step_before_drew(tmp_path: Path) -> None:
    pair = Pair(tmp_path, layers=1, inner=64)
    expected = Driver(pair.reference, pages=PAGES, page_tokens=PAGE_TOKENS)
    expected.add("a", range(3, 20), SLOT)
    expected.add("b", range(50, 57), BASE_SLOT)
    texts = expected.generate(6)
    greedy = Sampling(max_tokens=9, temperature=0)

    def rows(drawn: int) -> Step:
        made = []
        for seq, slot, prompt, pages in (
            ("b", BASE_SLOT, tuple(range(50, 57)), (4, 5)),
            ("a", SLOT, tuple(range(3, 20)), (7, 2)),
        ):
            start = 0 if drawn == 0 else len(prompt) + drawn - 1
            tokens = prompt if drawn == 0 else (PENDING,)
            made.append(Row(seq, slot, start, tokens, pages, True, greedy, drawn))
        return Step(tuple(made))

    flights = [pair.ours.launch(rows(drawn)) for drawn in range(2)]
    # What a canary asks while a step is under way changes nothing of what the next is fed.
    pair.ours.logits(Step((Row("canary", BASE_SLOT, 0, (9, 8, 7), (9,), True, greedy, 0),)))
    flights.append(pair.ours.launch(rows(2)))
    collected = [flight.collect() for flight in flights]
    flights = [pair.ours.launch(rows(drawn)) for drawn in range(3, 6)]
    collected += [flight.collect() for flight in flights]
    for seq, text in texts.items():
        assert [drawn[seq].token for drawn in collected] == text


@needs_triton
def test_rows_that_want_more_than_the_likeliest_get_what_the_reference_gives(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path, layers=1, inner=64)
    wishes = {
        "likeliest": Sampling(max_tokens=9, temperature=0),
        "hot": Sampling(max_tokens=9, temperature=0.9, top_p=0.8, seed=5),
        "told": Sampling(max_tokens=9, temperature=0, logprobs=2),
    }
    results = []
    for runner in (pair.reference, pair.ours):
        driver = Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
        for seq, sampling in wishes.items():
            driver.add(seq, range(3, 20), BASE_SLOT, sampling)
        results.append([runner.run_with_logprobs(driver.step())])
    (theirs,), (ours,) = results
    assert {seq: drawn.token for seq, drawn in ours.items()} == {
        seq: drawn.token for seq, drawn in theirs.items()
    }
    assert ours["told"].logprob == pytest.approx(theirs["told"].logprob, abs=1e-3)
    assert ours["hot"].logprob is None


@needs_triton
def test_a_row_of_an_empty_slot_is_an_error_and_never_the_bases_answer(tmp_path: Path) -> None:
    pair = Pair(tmp_path, layers=1, inner=64)
    pair.ours.clear(1)
    driver = Driver(pair.ours, pages=PAGES, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
    driver.add("s", range(3, 9), 1)
    with pytest.raises(ValueError, match="slot 1 is empty"):
        driver.logits()


on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="no stream but one")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("apart", [True, False])
def test_a_load_waits_for_steps_that_name_its_pages_and_for_no_other(
    apart: bool, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, layers=1, inner=64)
    store = AdapterFolder(tmp_path / "adapters", RANK, pair.ours.config)
    host = read_for("cuda", store.read)(AdapterId("a0"))
    assert host.flat.is_pinned(), "the device copies from it while nobody waits"
    driver = Driver(pair.ours, pages=PAGES, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
    driver.add("s", range(3, 40), BASE_SLOT)
    pair.ours.run(driver.step())  # what is compiled is compiled
    step = driver.step()
    named = [page for row in step.rows for page in row.pages]
    count = pair.ours.pages_of(host)
    free = [page for page in range(PAGES) if page not in named]
    pages = free[:count] if apart else [*named[:1], *free[: count - 1]]
    pair.ours.clear(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    flight = pair.ours.launch(step)
    arrival = pair.ours.load(1, host, pages)
    assert arrival is not None
    time.sleep(0.15)
    assert not flight.landed(), "the step is still under way"
    assert arrival.query() == apart
    flight.collect()
    torch.cuda.synchronize()
    assert arrival.query()
    for runner, slot in ((pair.reference, 0), (pair.ours, 1)):
        own = Driver(runner, pages=PAGES, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
        own._free = [page for page in own._free if page not in pages]
        own.add("s", range(5, 25), slot)
        if runner is pair.reference:
            expected = own.logits()["s"]
        else:
            ours = own.logits()["s"].cpu()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the process it starts")
def test_the_engine_equals_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-n0", "--no-header"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "7 passed" in done.stdout, done.stdout[-300:]
