"""Turns the kernels of all ranks into how much longer each rank's take than the same ones elsewhere.

Kernels beside a collective are slower, also beside one that only waits, so a rank that waits for a slow one seems as
slow. Those that run alone are compared: by name and grid, with the median of the other ranks.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from scaletrace.parse.cats import KERNEL_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, IntArray
from scaletrace.parse.job import Job, RankTrace
from scaletrace.parse.match_device import communication_kernels

_LEAST_SHARE = 0.2
"""Kernels that can be compared must make up this share of a rank's kernel time."""


def slower_ns(job: Job) -> dict[int, int]:
    """Time that each rank's kernels take over the whole window beyond the pace of the other ranks; 0 where unknown.

    Negative for a rank that is faster than most.
    """
    alone = {trace.rank: _alone(trace) for trace in job.ranks}
    total = {trace.rank: sum(ns for _, _, ns in alone[trace.rank].values()) for trace in job.ranks}
    out = {}
    for trace in job.ranks:
        mine = alone[trace.rank]
        own = even = held = 0.0
        for key, (median, count, whole_ns) in mine.items():
            peers = [other[key][0] for rank, other in alone.items() if rank != trace.rank and key in other]
            peers = [ns for ns in peers if ns > 0]
            if peers and median > 0:
                own += median * count
                even += float(np.median(peers)) * count
                held += whole_ns
        known = even > 0 and held >= _LEAST_SHARE * total[trace.rank]
        out[trace.rank] = round(total[trace.rank] * (1 - even / own)) if known else 0
    return out


def _alone(trace: RankTrace) -> dict[tuple[str, str], tuple[float, int, float]]:
    """By name and grid: (median ns of the kernels that no collective overlaps, their number, ns of all of them)."""
    events = trace.events
    usable = events.in_cats(*KERNEL_CATS) & (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    talks = communication_kernels(events)[0]
    usable[talks] = False
    rows = np.flatnonzero(usable)
    if not len(rows):
        return {}
    free = ~_overlapped(events.ts_ns[rows], events.end_ns[rows], events.ts_ns[talks], events.end_ns[talks])
    grid = events.texts("grid")[rows]
    _, code = np.unique(np.stack([events.name[rows], grid], axis=1), axis=0, return_inverse=True)
    order = np.argsort(code.reshape(-1), kind="stable")
    groups: dict[tuple[str, str], list[IntArray]] = defaultdict(list)
    for part in np.split(order, np.flatnonzero(np.diff(code.reshape(-1)[order])) + 1):
        row = int(rows[part[0]])
        size = events.strings[int(grid[part[0]])] if grid[part[0]] >= 0 else ""
        groups[(events.name_of(row), size)].append(part)
    out = {}
    for key, parts in groups.items():
        every = np.concatenate(parts)
        single = events.dur_ns[rows[every[free[every]]]]
        median = float(np.median(single)) if len(single) else 0.0
        out[key] = (median, len(single), float(events.dur_ns[rows[every]].sum()))
    return out


def _overlapped(start: IntArray, end: IntArray, other_start: IntArray, other_end: IntArray) -> BoolArray:
    """Which intervals overlap one of the others (sorted by start)."""
    if not len(other_start):
        return np.zeros(len(start), np.bool_)
    reach = np.maximum.accumulate(other_end)
    before = np.searchsorted(other_start, end, side="left") - 1  # the last one that starts before the end
    return np.asarray((before >= 0) & (reach[np.maximum(before, 0)] > start), np.bool_)
