"""Turns the answer of `extrapolate` into plots over cluster size. A plot without numbers is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaletrace.view import terminal, units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot, gpu_scale, stacked_columns, up_scale
from scaletrace.view.report.html import Cell, Html, Table, join
from scaletrace.view.report.read import Document, banded, mapping, num, rows

_IDEAL = "ideal_overlap_step_time_s"
"""Step time if compute did not slow down beside communication; the second of the two numbers that belong together."""
_SHAPES = {"measured": "circle", "interpolated": "square", "extrapolated": "diamond"}
"""Shape of a point by where its number comes from."""


_NEAR_LIMIT = 0.05
"""Share of the limit from which memory is drawn beside it; less would lie on the axis and look like nothing."""
_MEMORY_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def best_points(doc: Document) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(the fastest point of each size in order of size, the others); points without size or time are left out."""
    usable = [
        p for p in rows(doc.get("points")) if (num(p.get("gpus")) or 0) > 0 and num(p.get("step_time_s")) is not None
    ]
    best: dict[float, Mapping[str, Any]] = {}
    for point in usable:
        size = num(point["gpus"]) or 0.0
        rival = best.get(size)
        if rival is None or (num(point["step_time_s"]) or 0) < (num(rival["step_time_s"]) or 0):
            best[size] = point
    chosen = [best[size] for size in sorted(best)]
    return chosen, [p for p in usable if not any(p is c for c in chosen)]


def _provenance(point: Mapping[str, Any]) -> str:
    return terminal.provenance_text(point.get("provenance"))


def _shape(point: Mapping[str, Any]) -> str:
    words = _provenance(point)
    return next((shape for word, shape in _SHAPES.items() if word in words), "diamond")


def curve(doc: Document) -> Plot | None:
    """Step time over cluster size, with its band, the knee and where communication takes over."""
    chosen, others = best_points(doc)
    if not chosen:
        return None
    x = gpu_scale([num(p["gpus"]) or 1.0 for p in chosen + others])
    bands = [banded(p["step_time_s"]) for p in chosen]
    top = max(v for b in bands for v in (b.low, b.p50, b.high) if v is not None)
    top = max([top, *(num(p["step_time_s"]) or 0 for p in others)])
    y = up_scale(top, lambda t: units.seconds(t) if t else "0")
    places = [x(num(p["gpus"]) or 1.0) for p in chosen]
    middle = [(at, y(b.p50)) for at, b in zip(places, bands, strict=True) if b.p50 is not None]
    area = [
        (at, y(b.low), y(b.high))
        for at, b, p in zip(places, bands, chosen, strict=True)
        if b.low is not None and b.high is not None and terminal.band(p) != terminal.UNTOLD
    ]
    ideal = [(at, y(v)) for at, p in zip(places, chosen, strict=True) if (v := num(p.get(_IDEAL))) is not None]
    names = [(0, "step, with its band"), *([(6, "if overlap cost nothing")] if ideal else [])]
    keys, room = svg.legend(names, svg.HEIGHT + 16)
    drawing = svg.svg(
        svg.axes(x, y, "GPUs", "step time"),
        svg.band(area, "f0 band") if len(area) > 1 else None,
        svg.line(ideal, "s6 line dash") if len(ideal) > 1 else None,
        svg.line(middle, "s0 line"),
        *(_curve_point(p, x, y, "f0 faint") for p in others),
        *(_curve_point(p, x, y, "f0" if _shape(p) == "circle" else "s0 hollow") for p in chosen),
        _marks(doc, x, y),
        keys,
        about="step time over cluster size; the table below has the numbers",
        height=svg.HEIGHT + 8 + room,
    )
    return Plot("curve", "Step time", drawing, _points_table(chosen + others))


def _curve_point(point: Mapping[str, Any], x: svg.Scale, y: svg.Scale, css: str) -> Html:
    value = num(point["step_time_s"]) or 0.0
    size = num(point["gpus"]) or 1.0
    about = f"{units.number(size)} GPUs, {terminal.layout_text(point.get('layout'))}: {units.seconds(value)} ({_provenance(point)})"
    return svg.point(x(size), y(value), css, about, _shape(point))


def _marks(doc: Document, x: svg.Scale, y: svg.Scale) -> Html:
    """Dashed lines at the knee and where communication dominates; the words lie over the lines that they must cross."""
    names = (("knee_gpus", "knee"), ("comm_dominates_gpus", "communication dominates"))
    marks = [(x(size), words) for key, words in names if (size := num(doc.get(key))) and x.low <= size <= x.high]
    lines = [svg.line([(at, y.start), (at, y.end)], "mark") for at, _ in marks]
    texts: list[Html] = []
    for row, (at, words) in enumerate(marks):
        anchor = beside(at, svg.text_width(words), [other for other, _ in marks if other != at])
        texts.append(svg.text(at + (-5 if anchor == "end" else 5), y.end + 12 + 17 * row, words, anchor, "halo"))
    return join(*lines, *texts)


def beside(at: float, width: float, others: Sequence[float]) -> str:
    """The side of a line at `at` on which words of a width cross the fewest other lines and stay in the plot: "start"
    behind it, "end" before it."""

    def cost(anchor: str) -> tuple[int, bool]:
        low, high = (at - width - 5, at) if anchor == "end" else (at, at + width + 5)
        outside = low < svg.LEFT or high > svg.WIDTH
        return 10 * outside + sum(low <= other <= high for other in others), (anchor == "end") != (at > svg.WIDTH / 2)

    return min(("start", "end"), key=cost)


def _points_table(points: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        "GPUs",
        "layout",
        "step s",
        "low s",
        "high s",
        "ideal overlap s",
        "tokens/s/GPU",
        "MFU",
        "exposed",
        "bubble",
        "straggler",
    ]
    columns += ["memory bytes", "power W/GPU", "dominant", "provenance"]
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for point in points:
        step, ideal = banded(point.get("step_time_s")), num(point.get(_IDEAL))
        fractions = [
            num(point.get(key)) for key in ("mfu", "exposed_comm_fraction", "bubble_fraction", "straggler_fraction")
        ]
        texts: list[Cell] = [units.clean(point.get("dominant") or "", 80), _provenance(point)]
        tokens, memory, power = (num(point.get(k)) for k in ("tokens_per_s_per_gpu", "memory_bytes", "power_W_per_gpu"))
        untold = terminal.band(point) == terminal.UNTOLD
        head: list[Cell] = [num(point.get("gpus")), terminal.layout_text(point.get("layout"))]
        raw.append([*head, step.p50, step.low, step.high, ideal, tokens, *fractions, memory, power, *texts])
        cells = [
            units.number(num(point.get("gpus"))),
            head[1],
            units.seconds(step.p50),
            *(terminal.UNTOLD if untold else units.seconds(v) for v in (step.low, step.high)),
            units.seconds(ideal),
        ]
        cells += [units.number(tokens), *(units.percent(f) for f in fractions), units.size(memory), units.number(power)]
        shown.append([*cells, *texts])
    return Table(columns, raw, shown)


def _limit(x: svg.Scale, y: svg.Scale, at: float, words: str) -> Html:
    """A dashed line, named below it."""
    line = svg.line([(x.start, y(at)), (x.end, y(at))], "mark")
    return join(line, svg.text(x.end, y(at) + 14, f"limit {words}", "end", "halo"))


def throughput(doc: Document) -> Plot | None:
    """Tokens per second and GPU (or MFU where there are no tokens) over cluster size."""
    chosen, _ = best_points(doc)
    has_tokens = any(num(p.get("tokens_per_s_per_gpu")) is not None for p in chosen)
    key, name = ("tokens_per_s_per_gpu", "tokens/s/GPU") if has_tokens else ("mfu", "MFU")
    label = units.number if has_tokens else units.percent
    points = [(num(p["gpus"]) or 1.0, value, p) for p in chosen if (value := num(p.get(key))) is not None]
    if not points:
        return None
    x, y = gpu_scale([size for size, _, _ in points]), up_scale(max(value for _, value, _ in points), label)
    marks = [
        svg.point(x(s), y(v), "f2", f"{units.number(s)} GPUs: {label(v)} {name} ({_provenance(p)})", _shape(p))
        for s, v, p in points
    ]
    drawing = svg.svg(
        svg.axes(x, y, "GPUs", name),
        svg.line([(x(s), y(v)) for s, v, _ in points], "s2 line"),
        *marks,
        _marks(doc, x, y),
        about=f"{name} over cluster size",
    )
    return Plot("throughput", f"Efficiency: {name}", drawing, Table(["GPUs", name], [[s, v] for s, v, _ in points]))


def exposed_by_axis(doc: Document) -> Plot | None:
    """Exposed communication as a share of the step, by axis, for each cluster size."""
    chosen, _ = best_points(doc)
    shares = [
        {str(k): v for k, raw in mapping(p.get("exposed_by_axis")).items() if (v := num(raw)) is not None}
        for p in chosen
    ]
    axes = sorted({axis for share in shares for axis in share})
    if not axes:
        return None
    sizes = [units.number(num(p["gpus"])) for p in chosen]
    columns = [[share.get(axis, 0.0) for axis in axes] for share in shares]
    drawing = stacked_columns(sizes, columns, axes, "GPUs", "exposed share of the step", units.percent)
    heads = ["GPUs", *axes]
    raw: list[list[Cell]] = [[num(p["gpus"]), *(s.get(a) for a in axes)] for p, s in zip(chosen, shares, strict=True)]
    shown = [[size, *(units.percent(s.get(a)) for a in axes)] for size, s in zip(sizes, shares, strict=True)]
    table = Table(heads, raw, shown, heads)
    return Plot("exposed", "Exposed communication by axis", drawing, table)


def memory(doc: Document) -> Plot | None:
    """Memory a GPU needs over cluster size, with the device's limit where it is known."""
    chosen, _ = best_points(doc)
    known = [(num(p["gpus"]) or 1.0, value, p) for p in chosen if (value := num(p.get("memory_bytes"))) is not None]
    if not known:
        return None
    limit = num(doc.get("memory_limit_bytes"))
    x = gpu_scale([size for size, _, _ in known])
    most = max(v for _, v, _ in known)
    drawn = limit if limit and most >= _NEAR_LIMIT * limit else None
    scale, unit = next((pair for pair in _MEMORY_UNITS if most >= pair[0]), _MEMORY_UNITS[-1])
    y = up_scale(max(most, drawn or 0) / scale, lambda t: f"{units.number(t)} {unit}")
    marks = [
        svg.point(x(s), y(v / scale), "f7", f"{units.number(s)} GPUs: {units.size(v)}", _shape(p)) for s, v, p in known
    ]
    ceiling = _limit(x, y, drawn / scale, units.size(drawn)) if drawn else None
    path = svg.line([(x(s), y(v / scale)) for s, v, _ in known], "s7 line")
    name = f"memory a GPU, of {units.size(limit)}" if limit and not drawn else "memory a GPU"
    drawing = svg.svg(svg.axes(x, y, "GPUs", name), ceiling, path, *marks, about="memory a GPU over cluster size")
    return Plot("memory", "Memory a GPU", drawing, Table(["GPUs", "memory_bytes"], [[s, v] for s, v, _ in known]))
