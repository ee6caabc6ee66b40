"""Turns the operators of threads beside the main one into chains of their own, with edges from and to the main thread.

A thread goes on by itself over short gaps; after a longer one something woke it, and what the main thread had just ended
is the best evidence of what that was. The main thread in turn waits for another one where it stands idle until that one's
operator ends: for a loader thread that prepares the batch, for a schedule's worker, for a thread that it joins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_waits import idle_leaves
from scaletrace.parse.cats import OP_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, LOADER, NO_RELEASE, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import layers_at, outermost, step_of, thread_name
from scaletrace.parse.job import RankTrace

BURST_NS = 100_000
"""Gaps up to this a thread spends between two operators of its own."""
JOIN_LEAST_NS = 300_000
JOIN_TAIL_NS = 200_000
LOADER_TAIL_NS = 1_500_000
TAIL_SHARE = 0.05
"""Of a long wait: on a busy host whoever waits is woken, and gets the interpreter, milliseconds late."""
PLACED = "operators of other threads, placed after what the main thread had just done"
JOINED = "waits of the main thread for another thread, by the end of its operator"


@dataclass(frozen=True, slots=True)
class SideOps:
    """The outermost operators of the threads beside the main one, sorted by (lane, start); empty for most traces."""

    row: IntArray
    lane: Int32Array
    start_ns: IntArray
    end_ns: IntArray

    def __len__(self) -> int:
        return len(self.row)


def side_ops(events: Events, known: IntArray | Int32Array) -> SideOps:
    """Operators on lanes that are neither among `known` (the main thread's and the works') nor without a time."""
    mask = events.in_cats(*OP_CATS) & (events.ts_ns != TIME_UNKNOWN) & ~np.isin(events.lane, known)
    row = outermost(events, np.flatnonzero(mask)) if mask.any() else np.zeros(0, np.int64)
    return SideOps(row, events.lane[row].astype(np.int32), events.ts_ns[row], events.end_ns[row])


@dataclass(frozen=True, slots=True)
class Joins:
    """Stretches [from, to) of the main thread that end with the operator (index into SideOps) of another thread."""

    from_ns: IntArray
    to_ns: IntArray
    op: Int32Array
    loading: BoolArray

    def __len__(self) -> int:
        return len(self.op)


def find_joins(events: Events, ops: SideOps, thread: int, taken_ns: IntArray) -> Joins:
    """Where `thread` stood idle until an operator of another thread ended; stretches around `taken_ns` are explained."""
    if not len(ops):
        none = np.zeros(0, np.int64)
        return Joins(none, none, none.astype(np.int32), none.astype(np.bool_))
    at, to, idle, row = idle_leaves(events, thread, np.zeros(0, np.int64))
    loader = np.array([text.startswith(LOADER) for text in events.strings] + [False], np.bool_)
    loading = (row >= 0) & loader[np.where(row >= 0, events.name[np.maximum(row, 0)], -1)]
    taken = np.sort(taken_ns)
    free = np.searchsorted(taken, at, side="right") == np.searchsorted(taken, to, side="right")
    by_end = np.argsort(ops.end_ns, kind="stable")
    ends = ops.end_ns[by_end]
    last = np.searchsorted(ends, to + 1000, side="right") - 1
    end = ends[np.maximum(last, 0)]
    tail = np.maximum(np.where(loading, LOADER_TAIL_NS, JOIN_TAIL_NS), TAIL_SHARE * (to - at))
    fits = (idle | loading) & free & (last >= 0) & (to - at > JOIN_LEAST_NS) & (end > at) & (to - end <= tail)
    pick = np.flatnonzero(fits)
    return Joins(at[pick], to[pick], by_end[last[pick]].astype(np.int32), loading[pick])


@dataclass(frozen=True, slots=True)
class _Order:
    """How the operators follow each other: time since the last one of the thread (0 for its first), whether there is one,
    whether something woke the thread before this one, and whether it spent the time between by itself."""

    gap_ns: IntArray
    same: BoolArray
    woken: BoolArray
    spent: BoolArray


def _order_of(ops: SideOps) -> _Order:
    same = np.zeros(len(ops), np.bool_)
    same[1:] = ops.lane[1:] == ops.lane[:-1]
    gap = np.zeros(len(ops), np.int64)
    gap[1:] = np.where(same[1:], ops.start_ns[1:] - ops.end_ns[:-1], 0)
    woken = ~same | (gap > BURST_NS)
    return _Order(gap, same, woken, ~woken & (gap > 0))


def add_side_ops(
    draft: Draft, trace: RankTrace, ops: SideOps, main: Int32Array, shift_ns: int, health: Health
) -> Int32Array:
    """Nodes of the operators, chained thread by thread and hung on `main`, the nodes of the main thread; their ids."""
    if not len(ops):
        return np.zeros(0, np.int32)
    order, start = _order_of(ops), ops.start_ns + shift_ns
    anchor, anchored_ns = _latest_end(draft, main, start)
    release = np.where(order.woken & (anchor < 0), start, NO_RELEASE)
    node, between = _side_nodes(draft, trace, ops, order, release, shift_ns)
    at = np.flatnonzero(order.spent)
    draft.add_edges(node[at - 1], between, 0, EdgeKind.PROGRAM, EdgeSource.ORDER)
    draft.add_edges(between, node[at], 0, EdgeKind.PROGRAM, EdgeSource.ORDER)
    direct = np.flatnonzero(order.same & ~order.spent)
    lag = np.minimum(order.gap_ns[direct], 0)
    draft.add_edges(node[direct - 1], node[direct], lag, EdgeKind.PROGRAM, EdgeSource.ORDER)
    hung = np.flatnonzero(order.woken & (anchor >= 0))
    draft.add_edges(anchor[hung], node[hung], (start - anchored_ns)[hung], EdgeKind.HAND_OVER, EdgeSource.THREAD)
    draft.contradict(EdgeSource.THREAD, len(hung), 0)
    if len(hung):
        health.guessed[PLACED] += len(hung)
    return node


def _side_nodes(
    draft: Draft, trace: RankTrace, ops: SideOps, order: _Order, release_ns: IntArray, shift_ns: int
) -> tuple[Int32Array, Int32Array]:
    """The nodes of the operators, and those of the time that a thread spent between two of them."""
    events, start = trace.events, ops.start_ns + shift_ns
    steps = [(s.number, s.start_ns, s.end_ns) for s in trace.steps]
    lanes = {
        int(code): draft.lane(trace.rank, thread_name(events, int(code)), False)
        for code in np.unique(ops.lane).tolist()
    }
    lane = np.array([lanes[int(code)] for code in ops.lane], np.int32)
    step, kind = step_of(ops.start_ns, steps), int(NodeKind.HOST)
    node = draft.add_nodes(
        len(ops),
        dur_ns=ops.end_ns - ops.start_ns,
        release_ns=release_ns,
        kind=kind,
        rank=trace.rank,
        lane=lane,
        name=draft.name_codes(events.strings, events.name[ops.row]),
        step=step,
        layer=layers_at(draft, events, ops.lane, ops.start_ns),
        event=ops.row,
        start_ns=start,
        end_ns=ops.end_ns + shift_ns,
    )
    at = np.flatnonzero(order.spent)
    where = {"kind": kind, "rank": trace.rank, "lane": lane[at], "name": draft.name(BETWEEN), "step": step[at]}
    gap = order.gap_ns[at]
    return node, draft.add_nodes(len(at), dur_ns=gap, start_ns=start[at] - gap, end_ns=start[at], **where)


def _latest_end(draft: Draft, main: Int32Array, time_ns: IntArray) -> tuple[Int32Array, IntArray]:
    """The node of `main` that ended last before each time, -1 without, and when it ended."""
    if not len(main):
        return np.full(len(time_ns), -1, np.int32), np.zeros(len(time_ns), np.int64)
    end = draft.nodes()["end_ns"][main]
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], time_ns, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where(at >= 0, main[found], -1).astype(np.int32), end[found]


def add_joins(draft: Draft, ops: SideOps, joins: Joins, node: Int32Array, wait: Int32Array, health: Health) -> None:
    """Edges from the operators to the WAIT nodes of the main thread that they ended, at one lag a kind of wait."""
    if not len(joins):
        return
    after = joins.to_ns - ops.end_ns[joins.op]
    health.guessed[JOINED] += len(joins)
    draft.contradict(EdgeSource.THREAD, len(joins), 0)
    for loading, kind in ((True, EdgeKind.DATALOADER), (False, EdgeKind.HAND_OVER)):
        pick = np.flatnonzero(joins.loading == loading)
        if len(pick):
            lag = np.minimum(int(np.median(after[pick])), after[pick])
            draft.add_edges(node[joins.op[pick]], wait[pick], lag, kind, EdgeSource.THREAD)
