"""Turns series of points into a small SVG plot, plain text that a repository can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Series = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 400, 64, 44, 34, 150
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#444444", "#d36ba6", "#2a9d8f")


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    marks_only: bool = False,
    diagonal: bool = False,
) -> str:
    """One plot as SVG text; empty series are left out."""
    shown = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if points}
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    if not xs:
        return ""
    across = _Axis(xs, log_x, LEFT, WIDTH - RIGHT, zero=False)
    up = _Axis(ys, log_y, HEIGHT - BOTTOM, TOP, zero=not log_y and not diagonal)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in across.ticks():
        at = across.place(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_short(tick)}</text>')
    for tick in up.ticks():
        at = up.place(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    if diagonal:
        low, high = max(across.low, up.low), min(across.high, up.high)
        parts.append(
            f'<line x1="{across.place(low):.1f}" y1="{up.place(low):.1f}" x2="{across.place(high):.1f}" '
            f'y2="{up.place(high):.1f}" stroke="#999" stroke-dasharray="4 3"/>'
        )
    for i, (name, points) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across.place(x), up.place(y)) for x, y in sorted(points)]
        if not marks_only:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places]
        at = TOP + 8 + 16 * i
        parts.append(f'<circle cx="{WIDTH - RIGHT + 12}" cy="{at}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 20}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """One axis: data range to pixels, and where its ticks stand."""

    __slots__ = ("first", "high", "last", "log", "low")

    def __init__(self, values: Sequence[float], log: bool, first: float, last: float, *, zero: bool) -> None:
        self.log, self.first, self.last = log, first, last
        self.low, self.high = min(values), max(values)
        if zero and self.low > 0:
            self.low = 0.0
        if self.low == self.high:
            self.high = self.low + (abs(self.low) or 1.0)

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.first + (at - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.log:
            steps = (1, 2, 5) if math.log10(self.high / self.low) < 3 else (1,)
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
            found = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low <= tick <= self.high]


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e+", "e").replace("e0", "e") if abs(value) >= 1e6 else f"{value:,.4g}"
