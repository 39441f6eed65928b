"""One gateway at a time: the right to do what the others would do as well.

Law: while one keeps asking within `life_s`, no other has it; one that was killed has lost it after
that. While the store is away everybody has it: what is guarded so must bear being done twice.
"""

from __future__ import annotations

from secrets import token_hex
from typing import Final

from gateway.store.redis import Store, StoreAway

LIFE_S: Final = 5.0


class Turn:
    def __init__(self, store: Store, name: str, *, life_s: float = LIFE_S) -> None:
        self._store = store
        self._key: Final = f"turn:{name}"
        self._who: Final = token_hex(8)
        self._life_ms: Final = round(life_s * 1000)
        self._held = False

    async def mine(self) -> bool:
        """Take it, or keep it for another while; False: another gateway has it."""
        try:
            reply = await self._store.script("turn", [self._key], [self._who, self._life_ms])
        except StoreAway:
            return True
        self._held = reply == 1
        return self._held

    def let_go(self) -> None:
        """Harmless when it is another's."""
        if self._held:
            self._held = False
            self._store.ask("turn", [self._key], [self._who, 0], lambda reply: None)
