"""The Prometheus text format (version 0.0.4), as far as reading a few gauges needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_SAMPLE: Final = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$"
)
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str, *names: str) -> Iterator[Sample]:
    """Those of these names; a line that is none is passed over."""
    for line in text.split("\n"):
        if not line.startswith(names) or (found := _SAMPLE.match(line)) is None:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if name in names and value == value:
            yield Sample(
                name, {key: _plain(text) for key, text in _LABEL.findall(labels or "")}, value
            )


def total(text: str, name: str) -> int:
    """Over its series: one a process of the server."""
    return max(0, int(sum(one.value for one in samples(text, name) if abs(one.value) < 1e9)))


def _plain(text: str) -> str:
    return re.sub(r'\\[\\"n]', lambda found: _ESCAPED[found[0]], text)
