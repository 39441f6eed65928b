"""A real Mistral whose pages are given back as its window moves on, against the same engine that
keeps them all, and against transformers. Texts are longer than the whole pool.

While a step runs every page that none of its tables holds is poison: what a window has passed is
read by nobody, whether it is another's by then, or cached, or free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replica.core.adapter_cache import AdapterCache
from replica.core.pages import RELEASED, PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Sampling
from replica.core.sequence import Sequence as Request
from replica.core.step import Step
from replica.engine.runner import Runner
from replica.engine.sampler import NO_TOKEN, Drawn
from replica.engine.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about itself

WINDOW, PAGE, STEP, KEPT = 16, 4, 12, 200
SPAN = 8  # pages: of 12 tokens and the 15 before them
TOLERANCE = 1e-4

Reference = Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    config = tiny_model(path, seed=3, family="mistral", layers=3)
    assert config.window == WINDOW
    return path


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return Runner(base_dir=folder, slots=0, max_rank=1, pages=KEPT, page_tokens=PAGE, threads=1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Log-probabilities [tokens, vocab] after each token of a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def scores(tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return scores


@dataclass
class Engine:
    """Scheduler and runner, and what was scored on the way."""

    runner: Runner
    pages: int
    window: int | None = WINDOW
    drawn: dict[str, list[float]] = field(default_factory=dict)
    prompts: dict[str, list[float]] = field(default_factory=dict)
    released: int = 0  # places in the tables of all steps

    def __post_init__(self) -> None:
        self.pool = PagePool(pages=self.pages, page_tokens=PAGE, window=self.window)
        self.scheduler = Scheduler(
            pool=self.pool,
            cache=AdapterCache(slots=1, host_max=1, pool=self.pool, pages_max=0),
            max_running=4,
            max_step_tokens=STEP,
            eos_ids=frozenset(),
            max_model_len=512,
        )
        self.requests: list[Request] = []

    def add(self, prompt: Sequence[int], tokens: int, *, scored: bool = False) -> Request:
        sampling = Sampling(tokens, temperature=0.0, logprobs=0, prompt_logprobs=scored)
        request = Request(f"{len(self.requests)}", None, tuple(prompt), sampling, 0.0)
        self.scheduler.add(request, 0.0)
        self.requests.append(request)
        return request

    def until_all_end(self) -> None:
        for _ in range(2000):
            step = self.scheduler.plan(0.0)
            if step is None:
                break
            drawn = self._run(step)
            tokens = {seq: each.token for seq, each in drawn.items() if each.token != NO_TOKEN}
            self.scheduler.commit(step, tokens, 0.0)
            self.scheduler.check()
            for seq, each in drawn.items():
                if each.logprob is not None and each.token != NO_TOKEN:
                    self.drawn.setdefault(seq, []).append(each.logprob)
                self.prompts.setdefault(seq, []).extend(
                    one.logprob for one in each.prompt if one.logprob is not None
                )
        assert all(request.finish is not None for request in self.requests)
        assert self.pool.available == self.pages

    def _run(self, step: Step) -> dict[str, Drawn]:
        self.released += sum(row.pages.count(RELEASED) for row in step.rows)
        held = {page for row in step.rows for page in row.pages} - {RELEASED}
        others = [page for page in range(self.pages) if page not in held]
        kv = self.runner._arena.kv
        before = kv[others].clone()
        kv[others] = math.nan
        drawn = self.runner.run_with_logprobs(step)
        assert kv[others].isnan().all(), "written to a page that no table holds"
        kv[others] = before
        return drawn


def _text(seed: int, tokens: int) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(3, 265, (tokens,), generator=dice).tolist()


def _hold(engine: Engine, reference: Reference) -> None:
    for request in engine.requests:
        scores = reference(request.tokens)[len(request.prompt) - 1 : -1]
        assert request.output == scores.argmax(-1).tolist()
        likeliest = scores.max(-1).values
        torch.testing.assert_close(
            torch.tensor(engine.drawn[request.id]), likeliest, rtol=0, atol=TOLERANCE
        )


def _ask(engine: Engine) -> None:
    """A prompt that two share, others that begin as it does, and one that is none of theirs."""
    shared = _text(0, 150)
    for ending in ([], [], _text(1, 3), _text(2, 40)):
        engine.add([*shared, *ending], 30)
    engine.add(_text(3, 90), 60)
    engine.add(shared[:70], 10)


def test_a_window_gives_back_pages_and_changes_no_token(
    runner: Runner, reference: Reference
) -> None:
    keeping = Engine(runner, KEPT, window=None)
    _ask(keeping)
    keeping.until_all_end()
    assert keeping.released == 0
    _hold(keeping, reference)
    for pages, tight in ((4 * SPAN, False), (SPAN + 3, True)):
        engine = Engine(runner, pages)
        _ask(engine)
        engine.until_all_end()
        assert pages * PAGE < len(engine.requests[0].prompt), "it is longer than the pool"
        assert engine.released > 0
        assert (sum(request.preemptions for request in engine.requests) > 0) == tight
        assert max(request.cached for request in engine.requests) >= 148
        assert [r.output for r in engine.requests] == [r.output for r in keeping.requests]
        _hold(engine, reference)


def test_a_text_is_found_again_by_its_window_and_goes_on(
    runner: Runner, reference: Reference
) -> None:
    engine = Engine(runner, 2 * SPAN)
    first = engine.add(_text(4, 100), 20)
    engine.until_all_end()
    more = engine.add([*first.tokens, *_text(5, 9)], 20)
    engine.until_all_end()
    assert more.cached == 116, "all full pages before the last token that was computed"
    _hold(engine, reference)


def test_a_prompt_longer_than_the_pool_is_scored(runner: Runner, reference: Reference) -> None:
    engine = Engine(runner, SPAN)
    prompt = _text(6, 130)
    request = engine.add(prompt, 2, scored=True)
    engine.until_all_end()
    expected = reference(prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    ours = torch.tensor(engine.prompts[request.id])
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    _hold(engine, reference)
