"""Turns the JSON answer of `search` into Rich tables of at most 80 columns: the fastest layouts, and why others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrace.view import units

Document = Mapping[str, Any]
WIDTH = 80
_DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
_SCHEDULES = {"Interleaved1F1B": "interleaved", "ZBVZeroBubble": "ZBV", "InterleavedZeroBubble": "interleaved ZB"}


def search_tables(doc: Document) -> list[RenderableType]:
    """Everything that `scaletrace search` prints."""
    rows = [doc["best"], *doc["next"]]
    seq = next((row["layout"].get("seq") for row in rows if row["layout"].get("seq")), None)
    length = f", {units.number(seq)} tokens a sample" if seq else ""
    title = f"{units.number(doc['gpus'])} GPUs, {doc['model']} on {doc['cluster']}, compute {doc['compute']}{length}"
    out: list[RenderableType] = [Group(Text(units.clean(title, 200), style="bold"), _fastest(rows))]
    if len(rows) > 1:
        out.append(Group(Text("Why they lose, beside the best", style="bold"), _reasons(rows)))
    lost = ", ".join(f"{units.number(count)} {reason}" for reason, count in doc["discarded"].items())
    limit = units.size(doc.get("memory_limit_bytes"))
    out.append(
        Text(
            f"{units.number(doc['candidates'])} candidates within {limit} a GPU, {units.number(doc['evaluated'])} costed"
            + (f"; {lost}" if lost else "")
        )
    )
    big = doc.get("too_large")
    if big:
        need, step = units.size(big["memory_bytes"]), units.seconds(big["step_time_s"])
        out.append(Text(f"too large: {degrees(big['layout'])} would take {step} a step but needs {need} a GPU"))
    if any(row.get("rewritten_step_time_s") is not None for row in rows):
        out.append(
            Text("step: estimate in closed form; rewritten: the measured graph made into that layout and replayed")
        )
    out += [
        Text(f"not rewritten, {number}: {units.clean(row['why_not_rewritten'], 300)}", style="yellow")
        for number, row in enumerate(rows, 1)
        if row.get("why_not_rewritten")
    ]
    return out + [Text(f"note: {units.clean(note, 600)}", style="yellow") for note in doc["health"].get("notes") or ()]


def degrees(layout: Document) -> str:
    """The axes that multiply ranks, with what goes with them: fsdp=64,tp=8 sp,pp=4."""
    words = [f"{axis}={layout[axis]}" for axis in _DEGREES if layout.get(axis, 1) != 1]
    words += [f"zero={layout['zero']}"] if layout.get("zero") else []
    return ",".join(words) or "dp=1"


def schedule(layout: Document) -> str:
    """How a pipeline runs: 1F1B, interleaved ×2, a dash without one."""
    if layout.get("pp", 1) == 1:
        return units.MISSING
    name = str(layout.get("schedule") or "1F1B")
    chunks = layout.get("chunks", 1)
    return _SCHEDULES.get(name, name) + (f" ×{chunks}" if chunks > 1 else "")


def _fastest(rows: Sequence[Document]) -> Table:
    """A row a layout; columns that all rows leave open are left out."""
    confirmed = any(row.get("rewritten_step_time_s") is not None for row in rows)
    again = any(row["layout"].get("recompute", "none") != "none" for row in rows)
    piped = any(row["layout"].get("pp", 1) != 1 for row in rows)
    columns = [("", True), ("layout", False), ("batch", True)]
    columns += [("schedule", False)] if piped else []
    columns += [("recompute", False)] if again else []
    columns += [("step", True)] + ([("rewritten", True)] if confirmed else []) + [("memory", True)]
    lines = []
    for number, row in enumerate(rows, 1):
        layout = row["layout"]
        cells = [str(number), degrees(layout), f"{layout.get('mbs', 1)}×{layout.get('microbatches', 1)}"]
        cells += [schedule(layout)] if piped else []
        cells += [str(layout.get("recompute", units.MISSING))] if again else []
        cells += [units.seconds(row["step_time_s"])]
        cells += [units.seconds(row.get("rewritten_step_time_s"))] if confirmed else []
        cells += [units.size(row["memory_bytes"])]
        lines.append(cells)
    taken = [max(len(name), *(len(line[at]) for line in lines)) + 1 for at, (name, _) in enumerate(columns)]
    room = WIDTH - sum(taken) + taken[1]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for at, (name, right) in enumerate(columns):
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis",
                         max_width=max(8, room - 1) if at == 1 else None)  # fmt: skip
    for cells in lines:
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _reasons(rows: Sequence[Document]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    for name in ("", "behind", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because of", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, row in enumerate(rows, 1):
        behind = units.percent(row.get("behind"), signed=True) if number > 1 else "best"
        why = "; ".join(row.get("reasons") or ()) or units.MISSING
        cells = (str(number), behind, units.percent(row["bubble_fraction"]), units.clean(why, 200))
        table.add_row(*(Text(cell) for cell in cells))
    return table
