"""Turns JSON answers into the sections of a report: which plots, tables and sentences each answer gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaletrace.view import terminal, units
from scaletrace.view.report import curve, replay
from scaletrace.view.report.change import before_after, change_headline, changes, whatif_headline
from scaletrace.view.report.chart import Plot
from scaletrace.view.report.collectives import collectives
from scaletrace.view.report.html import Cell, Html, Table, csv_link, join, tag
from scaletrace.view.report.layouts import layouts, layouts_headline
from scaletrace.view.report.limits import utilization
from scaletrace.view.report.read import Document, mapping, num, rows, schema_of
from scaletrace.view.report.recorded import layers as layers_of
from scaletrace.view.report.words import named, shown_value

Draw = Callable[[Document], Plot | None]

_TITLES = {
    "replay": "Replay",
    "whatif": "What if",
    "diff": "Two runs compared",
    "extrapolate": "Scaling",
    "search": "Layouts",
    "inspect": "What was recorded",
    "limits": "Limits of training",
}
_PLOTS: tuple[Draw, ...] = (
    curve.curve,
    curve.throughput,
    curve.exposed_by_axis,
    curve.memory,
    layouts,
    before_after,
    replay.breakdown,
    replay.exposed_axis_bars,
    replay.axis_bars,
    replay.stragglers,
    replay.path_strip,
    collectives,
    utilization,
    changes,
)
"""All plots; each draws what an answer has and is left out where it has nothing to draw."""
_ONE_LAYOUT = (
    "One layout was tried at each size; scaletrace search CAPTURE --gpus N compares others, and --layout asks for one."
)
_PARTS = ("exposed_comm", "overlapped_comm")
"""Parts of a step whose names are keys."""
MOST_OPEN = 12
"""Rows of a table that stands open; longer ones open on demand."""
_FRAME = ("schema", "scaletrace_version", "input", "health")
_DRAWN = {
    "diff": ("path",),
    "search": ("best", "next"),
    "limits": ("curve",),
}
"""Parts that a plot shows, by kind of answer; the rest is listed in tables."""
_TOLD = ("headline", "fit", "capture", "captures", "layout_text", "profiler_cost")
"""Parts that a sentence of the page or of the health remarks says in words."""
_DRAWN_ELSE = ("points", "breakdown", "breakdown_before", "collectives", "stragglers", "critical_path", "steps")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: an id to jump to, a title, a sentence for the top of the page, and what it shows."""

    id: str
    title: str
    headline: str
    plots: Sequence[Plot] = ()
    before: Sequence[Html] = field(default_factory=tuple)
    after: Sequence[Html] = field(default_factory=tuple)


def sections_of(documents: Sequence[Document]) -> list[Section]:
    """One section an answer, scaling first, then one on where everything comes from."""
    order = list(_TITLES)
    ranked = sorted(documents, key=lambda d: _order(schema_of(d), ["extrapolate", "search", "replay", *order]))
    seen: Counter[str] = Counter()
    out = []
    for doc in ranked:
        kind = schema_of(doc) or "answer"
        seen[kind] += 1
        out.append(_section(doc, kind, seen[kind]))
    return [*out, _origins(ranked)]


def _order(kind: str, order: Sequence[str]) -> int:
    return order.index(kind) if kind in order else len(order)


def _section(doc: Document, kind: str, number: int) -> Section:
    title = _TITLES.get(kind, units.clean(kind, 40))
    source = units.clean(doc.get("input") or "", 120)
    plots = [plot for draw in _PLOTS if (plot := draw(doc)) is not None]
    before = [tag("p", f"from {source}", class_="soft")] if source else []
    if rows(doc.get("steps")):
        before.append(_steps(doc))
    after = [_facts(doc), *layers_of(doc), *_tables(doc), *_health(doc)]
    name = "".join(c for c in kind if c.isascii() and c.isalnum()) or "answer"
    return Section(
        f"{name}-{number}", title if number == 1 else f"{title} {number}", _headline(doc, kind), plots, before, after
    )


def _headline(doc: Document, kind: str) -> str:
    if kind == "replay":
        return terminal.replay_headline(doc)
    if kind == "extrapolate":
        return terminal.curve_headline(doc)
    if kind == "whatif":
        return whatif_headline(doc)
    if kind == "search":
        return layouts_headline(doc)
    return str(doc.get("headline") or "") or change_headline(doc)


def _steps(doc: Document) -> Html:
    """Step by step: measured against replayed, or before against after."""
    steps = rows(doc.get("steps"))
    columns = list(
        dict.fromkeys(str(key) for step in steps for key in step if not isinstance(step[key], Mapping | list))
    )
    raw: list[list[Cell]] = [[_plain(step.get(c)) for c in columns] for step in steps]
    shown = [[row[i] if c == "step" else shown_value(c, row[i]) for i, c in enumerate(columns)] for row in raw]
    told = schema_of(doc) == "replay" and len(steps) > 1
    about = [tag("p", terminal.STEP_ROWS, class_="soft")] if told else []
    table = Table(columns, raw, shown)
    return join(table.to_html("Steps"), *about, csv_link(table, "steps.csv"))


def _plain(value: Any) -> Cell:
    return value if value is None or units.is_number(value) else units.clean(value, 400)


def _drawn(doc: Document) -> Sequence[str]:
    return _DRAWN.get(schema_of(doc), _DRAWN_ELSE)


def _facts(doc: Document) -> Html:
    """The plain values of an answer (and of its small groups of values), by name; what does not apply is left out."""
    found: list[Html] = []
    for key, value in doc.items():
        if key in _FRAME or key in _drawn(doc) or key in _TOLD or value is None or value in ([], {}):
            continue
        if isinstance(value, Mapping) and not any(isinstance(v, Mapping) or rows(v) for v in value.values()):
            text = _group(str(key), value)
        elif isinstance(value, list) and not rows(value):
            text = ", ".join(shown_value(str(key), v) for v in value[:40])
        elif isinstance(value, Mapping | list):
            continue
        else:
            text = shown_value(str(key), value)
        if text:
            found += [tag("dt", named(str(key), schema_of(doc))), tag("dd", text)]
    return tag("dl", *found) if found else Html("")


def _group(group: str, values: Mapping[Any, Any], most: int = 40) -> str:
    """The values of a group by name; what is not known is left out."""
    parts = []
    for key, value in list(values.items())[:most]:
        if value is not None:
            name = named(str(key), group)
            parts.append(f"{name}{':' * name.isdigit()} {_nested(str(key), value, group)}")
    return ", ".join(parts)


def _nested(key: str, value: Any, group: str) -> str:
    """A value of a group, or a short list of values."""
    if not isinstance(value, list):
        return shown_value(key, value, group)
    return ", ".join(shown_value(key, v, group) for v in value[:40]) or "none"


def _records(value: Any) -> list[Mapping[str, Any]]:
    """The records of a list, or of a mapping from names to records."""
    if isinstance(value, Mapping) and value and all(isinstance(v, Mapping) for v in value.values()):
        return [{"name": key, **record} for key, record in value.items()]
    return rows(value)


def _tables(doc: Document) -> list[Html]:
    """Lists of records that no plot shows, and the best layouts, as tables."""
    out = []
    best = mapping(doc.get("best_layout_by_gpus"))
    if best and not curve.best_points(doc)[1]:
        out.append(tag("p", _ONE_LAYOUT, class_="soft"))
    elif best:
        layouts: list[list[Cell]] = [[units.clean(k, 20), terminal.layout_text(v)] for k, v in best.items()]
        out.append(Table(["GPUs", "fastest layout"], layouts).to_html("Fastest layout by size"))
    for key, value in doc.items():
        records = _records(value)
        if not records or key in _drawn(doc) or key in _FRAME or key == "best_layout_by_gpus":
            continue
        columns = list(dict.fromkeys(str(c) for record in records for c in record))[:14]
        raw: list[list[Cell]] = [[_plain_nested(record.get(c)) for c in columns] for record in records]
        shown = [[_shown_nested(c, record.get(c)) for c in columns] for record in records]
        table = Table(columns, raw, shown)
        name = "".join(c if c.isalnum() else "-" for c in str(key))[:40]
        title = named(str(key))
        drawn = table.to_html(title)
        if len(raw) > MOST_OPEN:
            drawn = tag("details", tag("summary", f"{title}: {len(raw)} rows"), drawn)
        out.append(join(drawn, csv_link(table, f"{name}.csv")))
    return out


def _plain_nested(value: Any) -> Cell:
    """Nested values in one cell, as text."""
    if isinstance(value, Mapping):
        middle = num(value)
        return middle if middle is not None else units.clean(", ".join(f"{k}={v}" for k, v in value.items()), 200)
    return units.clean(", ".join(str(v) for v in value), 200) if isinstance(value, list) else _plain(value)


def _shown_nested(key: str, value: Any) -> str:
    """A cell as a reader sees it: layouts as they are written, nested values with their names and units."""
    if key == "layout":
        return terminal.layout_text(value)
    if isinstance(value, Mapping) and num(value) is None:
        return _group(key, value, 12)
    if key == "what" and value in _PARTS:
        return named(str(value))
    return _nested(key, value, "")


def _health(doc: Document) -> list[Html]:
    """What was repaired, clipped, dropped, guessed or unmatched."""
    lines = [line.plain for line in terminal.health_lines(doc)]
    if not lines:
        return []
    listed = tag("ul", *(tag("li", line) for line in lines))
    return [
        tag(
            "details",
            tag("summary", f"Health: {len(lines)} remark{'s' * (len(lines) != 1)} on this answer"),
            tag("div", listed, class_="warn"),
        )
    ]


def _origins(documents: Sequence[Document]) -> Section:
    """Which answer came from which input and version, and how many of its numbers were measured."""
    raw: list[list[Cell]] = []
    for doc in documents:
        health = mapping(doc.get("health"))
        counts = [
            sum(int(num(n) or 0) for n in mapping(health.get(k)).values())
            for k in ("repaired", "dropped", "guessed", "unmatched")
        ]
        known = [terminal.provenance_text(p.get("provenance")) for p in rows(doc.get("points"))]
        origin = ", ".join(f"{n} {word}" for word, n in Counter(known).most_common())
        texts: list[Cell] = [units.clean(doc.get(k) or "", 200) for k in ("schema", "input", "scaletrace_version")]
        raw.append([*texts, *counts, origin or ("measured and replayed" if schema_of(doc) == "replay" else "")])
    columns = ["answer", "input", "version", "repaired", "dropped", "guessed", "unmatched", "points"]
    about = (
        "Measured numbers come from the trace; interpolated and extrapolated ones from models that were fitted to it."
    )
    return Section(
        "origins",
        "Provenance and health",
        "",
        (),
        [tag("p", about, class_="soft")],
        [Table(columns, raw).to_html("Where the numbers come from")],
    )
