"""Turns the answer of `limits` into a plot of utilization over training compute."""

from __future__ import annotations

import math

from scaletrace.view import terminal, units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot, up_scale
from scaletrace.view.report.html import Html, Table
from scaletrace.view.report.read import Document, num, rows


def utilization(doc: Document) -> Plot | None:
    """Utilization over training FLOP by logarithm, with the end of linear scaling and the wall."""
    points = [(num(p.get("flop")), num(p.get("utilization")), p) for p in rows(doc.get("curve"))]
    known = [(flop, value, p) for flop, value, p in points if flop is not None and flop > 0 and value is not None]
    if len(known) < 2:
        return None
    known.sort(key=lambda item: item[0])
    low, high = known[0][0], known[-1][0]
    ticks = [(t, f"1e{round(math.log10(t))}") for t in svg.log_ticks([low, high], 10) if low <= t <= high]
    x = svg.Scale(low, high, svg.LEFT + 10, svg.WIDTH - svg.RIGHT - 10, log=True, ticks=ticks)
    y = up_scale(max(value for _, value, _ in known), lambda t: f"{t * 100:.0f} %")
    parts: list[Html] = []
    for row, (key, words) in enumerate((("linear_until_flop", "linear until here"), ("wall_flop", "wall"))):
        at = num(doc.get(key))
        if at is not None and low <= at <= high:
            anchor = "end" if x(at) > svg.WIDTH / 2 else "start"
            parts.append(svg.line([(x(at), y.start), (x(at), y.end)], "mark"))
            parts.append(svg.text(x(at) + (-5 if anchor == "end" else 5), y.end + 12 + 17 * row, words, anchor, "halo"))
    for flop, value, p in known:
        about = f"{flop:.3g} FLOP: {units.percent(value)}, {terminal.layout_text(p.get('layout'))}"
        parts.append(svg.point(x(flop), y(value), "f0", about))
    line = svg.line([(x(flop), y(value)) for flop, value, _ in known], "s0 line")
    drawing = svg.svg(
        svg.axes(x, y, "training FLOP", "utilization"), line, *parts, about="utilization over training compute"
    )
    table = Table(
        ["flop", "utilization", "layout"], [[f, v, terminal.layout_text(p.get("layout"))] for f, v, p in known]
    )
    return Plot("utilization", "Utilization over training compute", drawing, table)
