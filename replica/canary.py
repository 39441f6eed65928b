"""Canary: a newcomer's first forward pass, on a prompt that is nobody's.

Law: a version that passes gave finite logits, and others than the base's, beside the base in one
batch on this very engine; one that fails never answers a request. Each version is tried once: what
it computes does not depend on its name. Runs on the engine thread, between two steps, and takes as
long as a step of sixteen tokens.
"""

from __future__ import annotations

from typing import Final

import torch

from replica.core.pages import PagePool
from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row, Step
from replica.engine.bad_adapter import BadAdapter
from replica.engine.flight import StepRunner

_TOKENS: Final = 8
_KEPT_MAX: Final = 100_000
_SAMPLING: Final = Sampling(max_tokens=1, temperature=0)


class Canary:
    def __init__(self, *, runner: StepRunner, pool: PagePool) -> None:
        self._runner = runner
        self._pool = pool
        vocabulary = runner.config.vocab_size
        step = max(vocabulary // (_TOKENS + 1), 1)
        self._prompt = tuple(at * step % vocabulary for at in range(1, _TOKENS + 1))
        self._passed: dict[str, None] = {}  # digests, oldest first

    def has_passed(self, digest: str) -> bool:
        return digest in self._passed

    def fly(self, slot: int, digest: str) -> bool:
        """Whether it was tried by now: with every page in use it is not. Raises BadAdapter."""
        if digest in self._passed:
            return True
        pages = self._pool.allocate(2 * self._pool.pages_for(_TOKENS))
        if pages is None:
            return False
        try:
            self._try(slot, tuple(pages))
        finally:
            self._pool.free(pages)
        self._passed[digest] = None
        if len(self._passed) > _KEPT_MAX:
            del self._passed[next(iter(self._passed))]
        return True

    def _try(self, slot: int, pages: tuple[int, ...]) -> None:
        half = len(pages) // 2
        rows = (
            self._row("canary base", BASE_SLOT, pages[:half]),
            self._row("canary", slot, pages[half:]),
        )
        logits = self._runner.logits(Step(rows))
        base, adapted = logits["canary base"], logits["canary"]
        if not bool(torch.isfinite(adapted).all()):
            raise BadAdapter(
                "canary_not_finite",
                "its answer to a short prompt is NaN or infinite on this engine: the weights are "
                "too large for its dtype, or the training diverged; use an earlier checkpoint",
            )
        if torch.equal(base, adapted):
            raise BadAdapter(
                "canary_no_effect",
                "its answer to a short prompt is the base's, to the last bit: the adapter was not "
                "trained, or not for this base",
            )

    def _row(self, seq: str, slot: int, pages: tuple[int, ...]) -> Row:
        return Row(seq, slot, 0, self._prompt, pages, True, _SAMPLING, 0)
