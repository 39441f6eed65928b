"""How long sequences wait for their adapter, by the tier it was in when they came.

    wait = time from a sequence's arrival until its adapter is in a slot; 0 where it was in one

So the count of tier `gpu` over all is the slots' hit rate, and that of `host` over those of `host`
and `disk` the host memory's. One whose adapter was on its way counts with the tier it comes from.
What a sequence then waits for, pages or a place in the batch, is not its adapter's fault.
"""

from __future__ import annotations

from collections.abc import Callable

from replica.metrics import Metrics
from shared.ids import AdapterId
from shared.messages import Tier


class LoadWaits:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._since: dict[str, tuple[AdapterId, Tier, float]] = {}

    def began(self, seq_id: str, adapter: AdapterId, tier: Tier, now: float) -> None:
        if tier is Tier.GPU:
            self._metrics.waited(tier, 0.0)
        else:
            self._since[seq_id] = (adapter, tier, now)

    def ended(self, seq_id: str) -> None:
        """The sequence is no more; harmless when it did not wait."""
        self._since.pop(seq_id, None)

    def settle(self, resident: Callable[[AdapterId], bool], now: float) -> None:
        """Those whose adapter has come."""
        if not self._since:
            return
        for seq_id, (adapter, tier, since) in list(self._since.items()):
            if resident(adapter):
                del self._since[seq_id]
                self._metrics.waited(tier, now - since)
