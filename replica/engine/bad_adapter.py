"""BadAdapter: one adapter cannot be served, and this is why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_CODE_CHARS: Final = 200  # names come from uploads; a report of one stays a line
_MESSAGE_CHARS: Final = 1000


class BadAdapter(ValueError):
    """Raised for one adapter; the server, its base and every other adapter go on.

    `code` is for machines and never changes its meaning (`rank_exceeds_max`,
    `unsupported_feature:use_dora`); `message` tells the owner what to do; `param` is the key of
    `adapter_config.json`, the tensor or the file at fault; `tensors` all of them, where several
    have the same fault.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        tensors: Iterable[str] = (),
    ) -> None:
        self.code = code[:_CODE_CHARS]
        self.message = message[:_MESSAGE_CHARS]
        self.param = param if param is None else param[:_CODE_CHARS]
        self.tensors = tuple(tensors)
        super().__init__(f"{self.code}: {self.message}")
