"""Turns one rank's events into its outermost operators, with each backward node paired to its forward operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.events import BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace, Step

BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True)
class Operators:
    """Outermost operators of the training threads in order of time (k rows).

    row      int64: row in the rank's Events; end_ns int64
    token    int32: equal for operators of the same name and dimensions
    backward bool: an autograd node; partner int32: of a node its forward operator, of an operator its first node, -1
    block    int32: of a backward node, which backward pass it belongs to: each runs by falling sequence numbers
    """

    start_ns: IntArray
    end_ns: IntArray
    row: IntArray
    token: Int32Array
    backward: BoolArray
    partner: Int32Array
    block: Int32Array

    def inside(self, events: Events) -> IntArray:
        """How many operators each one stands for, int64[k]: itself and all that run within it."""
        within = _enclosing(events, self.row, np.flatnonzero(events.in_cats("cpu_op")))
        return np.maximum(np.bincount(within[within >= 0], minlength=len(self.row)), 1)


def outermost(events: Events, step: Step) -> Operators:
    """The operators of one step that no other contains, on all threads that ran any."""
    inside = events.in_cats("cpu_op") & (events.ts_ns >= step.start_ns) & (events.ts_ns < step.end_ns)
    rows = np.flatnonzero(inside)
    order = np.lexsort((-events.dur_ns[rows], events.ts_ns[rows], events.lane[rows]))
    rows = rows[order]
    end = events.end_ns[rows]
    lane = events.lane[rows]
    # A running maximum of ends within each lane: an operator that starts before it is nested.
    reach = np.full(len(rows), np.iinfo(np.int64).min)
    for code in np.unique(lane):
        mine = np.flatnonzero(lane == code)
        reach[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
    rows = rows[events.ts_ns[rows] >= reach]
    rows = rows[np.argsort(events.ts_ns[rows], kind="stable")]
    backward = np.array([text.startswith(BACKWARD) for text in events.strings], np.bool_)[events.name[rows]]
    gathers = np.array(["AccumulateGrad" in text for text in events.strings], np.bool_)[events.name[rows]]
    pairs = np.stack([events.name[rows], events.texts("Input Dims")[rows]], axis=1)
    _, token = np.unique(pairs, axis=0, return_inverse=True)
    sequence = np.where(gathers, -1, _sequences(events, rows))
    partner = _partners(events, rows, backward, sequence)
    passes = np.flatnonzero(backward & (partner >= 0))
    block = np.full(len(rows), -1, np.int32)
    block[passes] = np.concatenate([[0], np.cumsum(np.diff(sequence[passes]) > 0)])[: len(passes)]
    return Operators(
        events.ts_ns[rows], events.end_ns[rows], rows, token.reshape(-1).astype(np.int32), backward, partner, block
    )


def _partners(events: Events, rows: IntArray, backward: BoolArray, sequence: IntArray) -> Int32Array:
    """Match autograd nodes with the last operator before them that, itself or inside, carries their sequence number.

    An operator made of several (a linear layer) has several nodes; all of them name it, and it names the first.
    """
    out = np.full(len(rows), -1, np.int32)
    number = events.ints("Sequence number")
    numbered = np.flatnonzero((number >= 0) & events.in_cats("cpu_op"))
    if not len(rows):
        return out
    within = _enclosing(events, rows, numbered)
    forward = numbered[(within >= 0) & ~backward[np.maximum(within, 0)]]
    owner = within[(within >= 0) & ~backward[np.maximum(within, 0)]]
    nodes = np.flatnonzero(backward & (sequence >= 0))
    if not len(forward) or not len(nodes):
        return out
    order = np.lexsort((events.ts_ns[forward], number[forward]))
    at = np.searchsorted(number[forward][order], sequence[nodes], side="right") - 1
    hit = (at >= 0) & (number[forward][order[np.maximum(at, 0)]] == sequence[nodes])
    found = owner[order[at[hit]]]
    out[nodes[hit]] = found
    out[found[::-1]] = nodes[hit][::-1]
    return out


def _enclosing(events: Events, rows: IntArray, inner: IntArray) -> Int32Array:
    """Position in `rows` of the outermost operator that contains each of `inner`, -1 where none does."""
    out = np.full(len(inner), -1, np.int32)
    for lane in np.unique(events.lane[rows]):
        outer = np.flatnonzero(events.lane[rows] == lane)
        mine = np.flatnonzero(events.lane[inner] == lane)
        at = np.searchsorted(events.ts_ns[rows[outer]], events.ts_ns[inner[mine]], side="right") - 1
        inside = (at >= 0) & (events.ts_ns[inner[mine]] <= events.end_ns[rows[outer[np.maximum(at, 0)]]])
        out[mine[inside]] = outer[at[inside]]
    return out


def all_outermost(trace: RankTrace) -> Operators:
    """The outermost operators of all steps of a rank, one table; partners are rows of the whole table."""
    tables = [outermost(trace.events, step) for step in trace.steps]
    base, partner, block = 0, [], []
    passes = 0
    for table in tables:
        partner.append(np.where(table.partner >= 0, table.partner + base, -1))
        block.append(np.where(table.block >= 0, table.block + passes, -1))
        base += len(table.row)
        passes += int(table.block.max(initial=-1)) + 1
    joined = (
        {
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in ("start_ns", "end_ns", "row", "token", "backward")
        }
        if tables
        else {}
    )
    if not tables:
        empty = np.zeros(0, np.int64)
        return Operators(
            empty, empty, empty, empty.astype(np.int32), empty.astype(np.bool_), *[empty.astype(np.int32)] * 2
        )
    return Operators(
        **joined,
        partner=np.concatenate(partner).astype(np.int32),
        block=np.concatenate(block).astype(np.int32),
    )


def _sequences(events: Events, rows: IntArray) -> IntArray:
    """Autograd sequence number of each outermost operator, taken from the first nested one where it has none itself."""
    number = events.ints("Sequence number")
    out = number[rows].copy()
    known = np.flatnonzero(number >= 0)
    known = known[np.lexsort((events.ts_ns[known], events.lane[known]))]
    for code in np.unique(events.lane[rows]):
        mine = np.flatnonzero((events.lane[rows] == code) & (out < 0))
        inner = known[events.lane[known] == code]
        if not len(mine) or not len(inner):
            continue
        at = np.searchsorted(events.ts_ns[inner], events.ts_ns[rows[mine]])
        hit = at < len(inner)
        found = inner[np.minimum(at, len(inner) - 1)]
        hit &= events.ts_ns[found] < events.end_ns[rows[mine]]
        out[mine[hit]] = number[found[hit]]
    return out
