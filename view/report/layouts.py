"""Turns the answer of `search` into a plot of the best layouts, each step split into its terms, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaletrace.view import layouts as layout_rows
from scaletrace.view import terminal, units
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot, stacked_bars
from scaletrace.view.report.html import Cell, Table
from scaletrace.view.report.read import Document, mapping, num, rows

MOST = 12


def candidates(doc: Document) -> list[Mapping[str, Any]]:
    """The best layout and the next ones, in order."""
    best = mapping(doc.get("best"))
    found = ([best] if best.get("layout") is not None else []) + rows(doc.get("next"))
    return [c for c in found if num(c.get("step_time_s")) is not None]


def layouts_headline(doc: Document) -> str:
    """One sentence: the fastest layout and how far the next one is behind."""
    found = candidates(doc)
    if not found:
        return ""
    best = found[0]
    words = f"At {units.number(num(doc.get('gpus')))} GPUs {terminal.layout_text(best.get('layout'))} is fastest"
    replayed = num(best.get("rewritten_step_time_s"))
    step = num(best.get("step_time_s")) if replayed is None else replayed
    words += f" with {units.seconds(step)} a step" + ("" if replayed is None else " by replay of the measured graph")
    behind = num(found[1].get("behind")) if len(found) > 1 else None
    if len(found) > 1 and found[1].get("within_error") is True:
        words += "; the next layout may be as fast, for all that is known"
    elif behind is not None:
        words += f"; the next layout is {units.percent(behind)} behind"
    return words + "."


def layouts(doc: Document) -> Plot | None:
    """A bar a layout, the fastest first, split into compute, communication, bubble and the other terms of its step."""
    found = candidates(doc)
    if not found:
        return None
    terms = list(dict.fromkeys(str(t) for c in found for t, v in mapping(c.get("terms_s")).items() if num(v)))
    colours = {term: i % len(svg.PALETTE) for i, term in enumerate(terms)}
    used: dict[int, str] = {}
    for term, colour in colours.items():
        name = units.shorten(term.replace("_", " "), 20)
        used[colour] = f"{used[colour]}, {name}" if colour in used else name
    bars = []
    for place, candidate in enumerate(found[:MOST], 1):
        split = {str(t): num(v) or 0.0 for t, v in mapping(candidate.get("terms_s")).items()}
        parts = split if terms else {"step": num(candidate.get("step_time_s")) or 0.0}
        about = terminal.layout_text(candidate.get("layout"))
        pieces = [(colours.get(t, 0), v, f"{about}: {t} {units.seconds(v)}") for t, v in parts.items() if v > 0]
        bars.append((f"#{place}", pieces))
    drawing = stacked_bars(bars, used, "", "step time by the estimate", units.seconds)
    return Plot("layouts", "Fastest layouts", drawing, _table(found, terms))


def _table(found: list[Mapping[str, Any]], terms: list[str]) -> Table:
    columns = [
        "layout",
        "step s",
        "replayed s",
        "behind",
        "samples/s",
        "bubble",
        "memory bytes",
        "why it is behind",
        *(f"{t} s" for t in terms),
    ]
    raw: list[list[Cell]] = []
    shown: list[list[object]] = []
    for candidate in found:
        keys = (
            "step_time_s", "rewritten_step_time_s", "behind", "samples_per_s", "bubble_fraction", "memory_bytes",
        )  # fmt: skip
        step, replayed, behind, samples, bubble, memory = (num(candidate.get(key)) for key in keys)
        reasons = candidate.get("reasons")
        why = units.clean("; ".join(str(r) for r in reasons), 300) if isinstance(reasons, list) else ""
        split = [num(mapping(candidate.get("terms_s")).get(term)) for term in terms]
        layout = terminal.layout_text(candidate.get("layout"))
        raw.append([layout, step, replayed, behind, samples, bubble, memory, why, *split])
        head = [
            units.seconds(step),
            units.seconds(replayed),
            layout_rows.behind(candidate),
            units.number(samples),
            units.percent(bubble),
            units.size(memory),
        ]
        shown.append([layout, *head, why, *(units.seconds(value) for value in split)])
    return Table(columns, raw, shown)
