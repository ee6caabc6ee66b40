"""Turns a graph with start and end times into rows to draw: which nodes are slices, on which lane, on which extra track."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import Graph, GraphLane, NodeKind

DRAWN = (
    NodeKind.HOST,
    NodeKind.LAUNCH,
    NodeKind.WAIT,
    NodeKind.KERNEL,
    NodeKind.COPY,
    NodeKind.TRANSFER,
    NodeKind.STALL,
)
"""Kinds that take time. ARRIVE is the beginning of its TRANSFER's slice; hubs, origins and step marks take none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One timeline to draw: the replayed one (no label), the measured one, a projected one.

    start_ns, end_ns int64[n] for all nodes of `graph`; `known` bool[n] says which nodes have times.
    """

    label: str
    graph: Graph
    start_ns: IntArray
    end_ns: IntArray
    known: BoolArray


@dataclass(frozen=True, slots=True)
class Rows:
    """The slices of one variant, k rows sorted by (lane, start, longest first).

    node    int64[k]  node that the slice stands for (TRANSFER for a collective member)
    lane    int64[k]  index into graph.lanes
    level   int64[k]  0 for the lane's own track, 1 … for its extra tracks
    start_ns, end_ns  int64[k]; a member's slice starts when the member is ready, so it holds its wait
    wait_ns int64[k]  that wait, 0 for others
    row_of  int64[n]  row of each node, -1 where it is not drawn; an ARRIVE node has the row of its TRANSFER
    """

    variant: Variant
    node: IntArray
    lane: IntArray
    level: IntArray
    start_ns: IntArray
    end_ns: IntArray
    wait_ns: IntArray
    row_of: IntArray

    def __len__(self) -> int:
        return len(self.node)

    @property
    def rank(self) -> IntArray:
        return self.variant.graph.rank[self.node].astype(np.int64)


@jit
def split_crossing(lane: IntArray, start: IntArray, end: IntArray, nests: BoolArray) -> IntArray:
    """Extra-track number of each slice, so that on every track slices nest (or, where lanes don't nest, never overlap).

    Rows are sorted by (lane, start, longest first); `nests` is per lane. The first track that fits is taken.
    """
    n = len(lane)
    level = np.zeros(n, np.int64)
    parent = np.full(n, -1, np.int64)
    top = np.full(64, -1, np.int64)
    used = 0
    for i in range(n):
        if i == 0 or lane[i] != lane[i - 1]:
            top[:used] = -1
            used = 0
        placed = False
        for k in range(used):
            while top[k] >= 0 and end[top[k]] <= start[i]:
                top[k] = parent[top[k]]
            if top[k] < 0 or (nests[lane[i]] and end[i] <= end[top[k]]):
                parent[i], level[i], top[k], placed = top[k], k, i, True
                break
        if not placed:
            if used == len(top):
                grown = np.full(2 * used, -1, np.int64)
                grown[:used] = top
                top = grown
            level[i], top[used] = used, i
            used += 1
    return level


def arrival_of(graph: Graph) -> IntArray:
    """int64[n]: for each TRANSFER node its member's ARRIVE node, -1 elsewhere. Members meet by (instance, rank)."""
    out = np.full(len(graph), -1, np.int64)
    arrive = np.flatnonzero((graph.kind == NodeKind.ARRIVE) & (graph.instance >= 0))
    transfer = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    if not len(arrive) or not len(transfer):
        return out
    width = int(graph.rank.max()) + 1
    keys = graph.instance[arrive].astype(np.int64) * width + graph.rank[arrive]
    order = np.argsort(keys, kind="stable")
    wanted = graph.instance[transfer].astype(np.int64) * width + graph.rank[transfer]
    at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    hit = keys[order][at] == wanted
    out[transfer[hit]] = arrive[order][at[hit]]
    return out


def lay_out(variant: Variant, ranks: Sequence[int] | None = None) -> Rows:
    """Choose, sort and split the slices of `variant`, of some ranks only if given."""
    graph = variant.graph
    shown = graph.nodes(*DRAWN) & variant.known & (graph.lane >= 0)
    if ranks is not None:
        shown &= np.isin(graph.rank, np.asarray(ranks, np.int64))
    node = np.flatnonzero(shown).astype(np.int64)
    arrival = arrival_of(graph)
    begin = variant.start_ns.copy()
    member = np.flatnonzero((arrival >= 0) & shown)
    member = member[variant.known[arrival[member]]]
    begin[member] = np.minimum(variant.start_ns[arrival[member]], variant.start_ns[member])
    start, end, lane = begin[node], variant.end_ns[node], graph.lane[node].astype(np.int64)
    order = np.lexsort((-end, start, lane))
    node, lane, start, end = node[order], lane[order], start[order], end[order]
    nests = np.array([not lane.is_device for lane in graph.lanes] or [False], np.bool_)
    row_of = np.full(len(graph), -1, np.int64)
    row_of[node] = np.arange(len(node))
    row_of[arrival[member]] = row_of[member]
    level = split_crossing(lane, start, end, nests)
    return Rows(variant, node, lane, level, start, end, variant.start_ns[node] - start, row_of)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which "stream 7" stands before "stream 20"."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d{1,18})", name)
        if part
    )


def lane_key(lane: GraphLane) -> tuple[bool, tuple[tuple[int, int, str], ...]]:
    """Stable order of a rank's lanes: threads before streams, each by number, the same on every rank."""
    return lane.is_device, _natural(lane.name)
