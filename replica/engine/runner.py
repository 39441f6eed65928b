"""Runner: a Step in, one token a sampling row out.

Law: a row's logits depend on its own tokens and its own adapter; its draw on these, its sampling
and its place in its sequence. Neighbours, idle slots and what pages held before change nothing.
Belongs to one thread, as do `load` and `clear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from replica.core.segments import segments
from replica.core.step import Row, Step
from replica.engine import kernels
from replica.engine.arena import Arena
from replica.engine.attention import AttentionPlan
from replica.engine.flight import Landed
from replica.engine.host_adapter import HostAdapter
from replica.engine.model import Batch, Model
from replica.engine.quantised import Quantization
from replica.engine.sampler import BROKEN, NO_TOKEN, Drawn, draw, score
from replica.engine.weights import ModelConfig, load_base, torch_dtype

__all__ = ["BROKEN", "NO_TOKEN", "Drawn", "Runner"]

_SCORED_AT_ONCE: Final = 64
"""Rows of logits that are held at once for scores: 33 MB of a vocabulary of 128 k."""


class Runner:
    overlaps: Final = False

    def __init__(
        self,
        *,
        base_dir: Path,
        device: str = "cpu",
        dtype: str = "float32",
        slots: int,
        max_rank: int,
        pages: int,
        page_tokens: int = 16,
        threads: int = 0,
        merged: HostAdapter | None = None,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        """`threads` of one forward pass on a CPU; 0 leaves torch's own choice. Raises BadBase.

        `merged` is folded into the base: rows without adapter then are that adapter's.
        """
        if threads > 0:
            torch.set_num_threads(threads)
        weights = load_base(
            base_dir,
            torch_dtype(dtype),
            device,
            merged=merged,
            quantization=quantization,
            packed=True,
        )
        self.config: ModelConfig = weights.config
        self._model = Model(weights)
        self._arena = Arena(
            config=weights.config,
            pages=pages,
            page_tokens=page_tokens,
            slots=slots,
            max_rank=max_rank,
            dtype=torch_dtype(dtype),
            device=torch.device(device),
        )

    def pages_of(self, adapter: HostAdapter) -> int:
        """How many pages `load` wants for it."""
        return self._arena.pages_of(adapter)

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int]) -> None:
        """Put an adapter into pages it owns and name them in a slot, replacing what was there."""
        self._arena.place(slot, adapter, pages)

    def clear(self, slot: int) -> None:
        """Empty a slot. A row that names it afterwards is an error, never the base's answer."""
        self._arena.clear(slot)

    def run(self, step: Step) -> dict[str, int]:
        """Sequence id to token, for rows that sample. `BROKEN` (-1) is a row whose logits are not
        finite or whose grammar gave up: that sequence must end with an error; its neighbours are
        untouched."""
        return {seq: drawn.token for seq, drawn in self.run_with_logprobs(step).items()}

    def launch(self, step: Step) -> Landed:
        """Run the step, and have its results ready."""
        return Landed(self.run_with_logprobs(step))

    def run_with_logprobs(self, step: Step) -> dict[str, Drawn]:
        """The same with log-probabilities where `sampling.logprobs` asks for them.

        A row that has `targets` is there too, with their scores; its token is `NO_TOKEN` unless it
        samples.
        """
        if not step.rows:
            return {}
        sampling = [row for row in step.rows if row.samples]
        with torch.inference_mode():
            h, last = self._forward(step)
            scored = {row.seq: self._score(row, h[at:]) for at, row in step.scoring()}
            tokens = draw(self._model.logits(h[last]), sampling, self.config.eos_token_ids)
        drawn = dict(zip((row.seq for row in sampling), tokens, strict=True))
        for seq, prompt in scored.items():
            drawn[seq] = replace(drawn.get(seq, Drawn(NO_TOKEN)), prompt=prompt)
        return drawn

    def logits(self, step: Step) -> dict[str, Tensor]:
        """Sequence id to logits [vocab] in float32, for rows that sample; draws nothing."""
        with torch.inference_mode():
            h, last = self._forward(step)
            rows = self._model.logits(h[last])
        return dict(zip((row.seq for row in step.rows if row.samples), rows, strict=True))

    def hidden(self, row: Row) -> Tensor:
        """Hidden states [tokens, hidden] of one row; `head` makes logits of any of them."""
        with torch.inference_mode():
            return self._forward(Step((row,)))[0]

    def head(self, h: Tensor) -> Tensor:
        """Logits [n, vocab] in float32 of hidden states [n, hidden]."""
        with torch.inference_mode():
            return self._model.logits(h)

    def _score(self, row: Row, h: Tensor) -> tuple[Drawn, ...]:
        """The row's targets, from its hidden states on; a few rows of logits at a time."""
        scored: list[Drawn] = []
        for at in range(0, len(row.targets), _SCORED_AT_ONCE):
            some = row.targets[at : at + _SCORED_AT_ONCE]
            logits = self._model.logits(h[at : at + len(some)])
            scored += score(logits, some, row.sampling.logprobs or 0)
        return tuple(scored)

    def _forward(self, step: Step) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, and the places that sample."""
        batch = self._batch(step.rows, kernels.plan(segments(step), self._arena))
        self._arena.enter(batch.attention.entered)
        return self._model.forward(batch, self._arena.kv), batch.last

    def _batch(self, rows: Sequence[Row], adapters: kernels.GatheredPlan | None) -> Batch:
        device = self._arena.device
        ids = [token for row in rows for token in row.tokens]
        positions = [position for row in rows for position in range(row.start, row.end)]
        ends, last = 0, []
        for row in rows:
            ends += len(row.tokens)
            if row.samples:
                last.append(ends - 1)
        return Batch(
            ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            attention=AttentionPlan.of(rows, self._arena),
            adapters=adapters,
            last=torch.tensor(last, dtype=torch.long, device=device),
        )
