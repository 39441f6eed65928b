"""Why a sequence ended with an error, as its client is told."""

from __future__ import annotations

from replica.core.sequence import Sequence
from replica.engine.sampler import BROKEN, Drawn
from replica.errors import AdapterLost, LogitsNotFinite, ReplicaError, SequenceFailed


def fault_of(seq: Sequence, reason: str, drawn: Drawn | None, *, model: str) -> ReplicaError:
    """`reason` is the scheduler's, `drawn` its last draw, if it had one."""
    if seq.adapter is not None and seq.admitted_at is None:
        return AdapterLost(reason, param="model")
    if drawn is None or drawn.token != BROKEN:
        return SequenceFailed(reason)
    if seq.grammar is not None:  # which of the two it was, the sampler does not tell
        return SequenceFailed(
            f"The reply of `{model}` cannot go on: its logits are not finite, or its JSON "
            "schema gave up. Try without the schema."
        )
    return LogitsNotFinite(
        f"The logits of `{model}` are not finite (infinity or NaN), so no token can be drawn. "
        "Its weights overflow on this prompt; trying again gives the same.",
        param="model",
    )
