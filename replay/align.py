"""Turns two sequences of work (steps, ranks, runs) into pairs of what corresponds: the longest common subsequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind

MOST_EDITS = 1500
"""Sequences that differ in more places are paired up to there only; the rest stays unpaired."""


@jit
def _diff(a: IntArray, b: IntArray, most: int) -> Int32Array:
    """Position in `b` of each element of `a` on a shortest edit path (Myers 1986), -1 where it has none."""
    n, m = len(a), len(b)
    out = np.full(n, -1, np.int32)
    limit = min(n + m, most)
    width = 2 * limit + 3
    trace = np.zeros((limit + 1, width), np.int32)
    v = np.zeros(width, np.int32)
    mid = limit + 1
    reached, final = -1, 0
    best, best_d, best_k = -1, 0, 0
    for d in range(limit + 1):
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and v[mid + k - 1] < v[mid + k + 1])
            x = v[mid + k + 1] if down else v[mid + k - 1] + 1
            y = x - k
            while 0 <= y < m and x < n and a[x] == b[y]:
                x += 1
                y += 1
            v[mid + k] = x
            if x <= n and 0 <= y <= m and x + y > best:
                best, best_d, best_k = x + y, d, k
            if x >= n and y >= m:
                reached, final = d, k
                break
        trace[d] = v
        if reached >= 0:
            break
    d, k = (reached, final) if reached >= 0 else (best_d, best_k)
    x = trace[d, mid + k]
    while d >= 0:
        y = x - k
        if d == 0:
            start = 0
        else:
            before = trace[d - 1]
            down = k == -d or (k != d and before[mid + k - 1] < before[mid + k + 1])
            start = before[mid + k + 1] if down else before[mid + k - 1] + 1
        while x > start:
            x -= 1
            y -= 1
            if 0 <= x < n and 0 <= y < m:
                out[x] = y
        if d > 0:
            down = k == -d or (k != d and trace[d - 1][mid + k - 1] < trace[d - 1][mid + k + 1])
            k = k + 1 if down else k - 1
            x = trace[d - 1, mid + k]
        d -= 1
    return out


def pair(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Int32Array:
    """For each token of `a` the position of its counterpart in `b`, -1 without; order is kept (int32[len(a)])."""
    if len(a) == len(b) and np.array_equal(a, b):
        return np.arange(len(a), dtype=np.int32)
    return _diff(a.astype(np.int64), b.astype(np.int64), MOST_EDITS)


def tokens(graph: Graph) -> IntArray:
    """int64[n]: nodes with the same token do the same thing (kind, name, and for a launch the kernel's name)."""
    launched = np.full(len(graph), -1, np.int64)
    launch = np.flatnonzero(graph.edge_kind == EdgeKind.LAUNCH)[::-1]
    launched[graph.pred[launch]] = graph.name[graph.edge_dst[launch]]
    width = len(graph.names) + 1
    return (graph.kind.astype(np.int64) * width + graph.name + 1) * width + launched + 1


def comparable(graph: Graph) -> BoolArray:
    """Nodes that have counterparts in other steps and ranks: those that an event or a stretch of host time stands for."""
    return graph.nodes(
        NodeKind.HOST,
        NodeKind.LAUNCH,
        NodeKind.WAIT,
        NodeKind.KERNEL,
        NodeKind.COPY,
        NodeKind.ARRIVE,
        NodeKind.TRANSFER,
    )


def sequences(graph: Graph) -> dict[tuple[int, int, int], Int32Array]:
    """Comparable nodes in order by (rank, step, lane); TRANSFER nodes apart from their ARRIVE as lane -1 - lane."""
    nodes = np.flatnonzero(comparable(graph))
    lane = graph.lane[nodes].astype(np.int64)
    lane = np.where(graph.kind[nodes] == NodeKind.TRANSFER, -1 - lane, lane)
    order = np.lexsort((nodes, lane, graph.step[nodes], graph.rank[nodes]))
    nodes, lane = nodes[order], lane[order]
    key = np.stack((graph.rank[nodes], graph.step[nodes], lane), axis=1)
    cuts = np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1 if len(nodes) else np.zeros(0, np.int64)
    return {
        tuple(int(x) for x in key[part[0]]): nodes[part].astype(np.int32)  # type: ignore[misc]
        for part in np.split(np.arange(len(nodes)), cuts)
        if len(part)
    }
