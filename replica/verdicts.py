"""Verdicts: what was found of each version of an adapter, kept on the disk.

A verdict holds for one judge only: the base, the rank cap and the dtype it was made for. A file
that cannot be read, or is another judge's, counts as none: the adapter is looked at again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Final

from replica.engine.adapter_store import Found, Refused
from shared.ids import AdapterId

_log = logging.getLogger(__name__)

_VERSION: Final = 1
"""Changes when the judging does."""


class Verdicts:
    """By key. Methods may be called from any thread."""

    def __init__(self, folder: Path, *, judge: str) -> None:
        self._folder = folder
        self._judge = hashlib.sha256(f"{_VERSION} {judge}".encode()).hexdigest()
        self._known: dict[AdapterId, Found | Refused] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: AdapterId) -> Found | Refused | None:
        known = self._known.get(key)
        return known if known is not None else self._recall(key)

    def keep(self, key: AdapterId, verdict: Found | Refused) -> None:
        self._known[key] = verdict
        path = self._path(key)
        try:
            new = path.with_suffix(".new")
            new.write_text(json.dumps({"judge": self._judge, **asdict(verdict)}))
            new.replace(path)
        except OSError as error:  # it will be found out again after a restart
            _log.warning("verdict not kept", extra={"file": str(path), "reason": str(error)})

    def keep_only(self, keys: Set[AdapterId]) -> None:
        for key in self._known.keys() - keys:
            self._known.pop(key, None)
        for path in self._folder.glob("*.json"):
            if path.stem not in keys:
                path.unlink(missing_ok=True)

    def _recall(self, key: AdapterId) -> Found | Refused | None:
        try:
            kept = json.loads(self._path(key).read_text())
            if kept.pop("judge") != self._judge:
                return None
            verdict: Found | Refused = (Found if "digest" in kept else Refused)(**kept)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        self._known[key] = verdict
        return verdict

    def _path(self, key: AdapterId) -> Path:
        return self._folder / f"{key}.json"
