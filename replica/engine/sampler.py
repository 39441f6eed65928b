"""draw: logits to one token a row, each by its own sampling and its own dice.

In this order: what `steering.py` does to the logits, then greedy if the temperature is 0 (argmax,
ties to the lowest id), else temperature, min-p, top-k, top-p, and one draw from what is left.

The dice are one uniform number in [0, 1), a hash of the row's seed and of how many tokens it has
drawn: the same request gives the same text whatever runs beside it, also after preemption. A row
without seed takes its sequence's id for one.

A row whose logits are not all finite, or whose grammar gave up, gives `BROKEN`: it ends that
request and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from replica.core.step import Row
from replica.engine.steering import steer

BROKEN: Final = -1
"""In place of a token: this row's logits were NaN or infinite, or its grammar gave up."""

NO_TOKEN: Final = -2
"""In place of a token: this row drew none, it only scored a part of its prompt."""

_NUCLEUS: Final = 256
"""Candidates sorted at first; the few rows that need more are sorted whole."""


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprob: float | None = None  # None: not asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first
    prompt: tuple[Drawn, ...] = ()  # its row's `targets`, scored


def draw(logits: Tensor, rows: Sequence[Row], ends: frozenset[int] = frozenset()) -> list[Drawn]:
    """logits [rows, vocab] in float32, changed in place. One result a row.

    `ends` are the base's own end tokens, which `min_tokens` holds back.
    """
    if not rows:
        return []
    finite = torch.isfinite(logits.sum(dim=-1)).tolist()  # a sum is finite only if all terms are
    logprobs = {
        i: torch.log_softmax(logits[i], dim=-1)  # of the model itself, before any steering
        for i, row in enumerate(rows)
        if row.sampling.logprobs is not None
    }
    lost = steer(logits, rows, ends)
    tokens = _likeliest(logits)
    hot = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and finite[i]]
    if hot:
        tokens[torch.tensor(hot, device=logits.device)] = _sample(logits, rows, hot)
    return [
        _describe(token, row, logprobs.get(i)) if ok and i not in lost else Drawn(BROKEN)
        for i, (row, token, ok) in enumerate(zip(rows, tokens.tolist(), finite, strict=True))
    ]


def _likeliest(logits: Tensor) -> Tensor:
    """Tokens [rows], int64. On a CPU by numpy, whose argmax of long rows is ten times as quick."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def score(logits: Tensor, targets: Sequence[int], top: int) -> list[Drawn]:
    """logits [n, vocab] at the places before these n tokens: what the model gave for each."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(-1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    rows = zip(targets, own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [Drawn(token, at, tuple(zip(best, of, strict=True))) for token, at, best, of in rows]


def uniform(seed: int | str, drawn: int) -> float:
    """The dice of one position: in [0, 1), 53 bits of a hash."""
    key = hashlib.blake2b(f"{seed}/{drawn}".encode(), digest_size=8).digest()
    return (int.from_bytes(key, "little") >> 11) / (1 << 53)


def _sample(logits: Tensor, rows: Sequence[Row], hot: Sequence[int]) -> Tensor:
    """Tokens [len(hot)], int64."""
    picked = [rows[i] for i in hot]
    device = logits.device
    z = logits[torch.tensor(hot, device=device)].double()
    z = z / _column([row.sampling.temperature for row in picked], device)
    seeds = [row.sampling.seed for row in picked]
    dice = [
        uniform(row.seq if seed is None else seed, row.drawn)
        for row, seed in zip(picked, seeds, strict=True)
    ]
    u = _column(dice, device)
    plain = torch.tensor([_is_plain(row) for row in picked], device=device)
    tokens = torch.empty(len(hot), dtype=torch.long, device=device)
    if plain.any():
        tokens[plain] = invert(torch.softmax(z[plain], dim=-1), u[plain])
    if not plain.all():
        cut = ~plain
        some = [row for row in picked if not _is_plain(row)]
        tokens[cut] = _sample_cut(z[cut], some, u[cut], _NUCLEUS)
    return tokens


def _is_plain(row: Row) -> bool:
    sampling = row.sampling
    return sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0


def _sample_cut(z: Tensor, rows: Sequence[Row], u: Tensor, width: int) -> Tensor:
    """Draw among each row's survivors, looking at its `width` likeliest tokens at first."""
    device, vocab = z.device, z.shape[-1]
    limits = [row.sampling.top_k if row.sampling.top_k > 0 else vocab for row in rows]
    width = min(vocab, max(width, *(limit for limit in limits if limit < vocab), 0))
    limit, limited = _column(limits, device), _column(limits, device) < vocab
    top_p = _column([row.sampling.top_p for row in rows], device)
    min_p = _column([row.sampling.min_p for row in rows], device)
    best, ids = z.topk(width, dim=-1)  # best first
    weights = torch.exp(best - best[:, :1])  # the best has 1
    kept = (weights >= min_p) & (torch.arange(width, device=device) < limit)
    weights = torch.where(kept, weights, 0)
    # What top-p is a share of is all that min-p and top-k leave, also beyond the first `width`.
    every = torch.exp(z - best[:, :1])
    mass = torch.where(every >= min_p, every, 0).sum(-1, keepdim=True)
    mass = torch.where(limited, weights.sum(-1, keepdim=True), mass)
    kept &= weights.cumsum(-1) - weights < top_p * mass
    kept[:, 0] = True
    tokens = ids.gather(-1, invert(torch.where(kept, weights, 0), u)[:, None])[:, 0]
    short = kept[:, -1] & ~limited[:, 0] if width < vocab else torch.zeros_like(kept[:, -1])
    if short.any():
        some = [row for row, again in zip(rows, short.tolist(), strict=True) if again]
        tokens[short] = _sample_cut(z[short], some, u[short], vocab)
    return tokens


def invert(weights: Tensor, u: Tensor) -> Tensor:
    """The index at which the running sum passes u of the total; never one of weight zero."""
    sums = weights.cumsum(-1)
    index = torch.searchsorted(sums, u * sums[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - weights.flip(-1).ne(0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _describe(token: int, row: Row, logprobs: Tensor | None) -> Drawn:
    if logprobs is None:
        return Drawn(token)
    values, ids = logprobs.topk(min(row.sampling.logprobs or 0, logprobs.shape[-1]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Drawn(token, float(logprobs[token]), top)
