"""Dice: tokens of rows with a temperature, drawn on the device without a word to the host.

The law is `engine.sampler`'s: temperature, min-p, top-k, top-p, and one draw by the row's own
number u in [0, 1), which is a hash of its seed and of how many tokens it has drawn. Whatever cuts
the vocabulary needs it sorted; where all rows that do have a top-k, only so many are. The host
never waits for the device here, as the sampler it mirrors does when it looks at few tokens first
and wants to know whether they were enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from replica.core.step import Row
from replica.engine.sampler import invert, uniform

_TOP_MAX: Final = 1024
"""Beyond it a sort of everything is as fast as finding the likeliest."""


def is_free(row: Row) -> bool:
    """Whether its draw depends on its own logits alone, and nothing is asked about them."""
    sampling = row.sampling
    return (
        sampling.logprobs is None
        and row.grammar is None
        and not sampling.logit_bias
        and row.drawn >= sampling.min_tokens
        and not sampling.penalises
    )


def throw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """logits [rows, vocab] float32, of free rows with a temperature; tokens [rows] int32. A row
    whose logits are not finite gets some token: who asks has to know that it is broken."""
    vocab = logits.shape[-1]
    wishes = [
        (
            row.sampling.temperature,
            uniform(row.seq if row.sampling.seed is None else row.sampling.seed, row.drawn),
            row.sampling.min_p,
            row.sampling.top_p,
            row.sampling.top_k if row.sampling.top_k > 0 else vocab,
        )
        for row in rows
    ]
    told = _sent(torch.tensor(wishes, dtype=torch.float64), logits.device)
    temperature, u, min_p, top_p, top_k = told[:, :, None].unbind(1)
    z = logits.nan_to_num(0.0, 0.0, 0.0).double() / temperature
    cuts = [least > 0 or share < 1 or limit < vocab for _, _, least, share, limit in wishes]
    if not any(cuts):
        return invert(torch.softmax(z, dim=-1), u).int()
    limits = [int(limit) for cut, (*_, limit) in zip(cuts, wishes, strict=True) if cut]
    width = max(limits) if max(limits) <= _TOP_MAX else vocab
    best, ids = (
        z.topk(width, dim=-1) if width < vocab else z.sort(dim=-1, descending=True, stable=True)
    )
    weights = torch.exp(best - best[:, :1])
    among = torch.arange(width, device=z.device) < top_k
    weights = torch.where((weights >= min_p) & among, weights, 0)
    before = weights.cumsum(-1) - weights
    kept = before < top_p * weights.sum(-1, keepdim=True)
    kept[:, 0] = True
    cut = ids.gather(-1, invert(torch.where(kept, weights, 0), u)[:, None])[:, 0]
    if all(cuts):
        return cut.int()
    plain = invert(torch.softmax(z, dim=-1), u)
    return torch.where(_sent(torch.tensor(cuts), logits.device), cut, plain).int()


def _sent(told: Tensor, device: torch.device) -> Tensor:
    """On its way to the device."""
    return told.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else told
