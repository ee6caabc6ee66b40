"""Turns the answers of `diff` and `whatif` into plots: which operations and waits explain the change of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaletrace.view import terminal, units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot, stacked_bars
from scaletrace.view.report.html import Cell, Html, Table
from scaletrace.view.report.read import Document, mapping, num, rows
from scaletrace.view.report.replay import PART_COLOURS

MOST = 14
_NAMES = 196.0


def whatif_headline(doc: Document) -> str:
    """One sentence: what the change is worth."""
    before, after, what = num(doc.get("before_ns")), num(doc.get("after_ns")), "run"
    step = mapping(doc.get("step_time_ns"))
    if len(rows(doc.get("steps"))) > 1 and num(step.get("before")):
        before, after, what = num(step["before"]), num(step.get("after")), "step"
    if not before or after is None:
        return ""
    rules = ", ".join(units.clean(rule.get("rule"), 60) for rule in rows(doc.get("rules"))) or "the change"
    if after == before:
        return f"With {rules} nothing changes: {units.duration(before)}."
    side = "shorter" if after < before else "longer"
    share = units.percent(abs(after - before) / before)
    return (
        f"With {rules} the {what} is {units.duration(abs(after - before))} ({share}) {side}: {units.duration(after)}."
    )


def before_after(doc: Document) -> Plot | None:
    """Where time goes before and after a what-if, mean over ranks."""
    pairs = [("before", mapping(doc.get("breakdown_before"))), ("after", mapping(doc.get("breakdown")))]
    if not all(parts for _, parts in pairs):
        return None
    bars: list[tuple[str, list[tuple[int, float, str]]]] = []
    table: list[list[Cell]] = []
    used: dict[int, str] = {}
    for name, parts in pairs:
        ranks = [part for part in parts.values() if isinstance(part, Mapping)]
        mean = {
            key: sum(num(p.get(key)) or 0.0 for p in ranks) / max(len(ranks), 1) for key in (*PART_COLOURS, "wall_ns")
        }
        pieces = []
        for key, label, _, value in terminal.drawn_parts(mean):
            if value:
                used[PART_COLOURS[key]] = label
                pieces.append((PART_COLOURS[key], value, f"{name}: {label} {units.duration(value)}"))
        bars.append((name, pieces))
        table.append([name, *mean.values()])
    drawing = stacked_bars(bars, used, "", "mean over ranks", units.duration)
    return Plot("before-after", "Before and after", drawing, Table(["run", *PART_COLOURS, "wall_ns"], table))


def change_headline(doc: Document) -> str:
    """One sentence: by how much the step changed and what explains most of it."""
    before, after = num(doc.get("a_step_ns")), num(doc.get("b_step_ns"))
    if not before or after is None:
        return ""
    delta = after - before
    if not delta:
        return "Both runs take the same time."
    side = "longer" if delta > 0 else "shorter"
    words = f"A step of the second run is {units.duration(abs(delta))} ({units.percent(abs(delta) / before)}) {side}"
    changes = sorted(rows(doc.get("path")), key=lambda c: (num(c.get("delta_ns")) or 0) * (-1 if delta > 0 else 1))
    top = num(changes[0].get("delta_ns")) if changes else None
    if top and (top > 0) == (delta > 0):
        words += f"; most of it is {units.shorten(changes[0].get('what'), 80)} ({_signed(top)} on the critical path)"
    return words + "."


def _signed(ns: float) -> str:
    return f"{'+' if ns >= 0 else '−'}{units.duration(abs(ns))}"


def changes(doc: Document) -> Plot | None:
    """The largest changes along the critical path, a bar each: to the right what got longer, to the left what got shorter."""
    every = [(c, value) for c in rows(doc.get("path")) if (value := num(c.get("delta_ns"))) is not None and value]
    if not every:
        return None
    every.sort(key=lambda item: -abs(item[1]))
    drawn = every[:MOST]
    height = svg.TOP + 22 * len(drawn) + svg.BOTTOM
    reach = max(abs(value) for _, value in drawn)
    ticks = [(t, _signed(t) if t else "0") for t in (-reach, 0.0, reach)]
    x = svg.Scale(-reach, reach, _NAMES + 50, svg.WIDTH - 40, ticks=ticks)
    parts: list[Html] = []
    for row, (change, value) in enumerate(drawn):
        top = svg.TOP + 22 * row
        left, right = sorted((x(0.0), x(value)))
        about = f"{units.clean(change.get('what'), 200)}: {_signed(value)}"
        parts.append(svg.text(_NAMES + 20, top + 14, units.shorten(change.get("what"), 21), "end"))
        parts.append(svg.rect(left, top + 2, right - left, 17, "f1 edge" if value > 0 else "f2 edge", about))
    axes = svg.axes(x, svg.Scale(0, 1, height - svg.BOTTOM, svg.TOP), "change of a step", "")
    drawing = svg.svg(axes, *parts, about="changes along the critical path", height=height)
    return Plot("changes", "What changed on the critical path", drawing, _change_table(every))


def _change_table(every: Sequence[tuple[Mapping[str, Any], float]]) -> Table:
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for change, delta in every:
        texts: list[Cell] = [units.clean(change.get("what")), units.clean(change.get("kind") or "", 60)]
        before, after = num(change.get("a_ns")), num(change.get("b_ns"))
        raw.append([*texts, before, after, delta])
        shown.append([*texts, units.duration(before), units.duration(after), _signed(delta)])
    return Table(["what", "kind", "a_ns", "b_ns", "delta_ns"], raw, shown)
