"""Turns begin and end events, as other exporters write them, into complete ones: by nesting on each thread, in columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Int32Array, IntArray
from scaletrace.parse.health import Health

BEGIN, END, COMPLETE = ord("B"), ord("E"), ord("X")
NO_END = "begin events without an end, left out"
NO_BEGIN = "end events without a begin, left out"
_MERGED = ("correlation", "external_id", "stream", "device")


def pair(columns: dict[str, npt.NDArray[Any]], missing: int, health: Health) -> tuple[BoolArray, IntArray] | None:
    """(rows to keep, for each row the one that takes its arguments), with ends joined to their begins in place.

    What has no partner has no duration and is not kept.

    columns: those of rawtable.COLUMNS in file order; times with TIME_UNKNOWN where a record has none
    missing: what stands for no name and no number
    None where the file has no such events. An end that names what it ends, ends the innermost of that name; what began
    inside it and is still open has no end. Of events at one time the file's order decides.
    """
    rows = np.flatnonzero((columns["ph"] == BEGIN) | (columns["ph"] == END))
    if not len(rows):
        return None
    timed = rows[columns["ts"][rows] != TIME_UNKNOWN]
    order = timed[np.lexsort((columns["ts"][timed], columns["lane"][timed]))]
    partner = _partners(columns["lane"][order], columns["ph"][order] == BEGIN, columns["name"][order], missing)
    begins = np.flatnonzero((partner >= 0) & (columns["ph"][order] == BEGIN))
    first, last = order[begins], order[partner[begins]]
    columns["ph"][first] = COMPLETE
    columns["dur"][first] = columns["ts"][last] - columns["ts"][first]
    columns["content"][first] += columns["content"][last]
    for name in _MERGED:
        column = columns[name]
        column[first] = np.where(column[first] == missing, column[last], column[first])
    keep, heir = np.ones(len(columns["ph"]), np.bool_), np.arange(len(columns["ph"]))
    keep[rows], heir[last] = False, first
    keep[first] = True
    for reason, phase, paired in ((NO_END, BEGIN, 0), (NO_BEGIN, END, len(last))):
        count = int((columns["ph"][rows] == phase).sum()) - paired
        if count:
            health.unmatched[reason] += count
    return keep, heir


@jit
def _partners(lane: Int32Array, is_begin: BoolArray, name: Int32Array, missing: int) -> IntArray:
    """For each event, in order of lane and time, the position of its partner; -1 = none."""
    out = np.full(len(lane), -1, np.int64)
    stack = np.empty(len(lane), np.int64)
    depth = 0
    for at in range(len(lane)):
        if at and lane[at] != lane[at - 1]:
            depth = 0
        if is_begin[at]:
            stack[depth] = at
            depth += 1
            continue
        top = depth - 1
        if name[at] != missing:
            while top >= 0 and name[stack[top]] != name[at]:
                top -= 1
        if top >= 0:
            out[stack[top]] = at
            out[at] = stack[top]
            depth = top
    return out
