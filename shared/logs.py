"""JSON log lines on stderr, each with the request and the trace that it belongs to.

Prompts and completions are never logged: they belong to the tenant. That is a law of what is
written, and not a filter: nothing takes them out of a line that has them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, TextIO

import orjson

from shared.clock import wall

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Set by the HTTP handler; every line logged beneath it carries the id."""

trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""Likewise, where the request belongs to a trace."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LOGGER: Final = "requests"  # whose lines tell of one request as a whole


class JsonFormatter(logging.Formatter):
    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        """`always`: fields of every line."""
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
        }
        if rid := request_id.get():
            line["request_id"] = rid
        if trace := trace_id.get():
            line["trace_id"] = trace
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class RequestLines:
    """A line a request, of the same form, without `logging`'s cost; those added are one write."""

    def __init__(self, always: Mapping[str, str] | None = None, to: TextIO | None = None) -> None:
        """`always`: fields of every line. `to`: a stream other than stderr."""
        self._always = {"level": "info", "logger": _LOGGER, "message": "request"} | dict(
            always or {}
        )
        self._to = to
        self._waiting: list[bytes] = []

    def add(self, line: Mapping[str, object]) -> None:
        """It is written by the next `write`."""
        whole = {"at": round(wall(), 3), **self._always, **line}
        self._waiting.append(orjson.dumps(whole, option=orjson.OPT_APPEND_NEWLINE))

    def write(self) -> None:
        if self._waiting:
            lines, self._waiting = b"".join(self._waiting), []
            to = self._to or sys.stderr
            to.write(lines.decode())
            to.flush()


def configure(*, level: str = "INFO", **always: str) -> None:
    """Send every logger of this process to stderr as JSON; `always`: fields of every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(always))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What it says below that shows the bytes of what it could not read: it may be of a prompt.
    logging.getLogger("aiohttp").setLevel(logging.INFO)
