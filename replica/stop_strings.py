"""StopStrings: where a growing text must end, wherever its pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a growing text before the stop string that is completed first.

    Of two that end at the same character the longer counts. What could still become a stop
    string is held back: the longest end of the text that begins one.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """What may leave now; after `stopped`, nothing more does."""
        if self.stopped or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        if cuts := [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(cuts)[1]]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back was no stop string after all."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
