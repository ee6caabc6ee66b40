"""Turns the answer of `replay` (or of a what-if) into plots. A plot without numbers is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaletrace.view import terminal, units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import MOST_BARS, Plot, stacked_bars
from scaletrace.view.report.html import Cell, Table
from scaletrace.view.report.read import Document, mapping, num, rows

PART_COLOURS = {
    "compute_ns": 0,
    "exposed_comm_ns": 1,
    "overlapped_comm_ns": 5,
    "memory_ns": 2,
    "host_ns": 3,
    "stall_ns": 4,
    "idle_ns": 6,
}
_KIND_COLOURS = {"compute": 0, "communication": 1, "memory": 2, "host": 3, "stall": 4, "gap": 6}


def breakdown(doc: Document) -> Plot | None:
    """Where each rank's wall time went, as stacked bars; of many ranks the most exposed are drawn."""
    every = sorted(mapping(doc.get("breakdown")).items(), key=lambda item: terminal.rank_order(str(item[0])))
    ranks = [(str(rank), part) for rank, part in every if isinstance(part, Mapping) and num(part.get("wall_ns"))]
    if not ranks:
        return None
    drawn = ranks
    if len(ranks) > MOST_BARS:
        worst = sorted(ranks, key=lambda item: -(num(item[1].get("exposed_comm_ns")) or 0))[:MOST_BARS]
        drawn = sorted(worst, key=lambda item: terminal.rank_order(item[0]))
    bars: list[tuple[str, list[tuple[int, float, str]]]] = []
    used: dict[int, str] = {}
    for rank, part in drawn:
        pieces = []
        for key, label, _, value in terminal.drawn_parts(part):
            if num(value):
                used[PART_COLOURS[key]] = label
                share = value / (num(part.get("wall_ns")) or 1)
                pieces.append(
                    (
                        PART_COLOURS[key],
                        float(value),
                        f"rank {rank}: {label} {units.duration(value)}, {units.percent(share)}",
                    )
                )
        bars.append((units.shorten(rank, 8), pieces))
    drawing = stacked_bars(bars, used, "rank", "wall time of the steps", units.duration)
    keys = [key for key, _, _ in terminal.PARTS] + ["wall_ns"]
    table = Table(["rank", *keys], [[rank, *(num(part.get(key)) for key in keys)] for rank, part in ranks])
    note = f" (the {MOST_BARS} most exposed of {len(ranks)} ranks)" if len(drawn) < len(ranks) else ""
    return Plot("breakdown", f"Where time went{note}", drawing, table)


def axis_bars(doc: Document) -> Plot | None:
    """Wait and transfer of the collectives by axis."""
    total: dict[str, list[float]] = {}
    for item in rows(doc.get("collectives")):
        pair = total.setdefault(str(item.get("axis") or "unknown"), [0.0, 0.0])
        pair[0] += num(item.get("wait_ns")) or 0.0
        pair[1] += num(item.get("transfer_ns")) or 0.0
    if not any(sum(pair) for pair in total.values()):
        return None
    bars = [
        (
            units.shorten(axis, 8),
            [
                (3, pair[0], f"{axis}: wait {units.duration(pair[0])}"),
                (1, pair[1], f"{axis}: transfer {units.duration(pair[1])}"),
            ],
        )
        for axis, pair in sorted(total.items())
    ]
    drawing = stacked_bars(
        bars, {3: "wait for the last member", 1: "transfer"}, "axis", "time over all members", units.duration
    )
    table = Table(["axis", "wait_ns", "transfer_ns"], [[axis, *pair] for axis, pair in sorted(total.items())])
    return Plot("axes", "Communication by axis", drawing, table)


def exposed_axis_bars(doc: Document) -> Plot | None:
    """Exposed communication of the mean rank, by axis."""
    ranks = [part for part in mapping(doc.get("breakdown")).values() if isinstance(part, Mapping)]
    total: dict[str, float] = {}
    for part in ranks:
        for axis, value in mapping(part.get("exposed_by_axis_ns")).items():
            total[str(axis)] = total.get(str(axis), 0.0) + (num(value) or 0.0) / len(ranks)
    known = sorted(
        ((axis or "unknown", value) for axis, value in total.items() if value > 0), key=lambda item: -item[1]
    )
    if not known:
        return None
    bars = [(units.shorten(axis, 8), [(1, value, f"{axis}: {units.duration(value)} exposed")]) for axis, value in known]
    drawing = stacked_bars(bars, {}, "axis", "exposed time of the mean rank", units.duration)
    return Plot(
        "exposed-axes",
        "Exposed communication by axis",
        drawing,
        Table(["axis", "exposed_ns"], [list(item) for item in known]),
    )


def stragglers(doc: Document) -> Plot | None:
    """How much waiting each rank caused a step; the table has what its peers' pace would save, also where nobody waited."""
    steps = max(sum(1 for s in rows(doc.get("steps")) if num(s.get("measured_ns"))), 1)
    found = rows(doc.get("stragglers"))
    late = [(str(s.get("rank")), terminal.waited_ns(s, steps)) for s in found]
    late = sorted((item for item in late if item[1] > 0), key=lambda item: -item[1])
    if not late:
        return None
    step = " a step" if rows(doc.get("steps")) else ""
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for item in sorted(found, key=lambda s: -(num(s.get("shorter_by_ns")) or 0)):
        wait, saved = terminal.waited_ns(item, steps), num(item.get("shorter_by_ns"))
        if wait or saved:
            gain = None if saved is None else terminal.saved_ns(item, steps)
            about = [units.clean(item.get("rank"), 8), units.clean(item.get("cause") or units.MISSING, 40)]
            raw.append([about[0], wait, gain, about[1]])
            shown.append([about[0], units.duration(wait), units.duration(gain), about[1]])
    heads = ["rank", f"others wait{step} (mean)", f"gain at its peers' pace{step}", "verdict"]
    bars = [
        (
            units.shorten(rank, 8),
            [(4, wait, f"the others wait {units.duration(wait)}{step} for rank {rank} on average")],
        )
        for rank, wait in late[:MOST_BARS]
    ]
    drawing = stacked_bars(bars, {}, "rank", f"the others wait for it{step} (mean)", units.duration)
    return Plot("stragglers", "Who made others wait", drawing, Table(heads, raw, shown))


_Piece = tuple[float, float, Mapping[str, Any]]
"""(start_ns, dur_ns, segment) of the critical path."""


def path_strip(doc: Document) -> Plot | None:
    """The critical path as a strip in time, by kind, with its shares."""
    path = mapping(doc.get("critical_path"))
    segments = [(num(s.get("start_ns")), num(s.get("dur_ns")), s) for s in rows(path.get("segments"))]
    known = [(start, dur, s) for start, dur, s in segments if start is not None and dur is not None and dur > 0]
    if not known:
        return None
    begin, length = min(s for s, _, _ in known), max(s + d for s, d, _ in known) - min(s for s, _, _ in known)
    ticks = [(t, units.duration(t) if t else "0") for t in svg.nice_ticks(length, 3) if t <= length]
    x = svg.Scale(0, length, 10, svg.WIDTH - 26, ticks=ticks)
    strip = []
    for start, end, kind in _runs(known, length / 900):
        left, right = x(start - begin), x(end - begin)
        css = f"f{_KIND_COLOURS.get(kind, 7)}"
        strip.append(svg.rect(left, 30, max(right - left, 0.4), 44, css, f"{kind}: {units.duration(end - start)}"))
    share = {str(k): v for k, raw in mapping(path.get("share")).items() if (v := num(raw)) is not None and v > 0}
    entries = [(_KIND_COLOURS.get(k, 7), f"{units.shorten(k, 24)} {units.percent(v)}") for k, v in share.items()]
    keys, room = svg.legend(entries, 144)
    axes = svg.axes(x, svg.Scale(0, 1, 78, 30), "time along the path", "")
    drawing = svg.svg(axes, *strip, keys, about="the critical path by kind", height=136 + room)
    return Plot("path", "Critical path", drawing, _path_table(known, begin))


def _path_table(known: Sequence[_Piece], begin: float) -> Table:
    """Pieces in order of time for the CSV, the longest first for readers."""
    columns = ["rank", "lane", "name", "kind", "start_ns", "dur_ns"]
    raw: list[list[Cell]] = [[_cell(s.get(c)) for c in columns] for _, _, s in known]
    shown: list[list[object]] = []
    for start, dur, s in sorted(known, key=lambda item: -item[1]):
        where = [_cell(s.get("rank")), _cell(s.get("lane")), units.shorten(s.get("name"), 90), _cell(s.get("kind"))]
        shown.append([*where, units.duration(start - begin), units.duration(dur)])
    return Table(columns, raw, shown)


def _runs(known: Sequence[tuple[float, float, Mapping[str, Any]]], least: float) -> list[tuple[float, float, str]]:
    """Neighbouring segments of one kind as one piece; pieces too short to see join their neighbour.

    An answer may list the longest segments only, so a hole between two of them stays a hole.
    """
    out: list[tuple[float, float, str]] = []
    for start, dur, segment in sorted(known, key=lambda item: item[0]):
        kind = units.clean(segment.get("kind") or "gap", 40)
        near = bool(out) and start - out[-1][1] <= least
        if near and (kind == out[-1][2] or dur < least):
            out[-1] = (out[-1][0], max(out[-1][1], start + dur), out[-1][2])
        else:
            out.append((start, start + dur, kind))
    return out


def _cell(value: Any) -> Cell:
    return value if value is None or units.is_number(value) else units.clean(value)
