"""What quantising the base does to an adapter: next-token distributions compared over a text.

With p the distribution after a prefix on the full base, q that on the quantised base, both with the
adapter, and b that of the full base without it, over all scored tokens t of the text:

    divergence   mean KL(p || q), nats           what the adapter loses to quantisation
    effect       mean KL(p || b), nats           what the adapter does at all
    agreement    share of tokens with argmax p = argmax q
    perplexity   exp(mean -ln p(t)), and of q

Means over tokens, of float32 log-probabilities. An adapter is a small change, so a small error of
the base may drown it: what counts is divergence beside effect, not only divergence alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

DIVERGENCE_MAX: Final = 0.1
"""Nats a token. FP8 costs the demo adapters 0.03, on a base of 135 M."""
AGREEMENT_MIN: Final = 0.85
"""The demo adapters keep 0.88 to 0.91."""
PERPLEXITY_RATIO_MAX: Final = 1.05
"""The demo adapters: 0.99 to 1.02."""
DROWNED: Final = 0.25
"""Divergence over effect: beyond it a quarter of what the adapter does may be noise. The demo
adapters: 0.01 to 0.05."""
TOKENS_MIN: Final = 200
"""Fewer scored tokens give means that another text would not repeat."""


class Trust(StrEnum):
    TRUST = "trust"
    CHECK = "check"  # one measure is over its limit, or the text is too short to tell
    DISTRUST = "distrust"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measures, over `tokens` scored tokens."""

    tokens: int
    divergence: float
    effect: float
    agreement: float
    perplexity_full: float
    perplexity_quantised: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_quantised / self.perplexity_full

    @property
    def noise(self) -> float:
        """Divergence over effect; 0 without either."""
        if self.effect:
            return self.divergence / self.effect
        return math.inf if self.divergence else 0.0


class Tally:
    """Sums over a text that is seen a stretch at a time."""

    def __init__(self) -> None:
        self._tokens = self._agreed = 0
        self._divergence = self._effect = self._full = self._quantised = 0.0

    def add(self, full: Tensor, quantised: Tensor, base: Tensor, targets: Tensor) -> None:
        """Logits [n, vocab] of p, q and b at n places, and the tokens [n] that followed."""
        p, q, b = (each.log_softmax(-1) for each in (full, quantised, base))
        at = targets[:, None]
        self._tokens += len(targets)
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        self._effect += float((p.exp() * (p - b)).sum(dtype=torch.float64))
        self._full -= float(p.gather(-1, at).double().sum())
        self._quantised -= float(q.gather(-1, at).double().sum())

    def result(self) -> Comparison:
        """Raises ValueError when nothing was scored."""
        if not self._tokens:
            raise ValueError("the text has fewer than two tokens: nothing follows anything")
        n = self._tokens
        return Comparison(
            tokens=n,
            divergence=max(self._divergence / n, 0.0),  # rounding may take a zero below itself
            effect=max(self._effect / n, 0.0),
            agreement=self._agreed / n,
            perplexity_full=_exp(self._full / n),
            perplexity_quantised=_exp(self._quantised / n),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    trust: Trust
    reasons: tuple[str, ...]  # each measure that is over its limit; empty when none is


def judge(found: Comparison) -> Verdict:
    """Trust when all limits hold, distrust when two or more are broken, or any by far."""
    over: list[tuple[str, float]] = []

    def limit(text: str, value: float, limit: float) -> None:
        if not value <= limit:  # NaN is over every limit
            over.append((text, value / limit))

    limit(f"KL {found.divergence:.3g} nats > {DIVERGENCE_MAX}", found.divergence, DIVERGENCE_MAX)
    limit(
        f"top-1 agreement {found.agreement:.1%} < {AGREEMENT_MIN:.0%}",
        1 - found.agreement,
        1 - AGREEMENT_MIN,
    )
    limit(
        f"perplexity {found.perplexity_ratio:.3g} times the full base's > {PERPLEXITY_RATIO_MAX}",
        found.perplexity_ratio - 1,
        PERPLEXITY_RATIO_MAX - 1,
    )
    limit(
        f"KL is {found.noise:.0%} of what the adapter itself changes > {DROWNED:.0%}",
        found.noise,
        DROWNED,
    )
    reasons = tuple(text for text, _ in over)
    far = any(not times <= 2 for _, times in over)
    if len(over) > 1 or far:
        return Verdict(Trust.DISTRUST, reasons)
    if found.tokens < TOKENS_MIN:
        return Verdict(
            Trust.CHECK, (*reasons, f"{found.tokens} tokens of text < {TOKENS_MIN}: give more")
        )
    return Verdict(Trust.CHECK if over else Trust.TRUST, reasons)


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf
