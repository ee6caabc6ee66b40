"""Turns the collectives of a replay into a plot of bus bandwidth over size, with a line of latency and bandwidth fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaletrace.view import units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot
from scaletrace.view.report.html import Cell, Html, Table
from scaletrace.view.report.read import Document, num, rows

MOST_SERIES = 6
"""Kinds of collectives that are drawn, those with the most time; the table has all."""


@dataclass(frozen=True, slots=True)
class Series:
    """One kind of collective on one axis: sizes in bytes, bus bandwidth and mean time of one transfer."""

    name: str
    size_bytes: list[float]
    busbw_Bps: list[float]
    transfer_ns: list[float]
    total_ns: float


@dataclass(frozen=True, slots=True)
class Fit:
    """t = latency + size / rate; bus bandwidth of size s is factor · s / t. Least squares on relative errors."""

    latency_ns: float
    rate_Bps: float
    factor: float

    def busbw_Bps(self, size_bytes: float) -> float:
        return self.factor * size_bytes / (self.latency_ns * 1e-9 + size_bytes / self.rate_Bps)


def series_of(doc: Document) -> list[Series]:
    """The collectives by axis, kind and group size, those with the most time first; rows without bandwidth are left out."""
    found: dict[str, Series] = {}
    for item in rows(doc.get("collectives")):
        size, rate, count = (num(item.get(key)) for key in ("bytes", "busbw_Bps", "count"))
        total = num(item.get("transfer_ns"))
        if not size or not rate or size <= 0 or rate <= 0 or not count or not total:
            continue
        members = num(item.get("members")) or count
        name = _name(item)
        series = found.setdefault(name, Series(name, [], [], [], 0.0))
        series.size_bytes.append(size)
        series.busbw_Bps.append(rate)
        series.transfer_ns.append(total / members)
        found[name] = Series(name, series.size_bytes, series.busbw_Bps, series.transfer_ns, series.total_ns + total)
    return sorted(found.values(), key=lambda s: -s.total_ns)


def _name(item: Mapping[str, Any]) -> str:
    return units.clean(
        f"{item.get('axis') or '?'} {item.get('kind') or '?'} ×{units.number(num(item.get('group_size')))}", 60
    )


def fit(series: Series) -> Fit | None:
    """Latency and rate of a series with at least three different sizes; None where they can't be told apart."""
    size, rate = np.array(series.size_bytes), np.array(series.busbw_Bps)
    if len(np.unique(size)) < 3:
        return None
    time_ns = size / rate * 1e9
    weight = 1 / time_ns
    columns = np.stack([np.ones(len(size)), size], axis=1) * weight[:, None]
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(size)), rcond=None)[0].tolist()
    if per_byte <= 0 or latency < 0:
        return None
    return Fit(float(latency), 1e9 / float(per_byte), 1.0)


def collectives(doc: Document) -> Plot | None:
    """Bus bandwidth over size, both by logarithm, a colour a kind, a line where latency and bandwidth can be fitted."""
    every = series_of(doc)
    if not every:
        return None
    drawn = every[:MOST_SERIES]
    x = _log_scale(
        [s for one in drawn for s in one.size_bytes], svg.LEFT + 10, svg.WIDTH - svg.RIGHT - 10, 2, units.size
    )
    y = _log_scale([r for one in drawn for r in one.busbw_Bps], svg.HEIGHT - svg.BOTTOM, svg.TOP, 10, units.rate)
    parts: list[Html] = []
    names = []
    for colour, one in enumerate(drawn):
        model = fit(one)
        if model is not None:
            parts.append(
                svg.line([(x(s), y(model.busbw_Bps(s))) for s in np.geomspace(x.low, x.high, 40)], f"s{colour} line")
            )
        for size, rate in sorted(zip(one.size_bytes, one.busbw_Bps, strict=True)):
            parts.append(
                svg.point(x(size), y(rate), f"f{colour}", f"{one.name}: {units.size(size)} at {units.rate(rate)}")
            )
        names.append((colour, units.shorten(one.name, 26) + _words(model)))
    keys, room = svg.legend(names, svg.HEIGHT + 16)
    about = "bus bandwidth of the collectives over their size"
    drawing = svg.svg(
        svg.axes(x, y, "bytes of one collective", "bus bandwidth"),
        *parts,
        keys,
        about=about,
        height=svg.HEIGHT + 8 + room,
    )
    return Plot("collectives", "Collectives: size against bandwidth", drawing, _table(doc))


def _words(model: Fit | None) -> str:
    """The fitted model in the legend."""
    return "" if model is None else f": {units.duration(model.latency_ns)} + size/{units.rate(model.rate_Bps)}"


def _log_scale(values: Sequence[float], start: float, end: float, base: float, label: Any) -> svg.Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = low / 2, high * 2
    ticks = [t for t in svg.log_ticks([low, high], base, 6) if low * 0.999 <= t <= high * 1.001]
    if len(ticks) < 2:
        ticks = [low, high]
    return svg.Scale(low * 0.8, high * 1.25, start, end, log=True, ticks=[(t, label(t)) for t in ticks])


def _table(doc: Document) -> Table:
    columns = ["axis", "kind", "ranks", "bytes", "count", "wait", "transfer", "bus bandwidth"]
    keys = ("group_size", "bytes", "count", "wait_ns", "transfer_ns", "busbw_Bps")
    shows = (units.number, units.size, units.number, units.duration, units.duration, units.rate)
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for item in rows(doc.get("collectives")):
        names: list[Cell] = [units.clean(item.get("axis") or "?", 40), units.clean(item.get("kind") or "?", 80)]
        values = [num(item.get(key)) for key in keys]
        raw.append([*names, *values])
        shown.append([*names, *(show(value) for show, value in zip(shows, values, strict=True))])
    return Table(["axis", "kind", "ranks", *keys[1:]], raw, []) if not shown else Table(columns, raw, shown)
