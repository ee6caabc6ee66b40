"""Turns the JSON answers of the commands (replay, whatif, extrapolate) into Rich tables of at most 80 columns.

Every function takes the document as a mapping and returns renderables; the caller prints. A part that a document
lacks is left out, a value that is None prints as a dash. Names go through `clean` and into `Text`, never into markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrace.view import units

Document = Mapping[str, Any]

PARTS = (
    ("compute_ns", "compute", "green"),
    ("exposed_comm_ns", "exposed", "red"),
    ("overlapped_comm_ns", "overlapped", "blue"),
    ("memory_ns", "copies", "cyan"),
    ("host_ns", "host", "yellow"),
    ("stall_ns", "stall", "magenta"),
    ("idle_ns", "idle", "bright_black"),
)
"""Parts of a rank's step (docs/cli.md), in the order in which they are drawn. Overlapped communication hides under compute."""

_GLYPHS = {"compute": "█", "exposed": "░", "overlapped": "▓", "copies": "▚", "host": "▄", "stall": "x", "idle": "·"}
"""So that a bar can be read without colours."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 80
_MOST_ROWS = 16


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, scaled between the smallest and the largest; a gap where a value is missing."""
    known = [float(v) for v in values if v is not None and units.is_number(v)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((float(v) - low) * scale)] if v is not None and units.is_number(v) else " " for v in values
    )


def _table(*columns: str, text_columns: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        if index < text_columns:
            table.add_column(column, justify="left", overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """A stacked bar of `width` characters from (value, colour, glyph); rounding is carried on, so widths add up."""
    total = sum(max(value, 0) for value, _, _ in parts)
    out, done, drawn = Text(), 0.0, 0
    for value, colour, glyph in parts:
        done += max(value, 0)
        upto = round(width * done / total) if total else 0
        out.append(glyph * (upto - drawn), style=colour)
        drawn = upto
    return out


def replay_headline(doc: Document) -> str:
    """One sentence: how long the step is, how close the replay is, and what sets it."""
    steps = [s for s in doc.get("steps") or () if s.get("measured_ns")]
    path = doc.get("critical_path") or {}
    parts = []
    if steps:
        parts.append(_steps_phrase(doc, steps))
    if doc.get("mean_abs_error") is not None:
        strict = (doc.get("quality") or {}).get("strict_error")
        without = f" ({units.percent(strict)} without its unexplained stalls)" if units.is_number(strict) else ""
        parts.append(f"replayed within {units.percent(doc['mean_abs_error'])}{without}")
    share = {k: v for k, v in (path.get("share") or {}).items() if units.is_number(v)}
    if share:
        top = max(share, key=lambda k: share[k])
        parts.append(f"the critical path is {units.percent(share[top])} {units.clean(top)}")
    if (late := _straggler_phrase(doc, max(len(steps), 1), bool(steps))) is not None:
        parts.append(late)
    return "; ".join(parts).capitalize() + "." if parts else "No complete step was found."


_STANDS_OUT = 0.02
"""A rank is named in the headline when its peers' pace would save this share of the time."""
_LATE = 0.05
"""Share of a step that others wait for a rank that gets a verdict."""


def _steps_phrase(doc: Document, steps: Sequence[Document]) -> str:
    """How long a step takes: from one to the next on each rank, or from a rank's start and from the first of all ranks."""
    mean = sum(s["measured_ns"] for s in steps) / len(steps)
    step = (doc.get("step_time_ns") or {}).get("measured") or mean
    if len(steps) > 1:
        return f"{len(steps)} steps, {units.duration(step)} from one to the next"
    marked = steps[0].get("step") != -1
    words = "1 step of" if marked else "no step is marked, the window takes"
    if units.duration(mean) == units.duration(step) or abs(mean - step) < 0.001 * step:
        return f"{words} {units.duration(step)}"
    return f"{words} {units.duration(step)} on a rank ({units.duration(mean)} over all ranks)"


def _straggler_phrase(doc: Document, steps: int, by_step: bool) -> str | None:
    """Who was waited for, and whose delay costs the job most; that no rank stands out; None for a single rank."""
    ranks = [s for s in doc.get("stragglers") or () if units.is_number(s.get("caused_wait_ns"))]
    if not ranks:
        return None
    length = (doc.get("critical_path") or {}).get("length_ns") or 0
    worst = max(ranks, key=lambda s: (s.get("shorter_by_ns") or 0, s["caused_wait_ns"]))
    step = " a step" * by_step
    if worst.get("shorter_by_ns") is None:
        return f"rank {worst['rank']} kept each of the others waiting {units.duration(waited_ns(worst, steps))}{step}"
    saves = worst["shorter_by_ns"] >= _STANDS_OUT * length and worst["shorter_by_ns"] > 0
    awaited = max((s for s in ranks if s.get("cause")), key=lambda s: s["caused_wait_ns"], default=None)
    said = []
    if awaited is not None:
        same = awaited is worst or not saves
        said.append(_awaited_phrase(awaited, steps, step, length if same else 0))
    if saves and awaited is not worst:
        said.append(_saving_phrase(worst, steps, step, awaited is not None))
    if not said:
        return "no rank stands out" + _clocks_phrase(ranks, _LATE * length / steps)
    return "; ".join(said) + ("; one step says little about which rank is slow" if by_step and steps == 1 else "")


def _clocks_phrase(ranks: Sequence[Document], least_ns: float) -> str:
    """How far the waits may be off where the clocks of hosts leave at least so much open; an older answer does not tell."""
    doubts = [item["clock_doubt_ns"] for item in ranks if "clock_doubt_ns" in item]
    if None in doubts:
        return " (clocks of hosts can't be compared, so another rank may be late)"
    widest = max(filter(units.is_number, doubts), default=0)
    if not 0 < widest >= least_ns:
        return ""
    return f" (±{units.duration(widest)}, as clocks of hosts are known no better: another rank may be late)"


def waited_ns(item: Document, steps: int) -> float:
    """How long each of the others waited for a rank, a step."""
    each = item.get("each_waited_ns")
    return float(each) if each is not None and units.is_number(each) else (item.get("caused_wait_ns") or 0) / steps


def saved_ns(item: Document, steps: int) -> float:
    """What its peers' pace would save of a step; negative where it would cost."""
    each = item.get("each_shorter_ns")
    return float(each) if each is not None and units.is_number(each) else (item.get("shorter_by_ns") or 0) / steps


def _awaited_phrase(item: Document, steps: int, step: str, length: float) -> str:
    """The rank for which the others waited, why, and what its peers' pace would save."""
    words = f"rank {item['rank']} {units.clean(item['cause'], 40)}"
    if wait := waited_ns(item, steps):
        words += f", the others wait {units.duration(wait)}{step} for it on average"
        words += _clocks_phrase([item], wait / 2)
    saved = item.get("shorter_by_ns") or 0
    gain = units.duration(saved_ns(item, steps)) if saved > 0 else "nothing"
    if not length:
        return words
    if saved >= _STANDS_OUT * length:
        return f"{words}; at its peers' pace the job would gain {gain}{step}"
    then = item.get("then_rank")
    why = ""
    if units.is_number(then):
        own = "more than slow work makes it late (a late start, or work the others lack)"
        why = ", as " + (own if then == item["rank"] else f"rank {then} is nearly as late")
    only = f"only {gain}{step}" if saved > 0 else gain
    return f"{words}; at its peers' pace the job would gain {only}{why}"


def _saving_phrase(item: Document, steps: int, step: str, another: bool) -> str:
    """The rank whose peers' pace would save most although another one, or none, was waited for, with the reason."""
    saved = units.duration(saved_ns(item, steps))
    if wait := waited_ns(item, steps):
        why = f"the others wait {units.duration(wait)}{step} for it on average{_clocks_phrase([item], wait / 2)}"
    elif item.get("ends_last"):
        why = "nobody waits for it, but its work behind the last collective ends the window"
    else:
        why = "nobody waits for it in a collective, but work that follows from its own does"
    most = "rank {} costs most" if another else "rank {} costs"
    return f"{most.format(item['rank'])}{',' if another else ''} {saved}{step}: {why}"


def _titled(title: str, table: Table) -> Group:
    """A title that may be wider than its table."""
    return Group(Text(title, style="bold"), table)


def steps_table(doc: Document) -> RenderableType:
    table = _table("step", "measured", "replayed", "error", text_columns=0)
    for step in doc.get("steps") or ():
        _row(
            table,
            "window" if step.get("step") == -1 else str(step.get("step", units.MISSING)),
            units.duration(step.get("measured_ns")),
            units.duration(step.get("replayed_ns")),
            units.percent(step.get("error"), signed=True),
        )
    rows = [s for s in doc.get("steps") or () if s.get("measured_ns")]
    longer = len(rows) > 1 and "step_time_ns" in doc
    return Group(_titled("Steps", table), *([Text(STEP_ROWS, style="bright_black")] if longer else []))


STEP_ROWS = (
    "A row runs from the end of the step before, on the last rank, to its own. The first has none before it and runs from "
    "the start of the first rank, so it also holds how far ranks are apart and devices behind their hosts."
)
"""What a row of the Steps table is, and why the first is longer than the step time."""


def drawn_parts(part: Document) -> list[tuple[str, str, str, float]]:
    """(key, label, colour, ns) of the parts that add up to `wall_ns`; overlapped communication only where it is one."""
    value = {
        key: part[key] if units.is_number(part.get(key)) else 0 for key in (*(key for key, _, _ in PARTS), "wall_ns")
    }
    with_overlap = sum(value[key] for key, _, _ in PARTS) <= value["wall_ns"]
    return [
        (key, label, colour, value[key]) for key, label, colour in PARTS if with_overlap or key != "overlapped_comm_ns"
    ]


def rank_order(rank: str) -> tuple[int, str]:
    """Sort key: ranks by number, whatever else they are called behind them."""
    return (int(rank), "") if rank.lstrip("-").isdecimal() and len(rank) < 12 else (2**62, rank)


def breakdown_table(doc: Document) -> RenderableType:
    """Parts of each rank's wall time as shares and a bar; of many ranks the first and the most exposed are shown."""
    every = sorted((doc.get("breakdown") or {}).items(), key=lambda item: rank_order(str(item[0])))
    shown = _some_ranks(every)
    drawn = {rank: drawn_parts(part) for rank, part in shown}
    used = [name for name in PARTS if any(key == name[0] and value for p in drawn.values() for key, _, _, value in p)]
    table = _table("rank", "wall", *(label for _, label, _ in used), "", text_columns=0)
    table.columns[-1].justify = "left"
    width = max(_WIDTH - 16 - sum(max(len(label), 6) + 1 for _, label, _ in used), 10)
    for rank, part in shown:
        wall = part.get("wall_ns") or 0
        value = {key: value for key, _, _, value in drawn[rank]}
        cells = [units.clean(rank, 8), units.duration(wall)]
        cells += [units.percent(value[key] / wall) if wall and key in value else units.MISSING for key, _, _ in used]
        blocks = [(ns, colour, _GLYPHS[label]) for _, label, colour, ns in drawn[rank]]
        table.add_row(*(Text(cell) for cell in cells), bar(blocks, width))
    legend = Text("  ")
    for _, label, colour in used:
        legend.append(_GLYPHS[label], style=colour).append(f" {label}  ")
    rest = [Text(f"  {len(shown)} of {len(every)} ranks shown")] if len(shown) < len(every) else []
    return Group(_titled("Where time went", table), legend, *rest)


def _some_ranks(every: list[tuple[str, Document]]) -> list[tuple[str, Document]]:
    """All of a few ranks; of many the first ones and those with the most exposed communication."""
    if len(every) <= _MOST_ROWS:
        return every
    half = _MOST_ROWS // 2
    worst = sorted(every, key=lambda item: -(item[1].get("exposed_comm_ns") or 0))[:half]
    chosen = {str(rank): (rank, part) for rank, part in every[:half] + worst}
    return sorted(chosen.values(), key=lambda item: rank_order(str(item[0])))


def collectives_table(doc: Document) -> RenderableType:
    rows = sorted(doc.get("collectives") or (), key=lambda c: -((c.get("wait_ns") or 0) + (c.get("transfer_ns") or 0)))
    title = (
        "Collectives as replayed, times of the window summed over ranks"
        if len(rows) <= _MOST_ROWS
        else f"Collectives as replayed, times summed over ranks (the {_MOST_ROWS} longest of {len(rows)})"
    )
    table = _table("axis", "kind", "ranks", "bytes", "count", "Σ wait", "Σ transfer", "bus bw", text_columns=2)
    for item in rows[:_MOST_ROWS]:
        _row(
            table,
            units.clean(item.get("axis") or "?", 8),
            units.shorten(item.get("kind") or "?", 16),
            units.number(size if (size := item.get("group_size")) is not None and size > 0 else None),
            units.size(item.get("bytes")),
            units.number(item.get("count")),
            units.duration(item.get("wait_ns")),
            units.duration(item.get("transfer_ns")),
            units.rate(item.get("busbw_Bps")),
        )
    return _titled(title, table)


def stragglers_table(doc: Document) -> RenderableType:
    """For each late rank how long each of the others waited for it, and what its peers' pace would save, per step."""
    steps = max(len([s for s in doc.get("steps") or () if s.get("measured_ns")]), 1)
    table = _table("rank", "others wait (mean)", "at its peers' pace", "verdict", text_columns=0)
    table.columns[-1].justify = "left"
    rows = [s for s in doc.get("stragglers") or () if s.get("caused_wait_ns") or s.get("shorter_by_ns")]
    for item in sorted(rows, key=lambda s: (-(s.get("shorter_by_ns") or 0), -(s.get("caused_wait_ns") or 0)))[:8]:
        saved = item.get("shorter_by_ns")
        _row(
            table,
            str(item.get("rank", units.MISSING)),
            units.duration(waited_ns(item, steps)),
            units.MISSING if saved is None else f"{units.duration(saved_ns(item, steps))} shorter",
            units.clean(item.get("cause") or "-", 40),
        )
    title = "Who made others wait, a step" if doc.get("steps") else "Who made others wait"
    known = any("each_waited_ns" in s for s in rows)
    return Group(_titled(title, table), *([Text(WAITED_ROWS, style="bright_black")] if known else []))


WAITED_ROWS = (
    "Waits are measured, in collectives within a pipeline stage, as inspect shows them; the gain is replayed: it is small "
    "where another rank is as late, and may be large for a rank whose work nobody waits for but the end of the window."
)
"""The two questions that the table on stragglers answers."""


def path_table(doc: Document, most: int = 10) -> RenderableType:
    """Shares of the critical path and its longest segments."""
    path = doc.get("critical_path") or {}
    segments = path.get("segments") or ()
    shares = ", ".join(f"{units.clean(k, 20)} {units.percent(v)}" for k, v in (path.get("share") or {}).items() if v)
    length = path.get("length_ns")
    title = f"Critical path: {units.duration(length)}" + (f" ({shares})" if shares else "")
    table = _table("rank", "lane", "name", "kind", "time", text_columns=4)
    for segment in sorted(segments, key=lambda s: -(s.get("dur_ns") or 0))[:most]:
        _row(
            table,
            str(segment.get("rank", units.MISSING)),
            units.shorten(segment.get("lane") or "", 18),
            units.shorten(segment.get("name") or "", 30),
            units.shorten(segment.get("kind") or "", 14),
            units.duration(segment.get("dur_ns")),
        )
    return _titled(title, table)


_BEHIND = {"of", "that", "whose", "which", "with", "without", "taken", "inferred", "outside", "to", "in", "on", "for"}
_BEHIND |= {"not", "from", "by", "released", "assumed"}
"""Words that end the noun at the start of a reason."""


def one_of(reason: str) -> str:
    """A reason that counts several, said of one: "axes of groups inferred" → "axis of groups inferred"."""
    words = reason.split(" ")
    end = next((i for i, word in enumerate(words) if word.strip(",(") in _BEHIND or "(" in word), len(words))
    if not 0 < end:
        return reason
    noun, comma = words[end - 1].rstrip(","), "," * words[end - 1].endswith(",")
    if noun == "axes":
        noun = "axis"
    elif noun.endswith("ies"):
        noun = f"{noun[:-3]}y"
    elif noun.endswith(("ches", "shes", "sses", "xes")):
        noun = noun[:-2]
    elif noun.endswith("s") and not noun.endswith("ss"):
        noun = noun[:-1]
    return " ".join([*words[: end - 1], noun + comma, *words[end:]])


def health_lines(doc: Document) -> list[Text]:
    """What was repaired, clipped, dropped, guessed or unmatched, a line each; nothing for a clean result."""
    health = doc.get("health") or {}
    lines = []
    for kind in ("repaired", "clipped", "dropped", "guessed", "unmatched"):
        counts = health.get(kind) or {}
        if isinstance(counts, Mapping) and counts:
            what = ", ".join(
                f"{units.number(n)} {units.clean(one_of(reason) if n == 1 else reason, 200)}"
                for reason, n in sorted(counts.items())
            )
            lines.append(Text(f"{kind}: {what}", style="yellow"))
    return lines + [Text(f"note: {units.clean(note, 400)}", style="yellow") for note in health.get("notes") or ()]


def replay_tables(doc: Document) -> list[RenderableType]:
    """Everything that `scaletrace replay` prints, from its JSON answer."""
    out: list[RenderableType] = [Text(replay_headline(doc), style="bold")]
    if isinstance(cost := doc.get("profiler_cost"), Mapping):
        out.append(Text(units.clean(cost.get("sentence"), 400), style="yellow" if cost.get("large") else ""))
    if doc.get("steps"):
        out.append(steps_table(doc))
    if doc.get("breakdown"):
        out.append(breakdown_table(doc))
    if doc.get("collectives"):
        out.append(collectives_table(doc))
    if any(s.get("caused_wait_ns") or s.get("shorter_by_ns") for s in doc.get("stragglers") or ()):
        out.append(stragglers_table(doc))
    if doc.get("critical_path"):
        out.append(path_table(doc))
    return out + list(health_lines(doc))


def _p50(value: Any) -> float | None:
    """A banded number's middle, or the number itself."""
    if isinstance(value, Mapping):
        value = value.get("p50")
    return float(value) if units.is_number(value) else None


UNTOLD = "?"


def band(point: Document) -> str:
    """Half the width of a point's band relative to its middle, as "±4 %"; "?" where the answer says that it tells nothing."""
    value = point.get("step_time_s")
    if isinstance(why := point.get("unknown"), Mapping) and why.get("step_time_band"):
        return UNTOLD
    if not isinstance(value, Mapping) or not all(units.is_number(value.get(k)) for k in ("low", "p50", "high")):
        return units.MISSING
    middle = value["p50"]
    return f"±{(value['high'] - value['low']) / 2 / middle * 100:.0f} %" if middle else units.MISSING


def layout_text(layout: Any) -> str:
    """A layout as the command line writes it: {"fsdp": 64, "tp": 8} → "fsdp=64,tp=8"; degrees of one are left out."""
    if isinstance(layout, Mapping):
        kept = {k: v for k, v in layout.items() if v not in (None, 1, False, "")} or layout
        return units.clean(
            ",".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in kept.items()), 200
        )
    return units.clean(layout, 200) if layout is not None else units.MISSING


def curve_headline(doc: Document) -> str:
    """One sentence: where the knee is, where communication dominates, what to measure next."""
    if doc.get("data_axis_seen") is False:
        return "This trace holds no collective of a data axis, so how the job scales can't be told from it."
    parts = []
    if units.is_number(doc.get("knee_gpus")):
        parts.append(f"scaling bends {_where(doc.get('knee_range_gpus'), doc['knee_gpus'])} GPUs")
    if units.is_number(doc.get("comm_dominates_gpus")):
        parts.append(f"communication dominates from {units.number(doc['comm_dominates_gpus'])} GPUs")
    elif doc.get("points"):
        upto = doc.get("evaluated_to_gpus")
        known = f"at no size up to {units.number(upto)} GPUs" if units.is_number(upto) else "at none of these sizes"
        parts.append(f"communication dominates {known}")
    if doc.get("benchmark_next"):
        parts.append(f"worth measuring next: {', '.join(_worth(doc, n) for n in doc['benchmark_next'])} GPUs")
    return "; ".join(parts).capitalize().replace("gpus", "GPUs") + "." if parts else "No point could be computed."


def _worth(doc: Document, size: Any) -> str:
    """A size to measure, and by how much that narrows the error of communication."""
    narrows = doc.get("benchmark_next_narrows")
    share = _p50(narrows.get(str(size))) if isinstance(narrows, Mapping) else None
    return units.number(size) + (f" (error −{share * 100:.0f} %)" if share is not None else "")


def _where(span: Any, size: Any) -> str:
    """Where in a range of sizes something happens: "between 16 and 32", or "at 32" where the range is that size."""
    if isinstance(span, Sequence) and len(span) == 2 and all(units.is_number(n) for n in span) and span[0] != span[1]:
        return f"between {units.number(span[0])} and {units.number(span[1])}"
    return f"at {units.number(size)}"


def _slowed(point: Document) -> str:
    """What kernels take longer for communication beside them, where it is a percent of the step."""
    parts = point.get("parts")
    share = _p50(parts.get("slowed_compute")) if isinstance(parts, Mapping) else None
    return units.percent(share) if share is not None and share >= 0.01 else units.MISSING


def _largest(point: Document) -> str:
    """The largest part of the step, short enough that no heading is cut."""
    return units.shorten(str(point.get("dominant") or units.MISSING).replace(" communication", " comm."), 18)


_CURVE_COLUMNS: tuple[tuple[str, Callable[[Document], str], bool], ...] = (
    ("GPUs", lambda p: units.number(p.get("gpus")), True),
    ("step", lambda p: units.seconds(_p50(p.get("step_time_s"))), True),
    ("band", band, True),
    ("tok/s\n/GPU", lambda p: units.number(_p50(p.get("tokens_per_s_per_gpu"))), True),
    ("MFU", lambda p: units.percent(_p50(p.get("mfu"))), True),
    ("exposed", lambda p: units.percent(_p50(p.get("exposed_comm_fraction"))), True),
    ("slowed", _slowed, True),
    ("memory", lambda p: units.size(_p50(p.get("memory_bytes"))), True),
    ("largest part", _largest, False),
    ("provenance", lambda p: units.shorten(provenance_text(p.get("provenance")), 14), False),
)
"""Heading, text of a point, and whether it is a number."""


def points_table(points: Sequence[Document]) -> Table:
    """A row a point; columns without a single value are left out, layouts shown where a size has several."""
    layouts = [layout_text(p.get("layout")) for p in points]
    sizes = [p.get("gpus") for p in points]
    columns = list(_CURVE_COLUMNS)
    if len(set(zip(sizes, layouts, strict=True))) > len(set(sizes)):
        columns.append(("layout", lambda p: units.shorten(layout_text(p.get("layout")), 24), False))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    kept = []
    for name, text, is_number in columns:
        cells = [text(point) for point in points]
        if any(cell != units.MISSING for cell in cells):
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
            kept.append(cells)
    for row in zip(*kept, strict=True):
        _row(table, *row)
    return table


def _layouts_line(points: Sequence[Document]) -> str:
    """Which degrees grow with the size and which stay: "layout     fsdp 8, 12, 64; at every size tp=2"; "" unless one a size."""
    found = [p.get("layout") for p in points]
    layouts = [layout for layout in found if isinstance(layout, Mapping)]
    if not layouts or len(layouts) < len(found) or len({p.get("gpus") for p in points}) < len(points):
        return ""
    names = list(dict.fromkeys(name for layout in layouts for name in layout))
    values = {name: [layout.get(name, 1) for layout in layouts] for name in names}
    stays = {name: seen[0] for name, seen in values.items() if all(value == seen[0] for value in seen)}
    moves = [
        f"{units.clean(name, 20)} {', '.join(units.clean(v, 20) for v in seen)}"
        for name, seen in values.items()
        if name not in stays
    ]
    kept = layout_text(stays) if any(v not in (None, 1, False, "") for v in stays.values()) else ""
    parts = [*moves, *([f"at every size {kept}" if moves or len(points) > 1 else kept] if kept else [])]
    return f"layout     {'; '.join(parts)}" if parts else ""


_EXPLAINED = {"step_time_band": "band ?", "mfu": "MFU –"}
"""Numbers that a reader looks for, and how the table shows that they are missing."""


def _dashes(points: Sequence[Document]) -> list[str]:
    """Why a number that the table lacks is not known, a line each; the first reason stands for all sizes."""
    out = []
    for key, shown in _EXPLAINED.items():
        reasons = [
            why[key] for p in points if isinstance(why := p.get("unknown"), Mapping) and isinstance(why.get(key), str)
        ]
        if reasons:
            out.append(f"{shown}: {units.clean(reasons[0], 300)}")
    return out


def curve_table(doc: Document) -> RenderableType:
    """The scaling curve of `scaletrace extrapolate`: a row a point, then one line of plot."""
    points = doc.get("points") or ()
    steps = [_p50(p.get("step_time_s")) for p in points]
    known = [s for s in steps if s is not None]
    table = _titled("Scaling curve", points_table(points))
    lines: list[RenderableType] = [Text(curve_headline(doc), style="bold"), table]
    if known:
        span = f"{units.seconds(min(known))} to {units.seconds(max(known))}"
        lines.append(Text(f"step time  {sparkline(steps)}  {span}"))
    lines += [Text(line) for line in (_layouts_line(points), *_dashes(points)) if line]
    return Group(*lines, *health_lines(doc))


def provenance_text(value: Any) -> str:
    """Provenance as one phrase; a mapping names the weakest of its parts."""
    if isinstance(value, Mapping):
        for word in ("extrapolated", "interpolated", "prior", "measured"):
            if word in value.values() or word in value:
                return word
        return ", ".join(units.clean(v, 40) for v in value.values()) or units.MISSING
    return units.clean(value, 80) if value else units.MISSING
