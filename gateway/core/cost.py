"""What a request costs in the fair queue, and what it asks of a quota before anyone has counted.

    cost = input_weight * input_tokens + output_weight * output_tokens

An output token costs a step of the whole batch and holds its KV page longer than an input token,
hence the usual 1 : 2 (Sheng et al., Fairness in Serving Large Language Models, OSDI'24). Both
counts are estimates at the door (the prompt's bytes, the client's `max_tokens`); the queue and the
quota charge the estimate at once and are corrected when the replica has counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Of English text under the usual byte-pair vocabularies; code and other scripts have fewer."""


def estimate_tokens(prompt_bytes: int) -> int:
    """Tokens of a prompt of this many bytes, rounded up: a guess that is settled later."""
    return -(-prompt_bytes // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Cost:
    """The two weights, and the cost they give."""

    input_weight: float
    output_weight: float

    def __post_init__(self) -> None:
        for weight in (self.input_weight, self.output_weight):
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"a weight is a finite number above zero, not {weight}")

    def of(self, input_tokens: int, output_tokens: int) -> float:
        return self.input_weight * input_tokens + self.output_weight * output_tokens
