"""Turns an event table into links between its rows: which call launched a GPU record, which op encloses an event.

Links follow `correlation` to runtime and driver calls only, then containment on the thread. "External id" lives in
another number space; it only confirms an enclosing op whose end a clock inversion has put a little too early.
"""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.cats import DEVICE_CATS, HOST_CATS, OP_CATS, RUNTIME_CATS, STREAM_SYNC_TID, SYNC_CATS
from scaletrace.parse.events import MISSING, TIME_UNKNOWN, BoolArray, CodeArray, Events, IntArray

TICK_NS = 1000
"""Resolution of traces from before torch 2.4."""

OVERHANG_NS = 10_000
"""How far a child with the parent's External id may end after it (host clock inversions on ROCm)."""

_MAX_SEARCH = 4096


def timed(events: Events) -> BoolArray:
    """Mask of the spans (`ph` X) whose time is known."""
    mask: BoolArray = (events.ph == ord("X")) & (events.ts_ns != TIME_UNKNOWN)
    return mask


def gpu_rows(events: Events) -> IntArray:
    """Rows of device work (kernels, copies, sets) with a known time, in order of start."""
    return np.flatnonzero(events.in_cats(*DEVICE_CATS) & timed(events))


def host_mask(events: Events) -> BoolArray:
    """Mask of the spans on host threads, which nest."""
    return events.in_cats(*HOST_CATS) & timed(events)


def launch_of(events: Events) -> IntArray:
    """int64[n]: row of the runtime or driver call that a device record or sync record came from, -1 for all others.

    One call may have many records (CUDA graphs). Of several calls with one correlation the last to start counts,
    since a driver call stands inside the runtime call that made it.
    """
    out = np.full(len(events), MISSING, np.int64)
    calls = np.flatnonzero(events.in_cats(*RUNTIME_CATS) & (events.correlation > 0))
    if not len(calls):
        return out
    records = np.flatnonzero(events.in_cats(*DEVICE_CATS, *SYNC_CATS) & (events.correlation > 0))
    order = np.argsort(events.correlation[calls], kind="stable")
    calls = calls[order]
    ids = events.correlation[calls]
    wanted = events.correlation[records]
    at = np.searchsorted(ids, wanted, side="right") - 1
    found = (at >= 0) & (ids[np.maximum(at, 0)] == wanted)
    out[records[found]] = calls[at[found]]
    return out


def parent_of(events: Events, tick_ns: int | None = None) -> IntArray:
    """int64[n]: row of the innermost host span on the same thread that contains this host span, -1 where none does.

    A span may end up to one tick after its parent (rounded traces), or up to OVERHANG_NS after an op with its own
    External id. Spans that cross are siblings, and spans of asynchronous work ("gloo:send") are never parents.
    """
    rows = np.flatnonzero(host_mask(events))
    asynchronous = _async_names(events)
    out = np.full(len(events), MISSING, np.int64)
    out[rows] = _parents(events, rows, asynchronous[events.name[rows]], tick_of(events) if tick_ns is None else tick_ns)
    return out


def op_of(events: Events, launches: IntArray | None = None) -> IntArray:
    """int64[n]: row of the innermost operator around a host span, or around a device record's launch; -1 where none."""
    host = host_mask(events)
    is_op = events.in_cats(*OP_CATS)
    rows = np.flatnonzero(host & (is_op | events.in_cats(*RUNTIME_CATS)))
    out = np.full(len(events), MISSING, np.int64)
    out[rows] = _parents(events, rows, ~is_op[rows], tick_of(events))
    launches = launch_of(events) if launches is None else launches
    linked = np.flatnonzero(launches != MISSING)
    out[linked] = out[launches[linked]]
    return out


def tick_of(events: Events) -> int:
    """Resolution of the trace in ns: 1000 where every time is a whole microsecond, else 1."""
    known = timed(events)
    for part in (slice(0, 10_000), slice(10_000, None)):  # most traces show it at once
        ts_ns, dur_ns = events.ts_ns[part][known[part]], events.dur_ns[part][known[part]]
        if (ts_ns % TICK_NS).any() or (dur_ns % TICK_NS).any():
            return 1
    return TICK_NS


def self_ns(events: Events, parents: IntArray) -> IntArray:
    """int64[n]: duration minus the time that children cover; never negative. `parents` as from `parent_of`."""
    rows = np.flatnonzero(host_mask(events))
    return _self_ns(rows, events.ts_ns, events.end_ns, parents)


def crossings(events: Events) -> IntArray:
    """int64[k, 2]: pairs of host spans on one thread that overlap without one containing the other (within a tick)."""
    rows = np.flatnonzero(host_mask(events))
    order = np.lexsort((rows, events.lane[rows]))
    return _crossings(rows[order], events.lane, events.ts_ns, events.end_ns, tick_of(events))


def stream_of_sync(events: Events) -> IntArray:
    """int64[n]: the stream that a sync record is about (argument, else its row's tid); -1 for other events."""
    tids = np.array(
        [lane.tid if isinstance(lane.tid, int) and abs(lane.tid) < 1 << 62 else MISSING for lane in events.lanes],
        np.int64,
    )
    tid = tids[events.lane] if len(tids) else np.zeros(len(events), np.int64)
    stream = np.where(
        events.stream == MISSING, np.where(tid >= STREAM_SYNC_TID, tid - STREAM_SYNC_TID, tid), events.stream
    )
    return np.where(events.in_cats(*SYNC_CATS), stream, MISSING)


def _async_names(events: Events) -> BoolArray:
    return np.array([text.startswith("gloo:") for text in events.strings], np.bool_)


def _parents(events: Events, rows: IntArray, barren: BoolArray, tick_ns: int) -> IntArray:
    """Parents of `rows` among `rows`; those marked `barren` have no children."""
    order = np.argsort(events.lane[rows], kind="stable")
    found = _nest(
        rows[order], barren[order], events.lane, events.ts_ns, events.end_ns, events.external_id, tick_ns, OVERHANG_NS
    )
    out = np.empty(len(rows), np.int64)
    out[order] = found
    return out


@jit
def _nest(
    rows: IntArray,
    barren: BoolArray,
    lane: CodeArray,
    start: IntArray,
    end: IntArray,
    external_id: IntArray,
    tick_ns: int,
    overhang_ns: int,
) -> IntArray:
    """Parent row of each of `rows`, which come lane by lane in order of start, longest first."""
    parent = np.full(len(rows), -1, np.int64)
    stack = np.empty(len(rows), np.int64)
    depth, current = 0, -1
    for k in range(len(rows)):
        row = rows[k]
        if lane[row] != current:
            depth, current = 0, lane[row]
        while depth > 0 and end[stack[depth - 1]] <= start[row] and start[stack[depth - 1]] < start[row]:
            depth -= 1
        for level in range(depth - 1, max(depth - 1 - _MAX_SEARCH, -1), -1):
            above = stack[level]
            slack = tick_ns if tick_ns > 1 else 0
            if external_id[row] > 0 and external_id[row] == external_id[above]:
                slack = max(slack, overhang_ns)
            inside = start[row] < end[above] or (start[row] == start[above] and end[row] <= end[above])
            if inside and end[row] <= end[above] + slack:
                parent[k] = above
                break
        if not barren[k]:
            stack[depth] = row
            depth += 1
    return parent


@jit
def _self_ns(rows: IntArray, start: IntArray, end: IntArray, parents: IntArray) -> IntArray:
    own = np.zeros(len(start), np.int64)
    until = end.copy()
    covered = start.copy()
    for row in rows:
        above = parents[row]
        if above >= 0 and until[row] > until[above]:
            until[row] = until[above]
        own[row] = max(until[row] - start[row], 0)
    for row in rows:
        above = parents[row]
        if above >= 0:
            first = max(start[row], covered[above])
            if until[row] > first:
                own[above] -= until[row] - first
                covered[above] = until[row]
    return own


@jit
def _crossings(rows: IntArray, lane: CodeArray, start: IntArray, end: IntArray, tick_ns: int) -> IntArray:
    slack = tick_ns if tick_ns > 1 else 0
    out = np.empty((2 * len(rows), 2), np.int64)
    stack = np.empty(len(rows), np.int64)
    count, depth, current = 0, 0, -1
    for row in rows:
        if lane[row] != current:
            depth, current = 0, lane[row]
        while depth > 0 and end[stack[depth - 1]] <= start[row]:
            depth -= 1
        for level in range(depth - 1, max(depth - 1 - _MAX_SEARCH, -1), -1):
            above = stack[level]
            if start[row] < end[above] - slack and end[row] > end[above] + slack and count < len(out):
                out[count, 0], out[count, 1] = above, row
                count += 1
        stack[depth] = row
        depth += 1
    return out[:count]
