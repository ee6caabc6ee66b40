"""Turns spans that end impossibly late into spans that end where their surroundings say, and counts them.

Two kinds: Python frames that the profiler closed only when it stopped, after their caller had returned, and device
records that run past many successors of a stream, which executes one record at a time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.cats import DEVICE_CATS, PYTHON_CATS
from scaletrace.parse.events import MISSING, TIME_UNKNOWN, Events, IntArray
from scaletrace.parse.health import Health

FRAMES = "Python frames clipped to their caller"
RECORDS = "GPU records that ran past their successors"

SUCCESSORS = 8
OVERRUN_NS = 10_000_000
"""A record is bad data when it runs past this many successors by this long; real overlaps are far below both."""


def clip_overruns(events: Events, health: Health) -> Events:
    """The same events with such ends clipped; the table itself where there are none."""
    dur_ns = events.dur_ns
    for reason, kind in ((FRAMES, _frames), (RECORDS, _records)):
        clipped = kind(events, dur_ns)
        changed = int((clipped != dur_ns).sum())
        if changed:
            health.clipped[reason] += changed
            dur_ns = clipped
    return events if dur_ns is events.dur_ns else replace(events, dur_ns=dur_ns)


def _frames(events: Events, dur_ns: IntArray) -> IntArray:
    """Durations with every Python frame ending with its Python parent at the latest."""
    rows = np.flatnonzero(events.in_cats(*PYTHON_CATS) & (events.ts_ns != TIME_UNKNOWN))
    ids = events.ints("Python id")[rows]
    if not len(rows) or (ids == MISSING).all():
        return dur_ns
    order = np.argsort(ids, kind="stable")
    parent_ids = events.ints("Python parent id")[rows]
    at = np.minimum(np.searchsorted(ids[order], parent_ids), len(rows) - 1)
    found = (ids[order[at]] == parent_ids) & (parent_ids != MISSING)
    parents = np.where(found, rows[order[at]], MISSING)
    same_lane = events.lane[np.maximum(parents, 0)] == events.lane[rows]
    end_ns = events.ts_ns + dur_ns
    _clip_to_parents(rows, np.where(same_lane, parents, MISSING), events.ts_ns, end_ns)
    return end_ns - events.ts_ns


@jit
def _clip_to_parents(rows: IntArray, parents: IntArray, start: IntArray, end: IntArray) -> None:
    for k in range(len(rows)):
        row, above = rows[k], parents[k]
        if above >= 0 and start[row] >= start[above] and start[row] <= end[above] < end[row]:
            end[row] = end[above]


def _records(events: Events, dur_ns: IntArray) -> IntArray:
    """Durations with device records clipped to their next successor where they ran past many by long."""
    work = np.flatnonzero(events.in_cats(*DEVICE_CATS) & (events.ts_ns != TIME_UNKNOWN) & (events.ph == ord("X")))
    work = work[np.argsort(events.lane[work], kind="stable")]
    if len(work) <= SUCCESSORS:
        return dur_ns
    lane, start = events.lane[work], events.ts_ns[work]
    end = start + dur_ns[work]
    passed = np.zeros(len(work), np.bool_)
    ahead = start[SUCCESSORS:]
    passed[:-SUCCESSORS] = (lane[SUCCESSORS:] == lane[:-SUCCESSORS]) & (end[:-SUCCESSORS] - ahead > OVERRUN_NS)
    bad = np.flatnonzero(passed)
    if not len(bad):
        return dur_ns
    out = dur_ns.copy()
    out[work[bad]] = np.minimum(dur_ns[work[bad]], start[bad + 1] - start[bad])
    return out
