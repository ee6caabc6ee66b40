"""What several plots share: the finished plot, scales of cluster sizes and of values, stacked columns and bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scaletrace.view import units
from scaletrace.view.report import svg
from scaletrace.view.report.html import Html, Table

Show = Callable[[float], str]
"""Turns a value into the text of a tick."""

MOST_BARS = 32
"""Bars that one plot draws; the table behind it has all."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing, its numbers, a name for files and a title for readers."""

    name: str
    title: str
    drawing: Html
    table: Table


def gpu_scale(sizes: Sequence[float]) -> svg.Scale:
    """Cluster sizes by powers of two, at most seven labels."""
    ticks = svg.log_ticks(sizes, 2, 7)
    low, high = min(*sizes, ticks[0]), max(*sizes, ticks[0] * 2 if len(set(sizes)) == 1 else 0)
    shown = [(t, units.number(t)) for t in ticks if low <= t <= high]
    return svg.Scale(low, high, svg.LEFT + 12, svg.WIDTH - svg.RIGHT - 12, log=True, ticks=shown)


def up_scale(high: float, label: Show, height: float = svg.HEIGHT) -> svg.Scale:
    """A linear scale from 0 upwards; `label` turns a tick's value into text."""
    ticks = svg.nice_ticks(high)
    return svg.Scale(0, ticks[-1], height - svg.BOTTOM, svg.TOP, ticks=[(t, label(t)) for t in ticks])


def stacked_columns(
    labels: Sequence[str],
    columns: Sequence[Sequence[float]],
    names: Sequence[str],
    x_name: str,
    y_name: str,
    show: Show,
) -> Html:
    """Stacked columns with a legend below."""
    keys, room = svg.legend(
        [(i % len(svg.PALETTE), units.shorten(n, 24)) for i, n in enumerate(names)], svg.HEIGHT + 16
    )
    y = up_scale(max(sum(c) for c in columns) or 1.0, show)
    width = (svg.WIDTH - svg.LEFT - svg.RIGHT) / len(labels)
    every = max(1, len(labels) // 8)
    ticks = [(i + 0.5, label) for i, label in enumerate(labels) if i % every == 0]
    x = svg.Scale(0, len(labels), svg.LEFT, svg.WIDTH - svg.RIGHT, ticks=ticks)
    parts: list[Html] = []
    for i, column in enumerate(columns):
        done = 0.0
        for k, value in enumerate(column):
            top, bottom = y(done + value), y(done)
            about = f"{labels[i]}: {names[k]} {show(value)}"
            left = x(i) + width * 0.14
            parts.append(svg.rect(left, top, width * 0.72, bottom - top, f"f{k % len(svg.PALETTE)} edge", about))
            done += value
    return svg.svg(svg.axes(x, y, x_name, y_name), *parts, keys, about=y_name, height=svg.HEIGHT + 8 + room)


def stacked_bars(
    bars: Sequence[tuple[str, Sequence[tuple[int, float, str]]]],
    used: Mapping[int, str],
    y_name: str,
    x_name: str,
    show: Show,
) -> Html:
    """Horizontal stacked bars: (label, pieces of (colour, value, words))."""
    height = svg.TOP + 22 * len(bars) + svg.BOTTOM
    keys, room = svg.legend(sorted(used.items()), height + 16) if used else (Html(""), 0.0)
    high = max(sum(value for _, value, _ in pieces) for _, pieces in bars) or 1.0
    ticks = [t for t in svg.nice_ticks(high, 3) if t <= high * 1.0001] or [0.0]
    x = svg.Scale(0, high, svg.LEFT, svg.WIDTH - svg.RIGHT - 18, ticks=[(t, show(t) if t else "0") for t in ticks])
    y = svg.Scale(0, 1, height - svg.BOTTOM, svg.TOP)
    parts: list[Html] = []
    for row, (label, pieces) in enumerate(bars):
        top, done = svg.TOP + 22 * row, 0.0
        parts.append(svg.text(svg.LEFT - 6, top + 14, label, "end"))
        for colour, value, about in pieces:
            parts.append(svg.rect(x(done), top + 2, x(done + value) - x(done), 17, f"f{colour} edge", about))
            done += value
    return svg.svg(
        svg.axes(x, y, x_name, y_name), *parts, keys, about=f"{x_name} by {y_name}", height=height + 8 + room
    )
