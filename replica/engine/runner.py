"""Runner: a Step in, one token a sampling row out.

Law: a row's logits depend on its own tokens and its own adapter; its draw on these, its sampling
and its place in its sequence. Neighbours, idle slots and what pages held before change nothing.
Belongs to one thread, as do `load` and `clear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from replica.core.pages import PagePool
from replica.core.segments import segments
from replica.core.step import Row, Step
from replica.engine import kernels
from replica.engine.arena import Arena
from replica.engine.attention import AttentionPlan
from replica.engine.host_adapter import HostAdapter
from replica.engine.model import Batch, Model
from replica.engine.sampler import BROKEN, Drawn, draw
from replica.engine.weights import ModelConfig, load_base, torch_dtype

__all__ = ["BROKEN", "Drawn", "Runner"]


class Runner:
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
    ) -> None:
        """`threads` of one forward pass on a CPU; 0 leaves torch's own choice. Raises BadBase."""
        if threads > 0:
            torch.set_num_threads(threads)
        weights = load_base(base_dir, torch_dtype(dtype), device)
        self.config: ModelConfig = weights.config
        self._model = Model(weights)
        self._spare = PagePool(pages=pages * 2, page_tokens=page_tokens)
        self._owned: dict[int, list[int]] = {}
        self._pages = pages
        self._arena = Arena(
            config=weights.config,
            pages=pages * 3,
            page_tokens=page_tokens,
            slots=slots,
            max_rank=max_rank,
            dtype=torch_dtype(dtype),
            device=torch.device(device),
        )

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int] | None = None) -> None:
        """Put an adapter into pages it owns and name them in a slot, replacing what was there."""
        if pages is None:
            self.clear(slot)
            taken = self._spare.allocate(self._arena.pages_of(adapter))
            assert taken is not None
            self._owned[slot] = taken
            pages = [page + self._pages for page in taken]
        self._arena.place(slot, adapter, pages)

    def clear(self, slot: int) -> None:
        """Empty a slot. A row that names it afterwards is an error, never the base's answer."""
        self._arena.clear(slot)
        self._spare.free(self._owned.pop(slot, []))

    def run(self, step: Step) -> dict[str, int]:
        """Sequence id to token, for rows that sample. `BROKEN` (-1) is a row whose logits are not
        finite or whose grammar gave up: that sequence must end with an error; its neighbours are
        untouched."""
        return {seq: drawn.token for seq, drawn in self.run_with_logprobs(step).items()}

    def run_with_logprobs(self, step: Step) -> dict[str, Drawn]:
        """The same with log-probabilities where `sampling.logprobs` asks for them."""
        if not step.rows:
            return {}
        sampling = [row for row in step.rows if row.samples]
        with torch.inference_mode():
            drawn = draw(self._forward(step), sampling, self.config.eos_token_ids)
        return dict(zip((row.seq for row in sampling), drawn, strict=True))

    def logits(self, step: Step) -> dict[str, Tensor]:
        """Sequence id to logits [vocab] in float32, for rows that sample; draws nothing."""
        with torch.inference_mode():
            rows = self._forward(step)
        return dict(zip((row.seq for row in step.rows if row.samples), rows, strict=True))

    def _forward(self, step: Step) -> Tensor:
        batch = self._batch(step.rows, kernels.plan(segments(step), self._arena))
        self._arena.enter(batch.attention.entered)
        return self._model.forward(batch, self._arena.kv)

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
