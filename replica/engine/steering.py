"""steer: what a request adds to the model's own logits before the draw, row by row.

In this order, for token t with logit z, `n` times in what the row has drawn:

    repetition   z / r if z > 0 else z * r, for t in prompt or drawn
    penalties    z - presence - frequency * n, if n > 0
    bias         z + bias
    min_tokens   -inf for tokens that would end the row, while it has drawn fewer
    grammar      -inf for tokens that it does not allow

A row that asks for none of it is not touched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replica.core.step import Row


def steer(logits: Tensor, rows: Sequence[Row], ends: frozenset[int]) -> frozenset[int]:
    """logits [rows, vocab], in place. Returns the rows whose grammar cannot go on."""
    lost = []
    for i, row in enumerate(rows):
        sampling = row.sampling
        if sampling.penalises:
            _penalise(logits[i], row)
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            logits[i, _ids(tokens, logits)] += torch.tensor(biases, device=logits.device)
        if row.drawn < sampling.min_tokens and (held := sampling.stop_token_ids | ends):
            logits[i, _ids(sorted(held), logits)] = -math.inf
        if row.grammar is not None:
            allowed = row.grammar.allowed(row.output)
            if allowed is None:
                lost.append(i)
            else:
                _keep(logits[i], allowed)
    return frozenset(lost)


def _penalise(z: Tensor, row: Row) -> None:
    sampling = row.sampling
    if sampling.repeats_prompt:
        seen = _ids(sorted({*row.prompt, *row.output}), z)
        r, old = sampling.repetition_penalty, z[seen]
        z[seen] = torch.where(old > 0, old / r, old * r)
    if row.output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(row.output)
        times = torch.tensor(list(counts.values()), device=z.device, dtype=z.dtype)
        fine = times * sampling.frequency_penalty + sampling.presence_penalty
        z[_ids(list(counts), z)] -= fine


def _keep(z: Tensor, allowed: bytes) -> None:
    """-inf for each token whose bit is not set, and for those beyond the last bit."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: z.shape[-1]]
    forbidden = torch.from_numpy(bits == 0).to(z.device)
    z[: len(bits)].masked_fill_(forbidden, -math.inf)
    z[len(bits) :] = -math.inf


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, device=like.device, dtype=torch.long)
