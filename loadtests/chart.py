"""Charts as inline SVG, and the one page that holds them: a file that opens anywhere, offline.

No script and no outside request. Text is escaped here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

Points = Sequence[tuple[float, float]]

_COLOURS: Final = 7  # of series; they repeat
_WIDTH, _HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 38, 50
_CHARACTER: Final = 6.6  # of the legend, about as wide
_CSS: Final = """
:root{--text:#0f172a;--quiet:#475569;--back:#fff;--line:#e2e8f0;--bad:#dc2626;--bad-back:#fef2f2;
--c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#db2777;--c4:#7c3aed;--c5:#475569;--c6:#dc2626;
color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--text:#e2e8f0;--quiet:#94a3b8;--back:#0f172a;
--line:#334155;--bad:#f87171;--bad-back:#450a0a;--c0:#60a5fa;--c1:#fbbf24;--c2:#34d399;--c3:#f472b6;
--c4:#a78bfa;--c5:#94a3b8;--c6:#f87171}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--back);max-width:1360px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.5rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:1rem;
margin-top:1rem}
svg{width:100%;height:auto;border:1px solid var(--line);border-radius:8px}
svg text{fill:var(--text)}svg .quiet{fill:var(--quiet)}svg .grid{stroke:var(--line)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0}
th,td{padding:.25rem .75rem;text-align:right;border-bottom:1px solid var(--line)}
th{color:var(--quiet);font-weight:500}
th:first-child,td:first-child{text-align:left;white-space:nowrap}.scroll{overflow-x:auto}
@media (max-width:600px){th,td{padding:.25rem .35rem;font-size:13px}
th:first-child,td:first-child{white-space:normal}}
.bad{background:var(--bad-back);border:1px solid var(--bad);border-radius:8px;padding:.5rem 1rem}
"""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values to pixels; of a logarithmic axis only values above zero have a place."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool) -> _Axis:
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if not log:
            low = min(low, 0.0)
        if high <= low:
            high = low * 10 if log else low + 1
        return cls(low, high, start, end, log)

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        here = math.log(value) if self.log else value
        return self.start + (self.end - self.start) * (here - low) / (high - low)

    def ticks(self) -> Iterator[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            within = (1, 2, 5) if last - first <= 3 else (1,)
            every = (part * 10.0**power for power in range(first, last + 1) for part in within)
            yield from (tick for tick in every if self.low <= tick <= self.high)
            return
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        while (self.high - self.low) / step > 6:
            step *= 2
        first = math.ceil(self.low / step)
        yield from (i * step for i in range(first, math.floor(self.high / step) + 1))


def lines(
    title: str,
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """One line a series; points that are not finite, or not above zero on a log axis, are left.

    Names stand below, side by side: a few short ones have room.
    """
    kept = {
        name: [p for p in points if _placed(p[0], log_x) and _placed(p[1], log_y)]
        for name, points in series.items()
    }
    every = [point for points in kept.values() for point in points]
    across = _Axis.over([p[0] for p in every], _LEFT, _WIDTH - _RIGHT, log_x)
    up = _Axis.over([p[1] for p in every], _HEIGHT - _BOTTOM, _TOP, log_y)
    drawn = []
    legend = float(_LEFT)
    for number, (name, points) in enumerate(kept.items()):
        label = escape(name) if len(kept) > 1 else ""
        colour = f"var(--c{number % _COLOURS})"
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in points)
        drawn.append(
            f'<polyline points="{path}" fill="none" style="stroke:{colour}" stroke-width="1.8"/>'
            f'<text x="{legend:.0f}" y="{_HEIGHT - 10}" style="fill:{colour}" '
            f'font-size="12" font-weight="600">{label}</text>'
        )
        legend += _CHARACTER * len(name) + 16
    return _frame(title, x, y, across, up, "".join(drawn), x_ticks=True)


def bars(title: str, values: Mapping[str, float], *, y: str) -> str:
    """One bar a name, with its value on top; at most some forty are readable."""
    across = _Axis.over([0, len(values) or 1], _LEFT, _WIDTH - _RIGHT, log=False)
    finite = [value for value in values.values() if math.isfinite(value)]
    up = _Axis.over([1.08 * value for value in finite], _HEIGHT - _BOTTOM, _TOP, log=False)
    width = min(max((across(1) - across(0)) * 0.7, 1), 72)
    drawn = []
    for number, (name, value) in enumerate(values.items()):
        middle = (across(number) + across(number + 1)) / 2
        top = up(value) if math.isfinite(value) else up(0)
        drawn.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{up(0) - top:.1f}" style="fill:var(--c0)"/>'
            f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle" '
            f'font-size="12">{_short(value)}</text>'
            f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle" '
            f'font-size="{min(12, 1.5 * (across(1) - across(0)) / max(len(name), 1)):.3g}">'
            f"{escape(name)}</text>"
        )
    return _frame(title, "", y, across, up, "".join(drawn), x_ticks=False)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row.get(name))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def paragraph(text: str, *, bad: bool = False) -> str:
    return f"<p{' class=bad' if bad else ''}>{escape(text)}</p>"


def page(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """A whole document: a heading a section, its SVGs side by side, the rest below one another."""
    body = []
    for heading, parts in sections.items():
        charts = "".join(part for part in parts if part.startswith("<svg"))
        rest = "".join(part for part in parts if not part.startswith("<svg"))
        body.append(f"<h2>{escape(heading)}</h2>{rest}")
        if charts:
            body.append(f'<div class="charts">{charts}</div>')
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style>"
        f"<h1>{escape(title)}</h1>{''.join(body)}</html>\n"
    )


def _frame(
    title: str, x: str, y: str, across: _Axis, up: _Axis, inside: str, *, x_ticks: bool
) -> str:
    grid = []
    for tick in up.ticks():
        at = up(tick)
        grid.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            f'class="grid"/><text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" '
            f'class="quiet" font-size="12">{_short(tick)}</text>'
        )
    for tick in across.ticks() if x_ticks else ():
        grid.append(
            f'<text x="{across(tick):.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle" '
            f'class="quiet" font-size="12">{_short(tick)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'font-family="system-ui,sans-serif">{"".join(grid)}{inside}'
        f'<text x="8" y="21" font-size="14" font-weight="600">{escape(title)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 10}" text-anchor="end" class="quiet" '
        f'font-size="12">'
        f"{escape(x)}</text>"
        f'<text x="{_WIDTH - _RIGHT}" y="21" text-anchor="end" class="quiet" font-size="12">'
        f"{escape(y)}</text>"
        "</svg>"
    )


def _placed(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _short(value) if isinstance(value, float) else escape(str(value))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
