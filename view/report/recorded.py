"""Turns what `inspect` says of a job's layers into a table of a report."""

from __future__ import annotations

from scaletrace.view import units
from scaletrace.view.report.html import Cell, Html, Table, csv_link, tag
from scaletrace.view.report.read import Document, mapping, num, rows


def layers(doc: Document) -> list[Html]:
    """The parts of the model with their time a step on the mean rank, or why no layers were found; [] for other answers."""
    found = mapping(doc.get("layers"))
    parts = rows(found.get("parts"))
    if found and not parts and found.get("why_not"):
        return [tag("p", f"No layers were found: {units.clean(found['why_not'], 300)}", class_="soft")]
    if not parts:
        return []
    keys = ("forward_ns", "backward_ns", "other_ns")
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for part in parts:
        name, count = units.clean(part.get("name") or "", 60), num(part.get("count"))
        times, share = [num(part.get(key)) for key in keys], num(part.get("share"))
        raw.append([name, count, *times, share])
        shown.append([name, units.number(count), *(units.duration(t or None) for t in times), units.percent(share)])
    heads = ["part", "how many", *(key.removesuffix("_ns") for key in keys), "share"]
    rule = units.clean(found.get("rule") or "", 60)
    title = f"Layers, time a step{f' (found by {rule})' if rule else ''}"
    csv = Table(["part", "count", *keys, "share"], raw)
    return [Table(heads, raw, shown).to_html(title), csv_link(csv, "layers.csv")]
