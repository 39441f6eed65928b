"""Where a server that does not say it has its adapters: by its eviction rule and what we sent it.

The engines keep adapters in two LRU caches, `slots` on the GPU inside `host_slots` in host memory,
and both are touched by the same requests. Then they share one order (the inclusion property of LRU;
Mattson et al., Evaluation Techniques for Storage Hierarchies, 1970): the `slots` last used are on
the GPU, the next up to `host_slots` in host memory, the rest on disk. So one recency list is all
there is to keep. What the server says runs now is in a slot, whatever the list says, and is used.

It errs where others send to the server too, where its rule is not LRU, and after we were restarted:
what nobody was seen to use is never said to be in a slot, so the error is a load expected in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shared.messages import Tier


class Inferred:
    """Of one server's life. Names are the server's own."""

    def __init__(self) -> None:
        self._recent: dict[str, None] = {}  # the last used at the end

    def used(self, name: str) -> None:
        self._recent.pop(name, None)
        self._recent[name] = None

    def keep(self, names: Collection[str]) -> None:
        """Forget all others: what is not listed any more is not held either."""
        self._recent = {name: None for name in self._recent if name in names}

    def clear(self) -> None:
        """The server was started anew, cold."""
        self._recent.clear()

    def tiers(
        self, names: Iterable[str], at_work: Collection[str], *, slots: int, host_slots: int
    ) -> dict[str, Tier]:
        """Of each name. No `slots`: unknown, and each is in one. No `host_slots`: as many as it is
        told to hold."""
        wanted = list(dict.fromkeys(names))
        if not slots:
            return dict.fromkeys(wanted, Tier.GPU)
        for name in wanted:
            if name in at_work:
                self.used(name)
        known = set(wanted)
        order = [name for name in reversed(self._recent) if name in known]
        seen, unseen = len(order), [name for name in wanted if name not in self._recent]
        host = max(slots, host_slots) if host_slots else len(wanted)
        return {
            name: Tier.GPU
            if place < min(slots, seen) or name in at_work
            else Tier.HOST
            if place < host
            else Tier.DISK
            for place, name in enumerate([*order, *unseen])
        }
