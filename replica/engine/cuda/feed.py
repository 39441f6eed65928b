"""Feed: a step's rows as the columns the forward pass reads, [5, tokens] int32:

    id        the token, or PENDING
    source    where it stands among what the last step drew, if it is pending
    position  in its sequence; -1 is padding
    seat      its sequence's block table
    slot      its adapter; BASE_SLOT without

Tokens are padded, so that few shapes occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from replica.core.step import BASE_SLOT, PENDING, Row

COLUMNS: Final = 5
_PADDING: Final = (0, 0, -1, 0, BASE_SLOT)


def decoding(
    rows: Sequence[Row], seats: Sequence[int], drawn: Mapping[str, int], width: int
) -> np.ndarray:
    """One token a row, padded to `width`. `drawn` says where the last step drew for a sequence."""
    n = len(rows)
    out = np.empty((COLUMNS, width), dtype=np.int32)
    out[:, n:] = np.array(_PADDING, dtype=np.int32)[:, None]
    out[0, :n] = [row.tokens[0] for row in rows]
    out[1, :n] = [drawn.get(row.seq, 0) for row in rows]
    out[2, :n] = [row.start for row in rows]
    out[3, :n] = seats
    out[4, :n] = [row.slot for row in rows]
    return out


def mixed(
    rows: Sequence[Row], seats: Sequence[int], drawn: Mapping[str, int], width: int
) -> np.ndarray:
    """Any tokens a row, padded to `width`."""
    lengths = np.fromiter((len(row.tokens) for row in rows), dtype=np.int64, count=len(rows))
    total = int(lengths.sum())
    out = np.empty((COLUMNS, width), dtype=np.int32)
    out[:, total:] = np.array(_PADDING, dtype=np.int32)[:, None]
    at = 0
    for row in rows:
        end = at + len(row.tokens)
        out[0, at:end] = row.tokens
        at = end
    sources = [drawn.get(row.seq, 0) if row.tokens[0] == PENDING else 0 for row in rows]
    starts = np.fromiter((row.start for row in rows), dtype=np.int64, count=len(rows))
    firsts = np.cumsum(lengths) - lengths
    out[1, :total] = np.repeat(sources, lengths)
    out[2, :total] = np.arange(total) + np.repeat(starts - firsts, lengths)
    out[3, :total] = np.repeat(seats, lengths)
    out[4, :total] = np.repeat([row.slot for row in rows], lengths)
    return out


def work(
    rows: Sequence[Row], block: int, width: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """What attention and sampling read: tokens that stand alone, the first tokens and the counts of
    the others' blocks, and the tokens that are drawn from. Padding stands alone, so that it is
    zero and not whatever memory held."""
    single: list[int] = []
    firsts: list[int] = []
    counts: list[int] = []
    last: list[int] = []
    at = 0
    for row in rows:
        length = len(row.tokens)
        if length == 1:
            single.append(at)
        else:
            starts = range(at, at + length, block)
            firsts += starts
            counts += (min(block, at + length - start) for start in starts)
        at += length
        if row.samples:
            last.append(at - 1)
    single += range(at, width)
    return single, firsts, counts, last
