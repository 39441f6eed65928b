"""The one exception a command ends with: said in a line or two, exit code 1 or 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
"""What a shell expects of a command that Ctrl-C ended before it had done its work."""


class Failure(Exception):
    """The text says what is wrong and what to do about it."""

    def __init__(self, message: str, *, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def one_failure() -> Iterator[None]:
    """Around a TaskGroup: the first Failure in it comes out as itself, not in a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        failure: BaseException = group
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, Failure):
            raise failure from None
        raise


def usage_failure(message: str) -> Failure:
    """The command was called wrongly; nothing was tried."""
    return Failure(message, code=USAGE)
