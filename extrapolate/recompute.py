"""Turns forward operators that ran again inside backward (activation checkpointing) into nodes and a phase of their own.

Autograd runs backward without recording gradients, so an operator inside one of its nodes that carries a sequence number
of its own was run to be differentiated: it is forward work, done again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.kernels import Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import NodeWork
from scaletrace.extrapolate.operators import BACKWARD
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.parse.build import Built
from scaletrace.parse.cats import OP_CATS
from scaletrace.parse.events import BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.parse.job import STEADY, Clock

WHOLE = 0.99
"""A stretch of the host counts as run again if this share of it was; of less, that part is cut off it."""
LEAST = 0.02
"""What was run again is worth a look from this share of the forward pass on."""
FULL = 0.5
"""From this share of the layers' forward pass on checkpointing counts as full, below it as selective."""
_INSIDE = re.compile(
    r"Backward\d*$|^autograd::|AccumulateGrad|^torch::autograd|^(Nested)?Redistribute$|^_?(To|From)TorchTensor$"
)
"""What runs inside autograd's nodes and is no forward work, though some of it (DTensor's wrappers) can be differentiated."""


@dataclass(frozen=True, slots=True)
class Again:
    """Operators of one rank that ran again (rows of its events, in order), and the end of what each is part of."""

    row: IntArray
    start_ns: IntArray
    end_ns: IntArray
    lane: Int32Array


def find_again(events: Events) -> Again:
    """The outermost operators with a sequence number of their own inside autograd's nodes.

    The time until the next one belongs to each, as far as it is inside the same node.
    """
    ops = np.flatnonzero(events.in_cats(*OP_CATS))
    node = np.array([text.startswith(BACKWARD) for text in events.strings], np.bool_)[events.name[ops]]
    inner = np.array([bool(_INSIDE.search(text)) for text in events.strings], np.bool_)[events.name[ops]]
    fresh = (events.ints("Sequence number")[ops] >= 0) & ~inner
    library = np.array([text.startswith("aten::") for text in events.strings], np.bool_)
    rows, ends = [], []
    for lane in np.unique(events.lane[ops[node]]).tolist():
        mine = events.lane[ops] == lane
        outer = _outermost(events, ops[mine & node])
        found = ops[mine & fresh]
        at = np.searchsorted(events.ts_ns[outer], events.ts_ns[found], side="right") - 1
        inside = (at >= 0) & (events.end_ns[found] <= events.end_ns[outer[np.maximum(at, 0)]])
        found = _outermost(events, found[inside])
        at = np.searchsorted(events.ts_ns[outer], events.ts_ns[found], side="right") - 1
        # A function of the user's own that only calls another in its backward (an exchange, say) runs nothing again.
        layers = np.isin(at, at[library[events.name[found]]])
        found, at = found[layers], at[layers]
        end = events.end_ns[found].copy()
        follows = at[1:] == at[:-1]
        end[:-1][follows] = events.ts_ns[found[1:][follows]]
        rows.append(found)
        ends.append(end)
    row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    end_ns = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    order = np.argsort(events.ts_ns[row], kind="stable")
    row = row[order]
    return Again(row, events.ts_ns[row], end_ns[order], events.lane[row])


def _outermost(events: Events, rows: IntArray) -> IntArray:
    """Rows of one lane that lie in no other of them, in order of time."""
    rows = rows[np.lexsort((-events.dur_ns[rows], events.ts_ns[rows]))]
    if not len(rows):
        return rows
    reach = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(events.end_ns[rows])[:-1]])
    return rows[events.ts_ns[rows] >= reach]


def with_recompute(built: Built) -> tuple[Built, BoolArray]:
    """(the job with stretches of the host cut where work was run again, mask of the nodes that are such work).

    A job without any is given back as it is.
    """
    graph = built.graph
    found = {trace.rank: find_again(trace.events) for trace in built.job.ranks}
    again = np.zeros(len(graph), np.bool_)
    if not any(len(one.row) for one in found.values()):
        return built, again
    cuts: dict[int, list[tuple[int, int]]] = {}
    for trace in built.job.ranks:
        _look(built, trace.rank, trace.events, found[trace.rank], again, cuts)
    loom = reopen(graph, graph.dur_ns.astype(np.float64))
    names = {trace.rank: trace.events for trace in built.job.ranks}
    first = {node: _cut(graph, loom, node, pieces, names[int(graph.rank[node])]) for node, pieces in cuts.items()}
    for rows in loom.edges[:1]:
        moved = np.array([first.get(int(dst), int(dst)) for dst in rows[:, 1].tolist()], np.int64)
        rows[:, 1] = moved
    woven = loom.finish()
    start, end = built.measured.start_ns[woven.origin], built.measured.end_ns[woven.origin]
    for node in np.flatnonzero(woven.origin < 0).tolist():
        rank, row = int(woven.graph.rank[node]), int(woven.graph.event[node])
        start[node] = _clock(built, rank).to_job_ns(names[rank].ts_ns[row : row + 1])[0]
        end[node] = start[node] + int(woven.graph.dur_ns[node])
    known = np.where(woven.origin >= 0, built.measured.known[woven.origin], True)
    marked = np.where(woven.origin >= 0, again[woven.origin], True)
    measured = replace(built.measured, start_ns=start, end_ns=end, known=known)
    cut_graph = replace(woven.graph, multiplicity=graph.multiplicity)
    return replace(built, graph=cut_graph, measured=measured), _issued(cut_graph, marked)


def _clock(built: Built, rank: int) -> Clock:
    return built.job.clocks.get(rank, STEADY)


def _look(
    built: Built, rank: int, events: Events, found: Again, again: BoolArray, cuts: dict[int, list[tuple[int, int]]]
) -> None:
    """Mark the rank's host nodes that were run again, and collect (row, ns) of what has to be cut off others."""
    graph, clock = built.graph, _clock(built, rank)
    host = np.array([not lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    kinds = np.isin(graph.kind, [int(NodeKind.HOST), int(NodeKind.LAUNCH), int(NodeKind.WAIT)])
    mine = np.flatnonzero((graph.rank == rank) & host & kinds)
    begin, finish = clock.to_own_ns(built.measured.start_ns[mine]), clock.to_own_ns(built.measured.end_ns[mine])
    for lane in np.unique(found.lane).tolist():
        of = found.lane == lane
        rows, starts, ends = found.row[of], found.start_ns[of], found.end_ns[of]
        nodes = mine[np.isin(graph.lane[mine], _lanes(graph, mine, events, lane))]
        at = np.searchsorted(mine, nodes)
        low = np.searchsorted(ends, begin[at], side="right")
        high = np.searchsorted(starts, finish[at], side="left")
        for node, b, f, i, j in zip(nodes.tolist(), begin[at], finish[at], low.tolist(), high.tolist(), strict=True):
            shares = np.minimum(ends[i:j], f) - np.maximum(starts[i:j], b)
            total = int(shares.sum())
            if j > i and (total >= WHOLE * (f - b) or graph.kind[node] != int(NodeKind.HOST)):
                again[node] = f > b or starts[i] < b
            elif total > 0:
                cuts[node] = [(int(r), int(s)) for r, s in zip(rows[i:j], shares, strict=True) if s > 0]


def _lanes(graph: Graph, nodes: IntArray, events: Events, lane: int) -> list[int]:
    """Lanes of the graph that stand for a thread of the trace: those most of whose nodes come from it."""
    known = nodes[graph.event[nodes] >= 0]
    hit = events.lane[graph.event[known]] == lane
    codes = graph.lane[known]
    return [int(code) for code in np.unique(codes[hit]) if 2 * hit[codes == code].sum() > (codes == code).sum()]


def _cut(graph: Graph, loom: Loom, node: int, pieces: list[tuple[int, int]], events: Events) -> int:
    """Cut pieces off a stretch of the host: they come before what is left of it. Returns the first."""
    previous = first = -1
    for row, dur_ns in pieces:
        new = loom.node(
            NodeKind.HOST,
            rank=int(graph.rank[node]),
            lane=int(graph.lane[node]),
            name=loom.name(events.name_of(row)),
            step=int(graph.step[node]),
            event=row,
            dur_ns=dur_ns,
            key=node - 1,
        )
        loom.exact_ns[node] -= dur_ns
        if previous >= 0:
            loom.edge(previous, new, EdgeKind.PROGRAM)
        else:
            first = new
        previous = new
    loom.edge(previous, node, EdgeKind.PROGRAM)
    return first


def _issued(graph: Graph, again: BoolArray) -> BoolArray:
    """`again` with the device work and collectives that those host nodes issued."""
    out = again.copy()
    dst = graph.edge_dst
    handed = np.isin(graph.edge_kind, [int(EdgeKind.LAUNCH), int(EdgeKind.HAND_OVER)])
    out[dst[handed & again[graph.pred]]] = True
    member = np.flatnonzero(graph.instance >= 0)
    key = graph.instance[member].astype(np.int64) * (int(graph.rank.max(initial=0)) + 2) + graph.rank[member]
    out[member] |= np.isin(key, key[out[member]])
    return out


def marked(anatomy: Anatomy, again: BoolArray) -> Anatomy:
    """The anatomy with the phase of work that was run again."""
    if not again.any():
        return anatomy
    return replace(anatomy, phase=np.where(again, int(Phase.RECOMPUTE), anatomy.phase).astype(np.uint8))


def like_forward(graph: Graph, anatomy: Anatomy, work: NodeWork) -> NodeWork:
    """The work of what was run again is that of the forward node of the same name, unit and micro batch, in turn."""
    again = anatomy.phase == int(Phase.RECOMPUTE)
    if not again.any():
        return work
    waiting: dict[tuple[int, ...], list[int]] = {}
    forward = np.flatnonzero(anatomy.phase == int(Phase.FORWARD))

    def key(node: int) -> tuple[int, ...]:
        return (int(graph.rank[node]), int(graph.step[node]), int(anatomy.unit[node]), int(anatomy.micro_batch[node]),
                int(graph.kind[node]), int(graph.name[node]))  # fmt: skip

    for node in forward[::-1].tolist():
        waiting.setdefault(key(node), []).append(node)
    shape, role, mark, computes = list(work.shape), work.role.copy(), work.mark.copy(), work.computes.copy()
    op = work.op.copy()
    for node in np.flatnonzero(again).tolist():
        twins = waiting.get(key(node))
        if twins:
            twin = twins.pop()
            shape[node], role[node], mark[node] = work.shape[twin], work.role[twin], work.mark[twin]
            computes[node], op[node] = work.computes[twin], -1
    return replace(work, shape=tuple(shape), role=role, mark=mark, computes=computes, op=op)


def how_much(anatomy: Anatomy, work: NodeWork) -> str:
    """ "full", "selective" or "none": what share of its layers' forward pass a job runs again, by the FLOP of products
    where shapes are known, else by time."""
    layers = np.array([*anatomy.is_layer, False], np.bool_)[anatomy.unit]
    forward = layers & (anatomy.phase == int(Phase.FORWARD))
    again = anatomy.phase == int(Phase.RECOMPUTE)
    time = np.where(work.computes, anatomy.exact_ns, 0.0)
    if float(time[again].sum()) <= LEAST * float(time[forward].sum()) or not again.any():
        return "none"
    products = np.array(
        [shape.flop if shape is not None and shape.work is Work.MATMUL else 0.0 for shape in work.shape]
    ) * work.computes  # fmt: skip
    size = products if products[forward].any() else time
    return "full" if float(size[again].sum()) >= FULL * float(size[forward].sum()) else "selective"
