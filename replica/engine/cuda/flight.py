"""Flight: a step on the device, and its tokens when they are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replica.engine.sampler import NO_TOKEN, Drawn


class Flight:
    def __init__(
        self,
        seqs: Sequence[str],
        tokens: Tensor,
        arrived: torch.cuda.Event | None,
        known: Mapping[str, Drawn],
    ) -> None:
        """`tokens` are `seqs`'s, in host memory once `arrived` has happened; `known` are results
        that the launch had to wait for."""
        self._seqs, self._tokens, self._arrived, self._known = seqs, tokens, arrived, known

    def landed(self) -> bool:
        """Whether it is over: `collect` will not wait."""
        return self._arrived is None or self._arrived.query()

    def collect(self) -> dict[str, Drawn]:
        """Wait for it: what each sampling row drew, and what each scored."""
        if self._arrived is not None:
            self._arrived.synchronize()
        drawn = dict(zip(self._seqs, map(_drawn, self._tokens.tolist()), strict=True))
        for seq, known in self._known.items():
            own = drawn.get(seq) if known.token == NO_TOKEN else None
            drawn[seq] = known if own is None else replace(own, prompt=known.prompt)
        return drawn


_made: dict[int, Drawn] = {}


def _drawn(token: int) -> Drawn:
    """One of each: to make an object a token would cost a step of 256 rows more than the rest."""
    found = _made.get(token)
    if found is None:
        found = _made[token] = Drawn(token)
    return found
