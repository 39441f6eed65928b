"""CudaRunner: steps on a GPU, one under way while the next is planned.

    flight = runner.launch(step)     queues the whole step and returns
    flight.collect()                 waits for its tokens

Law: as `engine.runner`'s, within the rounding of the engine's dtype. A token that a step draws is
fed to the next on the device, so rows may carry PENDING for what the last launched step draws. A
step of single tokens is one graph, and so is one with prompts unless it has more tokens than the
largest of these: that is launched kernel by kernel, which takes the host less time than so many
tokens take the device. All is on one stream but loads (`loader.py`): pages and slots that the
scheduler gives to others while a step is under way are written after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from replica.core.step import BASE_SLOT, PENDING, Row, Step
from replica.engine.arena import Arena
from replica.engine.cuda import feed
from replica.engine.cuda.adapters import Adapters, Mix
from replica.engine.cuda.dice import is_free, throw
from replica.engine.cuda.flight import Flight
from replica.engine.cuda.graphs import Graphs
from replica.engine.cuda.greedy import greedy
from replica.engine.cuda.loader import Loader
from replica.engine.cuda.mixed import SIZES, Mixed
from replica.engine.cuda.model import Batch, CudaModel
from replica.engine.cuda.places import Places
from replica.engine.cuda.prefill import tokens_a_block
from replica.engine.cuda.seats import Seats
from replica.engine.cuda.staging import Staging
from replica.engine.flight import Arrival
from replica.engine.host_adapter import HostAdapter
from replica.engine.sampler import NO_TOKEN, Drawn, draw, score
from replica.engine.weights import BaseWeights

GRAPH_SIZES: Final = (1, 2, 4, *range(8, 257, 8))
_MULTIPLE: Final = 16
_SCORED_AT_ONCE: Final = 64


class CudaRunner:
    overlaps: Final = True

    def __init__(
        self,
        *,
        weights: BaseWeights,
        slots: int,
        max_rank: int,
        pages: int,
        page_tokens: int,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        mixed_sizes: Sequence[int] = SIZES,
    ) -> None:
        """`max_running` rows and `max_step_tokens` tokens a step, `max_model_len` tokens a
        sequence; graphs are of so many rows, or tokens where prompts are among them. On a CPU
        (Triton's interpreter) nothing is captured."""
        self.config = config = weights.config
        device, dtype = weights.embed.device, weights.embed.dtype
        self._on_gpu = device.type == "cuda"
        self._model = CudaModel(weights, positions=max_model_len)
        self.arena = Arena(
            config=config, pages=pages, page_tokens=page_tokens, slots=slots, max_rank=max_rank,
            dtype=dtype, device=device,
        )  # fmt: skip
        self._loader = Loader(self.arena)
        self._adapters = Adapters(self.arena, max_rank) if slots else None
        seats, width = 2 * max_running, -(-max_model_len // page_tokens)
        self._seats = Seats(seats=seats, pages=width, zero_page=pages)
        self._staging = Staging(capacity=6 * (max_step_tokens + _MULTIPLE), device=device)
        self._tables = torch.full((seats, width), pages, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(_wide(max_running), dtype=torch.int32, device=device)
        self._logits = torch.empty(_wide(max_running), config.vocab_size, device=device)
        self._order = torch.arange(max_running, dtype=torch.int32, device=device)
        self._drawn_at: dict[str, int] = {}
        self._inputs = torch.zeros(
            feed.COLUMNS * (max_running + 3), dtype=torch.int32, device=device
        )
        self._landing = [
            torch.empty(max_running, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(4)
        ]
        self._landings = 0
        self._block = tokens_a_block(config.num_heads, config.num_kv_heads)
        self._mixed = Mixed(
            sizes=mixed_sizes, max_running=max_running, max_step_tokens=max_step_tokens,
            block=self._block, device=device,
        )  # fmt: skip
        self._under_way: deque[tuple[torch.cuda.Event, Step]] = deque()
        self._graphs = Graphs({min(size, max_running) for size in graph_sizes}, self._decode)
        self._mixed_graphs = Graphs(self._mixed.sizes, self._prefill)
        if self._on_gpu:
            self._capture(bool(slots))

    def pages_of(self, adapter: HostAdapter) -> int:
        """How many pages `load` wants for it."""
        return self.arena.pages_of(adapter)

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int]) -> Arrival | None:
        """Begin to put an adapter into pages it owns and name them in a slot."""
        self._forget()
        named = {page for _, step in self._under_way for row in step.rows for page in row.pages}
        with torch.inference_mode(), self._here():
            return self._loader.load(slot, adapter, pages, named)

    def clear(self, slot: int) -> None:
        """Empty a slot. A row that names it afterwards is the scheduler's error."""
        with torch.inference_mode(), self._here():
            self.arena.clear(slot)

    def launch(self, step: Step) -> Flight:
        """Queue the step. It waits for the device only where rows are steered, or told of."""
        sampling = [row for row in step.rows if row.samples]
        with torch.inference_mode(), self._here():
            h = self._start(step.rows, sampling)
            known = {}
            if h is not None:
                known = {row.seq: self._score(row, h[at:]) for at, row in step.scoring()}
            self._draw(sampling, known)
            tokens, arrived = self._land(len(sampling))
        self._forget()
        if arrived is not None:
            self._under_way.append((arrived, step))
        self._drawn_at = {row.seq: at for at, row in enumerate(sampling)}
        return Flight([row.seq for row in sampling], tokens, arrived, known)

    def run_with_logprobs(self, step: Step) -> dict[str, Drawn]:
        return self.launch(step).collect() if step.rows else {}

    def run(self, step: Step) -> dict[str, int]:
        return {seq: drawn.token for seq, drawn in self.run_with_logprobs(step).items()}

    def logits(self, step: Step) -> dict[str, Tensor]:
        """Sequence id to logits [vocab] in float32, for rows that sample; draws nothing.

        A step may be under way: what it drew is still to be fed to the next, and stays.
        """
        sampling = [row for row in step.rows if row.samples]
        with torch.inference_mode(), self._here():
            drawn = self._drawn.clone()
            self._start(step.rows, sampling)
            self._drawn.copy_(drawn)
            rows = self._logits[: len(sampling)].clone()
        return dict(zip((row.seq for row in sampling), rows, strict=True))

    def _capture(self, adapters: bool) -> None:
        """The largest first, which are those with prompts; all share scratch memory, for one runs
        at a time."""
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), self._here():
            self._mixed_graphs.capture((Mix.NONE, Mix.SHARED)[: 1 + adapters], pool)
            self._graphs.capture(tuple(Mix) if adapters else (Mix.NONE,), pool)

    def _forget(self) -> None:
        """Steps that are over."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()

    def _here(self) -> AbstractContextManager[Any]:
        """Kernels and events go to the current device, which each thread has its own of."""
        return torch.cuda.device(self.arena.device) if self._on_gpu else nullcontext()

    def _start(self, rows: Sequence[Row], sampling: Sequence[Row]) -> Tensor | None:
        """Everything up to the likeliest tokens, in `_logits` and `_drawn`. Hidden states of all
        tokens, where there are more than the sampling rows'."""
        self.arena.require({row.slot for row in rows} - {BASE_SLOT})
        seats, places, pages = self._seats.take(rows)
        if places:
            at, page = self._staging.lists(places, pages)
            self._tables.view(-1).index_copy_(0, at.long(), page)
        mix = Mix.of(rows)
        decodes = len(sampling) == len(rows) and all(len(row.tokens) == 1 for row in rows)
        size = self._graphs.size_for(len(rows)) if decodes else None
        if size is not None:
            columns = feed.decoding(rows, seats, self._drawn_at, _wide(size))
            self._staging.send(columns, self._columns(size))
            self._graphs.replay(size, mix)
            return None
        tokens = sum(len(row.tokens) for row in rows)
        size = self._mixed_graphs.size_for(tokens + 1)
        packed = None if size is None else self._mixed.pack(size, rows, seats, self._drawn_at)
        if size is None or packed is None:
            return self._launched(rows, seats, mix, -(-tokens // _MULTIPLE) * _MULTIPLE)
        self._staging.send(packed, self._mixed.buffer(size))
        self._mixed_graphs.replay(size, Mix.NONE if mix is Mix.NONE else Mix.SHARED)
        return None

    def _columns(self, rows: int) -> Tensor:
        """Where the inputs of a graph of so many rows lie: [columns, rows, made wide]."""
        return self._inputs[: feed.COLUMNS * _wide(rows)].view(feed.COLUMNS, -1)

    def _decode(self, rows: int, mix: Mix) -> None:
        """One token each of `rows` rows: what is captured."""
        columns = self._columns(rows)[:, :rows]
        h = self._forward(columns, mix, self._order[:rows], None, kept=True)
        greedy(self._model.logits(h, self._logits[:rows]), self._drawn[:rows])

    def _prefill(self, tokens: int, mix: Mix) -> None:
        """Prompts too: what is captured of steps that have any."""
        columns, singles, *blocks, last = self._mixed.inputs(tokens)
        h = self._forward(columns, mix, singles, (blocks[0], blocks[1]), kept=True)
        n = len(last)
        greedy(self._model.logits(h[last], self._logits[:n]), self._drawn[:n])

    def _launched(self, rows: Sequence[Row], seats: Sequence[int], mix: Mix, width: int) -> Tensor:
        """The same kernel by kernel, for so many tokens and padding."""
        columns = self._staging.send(feed.mixed(rows, seats, self._drawn_at, width))
        work = feed.work(rows, self._block, width)
        single, firsts, counts, last = self._staging.lists(*work)
        h = self._forward(
            columns,
            mix,
            single if len(single) else None,
            (firsts, counts) if len(firsts) else None,
            kept=False,
        )
        n = len(last)
        if n:
            greedy(self._model.logits(h[last], self._logits[:n]), self._drawn[:n])
        return h

    def _forward(
        self,
        columns: Tensor,
        mix: Mix,
        single: Tensor | None,
        blocks: tuple[Tensor, Tensor] | None,
        *,
        kept: bool,
    ) -> Tensor:
        ids, sources, positions, seats, slots = columns
        fed = self._drawn.index_select(0, sources)
        ids = torch.where(ids == PENDING, fed, ids).clamp_(min=0)  # a broken row's is -1 too
        adapters = None
        if self._adapters is not None:
            adapters = self._adapters.plan(slots, mix, kept=kept)
        places = Places(self._tables, seats, positions)
        batch = Batch(ids, places, single, blocks, adapters)
        return self._model.forward(batch, self.arena.kv)

    def _draw(self, sampling: Sequence[Row], known: dict[str, Drawn]) -> None:
        """Draw for rows that want something else than the likeliest token."""
        hot = [i for i, row in enumerate(sampling) if is_free(row) and row.sampling.temperature > 0]
        if hot:
            (places,) = self._staging.lists(hot)
            index = places.long()
            likeliest = self._drawn[index]
            tokens = throw(self._logits[index], [sampling[i] for i in hot])
            broken = likeliest < 0
            self._drawn.index_copy_(0, index, torch.where(broken, likeliest, tokens))
        at = [i for i, row in enumerate(sampling) if not is_free(row)]
        if at:
            self._steer(at, sampling, known)

    def _steer(self, at: Sequence[int], sampling: Sequence[Row], known: dict[str, Drawn]) -> None:
        """The same for rows whose logits the host changes or tells of: it waits for them."""
        index = torch.tensor(at, device=self._drawn.device)
        rows = [sampling[i] for i in at]
        drawn = draw(self._logits[index], rows, self.config.eos_token_ids)
        tokens = torch.tensor([each.token for each in drawn], dtype=torch.int32)
        self._drawn[index] = tokens.to(self._drawn.device)
        for row, each in zip(rows, drawn, strict=True):
            known[row.seq] = replace(each, prompt=known[row.seq].prompt if row.seq in known else ())

    def _score(self, row: Row, h: Tensor) -> Drawn:
        """The row's targets, from its hidden states on; a few rows of logits at a time."""
        scored: list[Drawn] = []
        for at in range(0, len(row.targets), _SCORED_AT_ONCE):
            some = row.targets[at : at + _SCORED_AT_ONCE]
            logits = self._model.logits(h[at : at + len(some)])
            scored += score(logits, some, row.sampling.logprobs or 0)
        return Drawn(NO_TOKEN, prompt=tuple(scored))

    def _land(self, rows: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """The tokens on their way to the host."""
        self._landings += 1
        landing = self._landing[self._landings % len(self._landing)][:rows]
        landing.copy_(self._drawn[:rows], non_blocking=True)
        if not self._on_gpu:
            return landing, None
        arrived = torch.cuda.Event()
        arrived.record()
        return landing, arrived


def _wide(rows: int) -> int:
    """Columns lie where wide loads may begin."""
    return -(-rows // 4) * 4
