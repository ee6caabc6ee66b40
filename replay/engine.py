"""Turns a graph and durations into start times: one forward max-plus sweep in integer nanoseconds."""

from __future__ import annotations

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, EdgeKind, Graph, NodeKind
from scaletrace.replay.timeline import Timeline


@jit
def origin_of(release_ns: IntArray) -> int:
    """The earliest release, which is also the start of a node that nothing precedes; 0 where there is none."""
    out = np.int64(2**62)
    for t in release_ns:
        if t != NO_RELEASE and t < out:
            out = t
    return 0 if out == 2**62 else int(out)


@jit
def sweep(
    dur_ns: IntArray, release_ns: IntArray, pred_ptr: IntArray, pred: Int32Array, lag_ns: IntArray
) -> tuple[IntArray, IntArray, Int32Array]:
    """start, end and binding predecessor of every node; nodes must be in topological order.

    The first predecessor that reaches the maximum binds, so that the answer is deterministic.
    """
    n = len(dur_ns)
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    binding = np.full(n, -1, np.int32)
    origin = origin_of(release_ns)
    for v in range(n):
        t = release_ns[v]
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            arrival = end[pred[e]] + lag_ns[e]
            if arrival > t:
                t = arrival
                binding[v] = pred[e]
        if t == NO_RELEASE:
            t = origin
        start[v] = t
        end[v] = t + dur_ns[v]
    return start, end, binding


@jit
def sweep_columns(
    dur_ns: IntArray, release_ns: IntArray, pred_ptr: IntArray, pred: Int32Array, lag_ns: IntArray
) -> IntArray:
    """End of every node in every column, int64[n, K], for durations int64[n, K]: K what-ifs in one sweep."""
    n, columns = dur_ns.shape
    end = np.empty((n, columns), np.int64)
    origin = origin_of(release_ns)
    for v in range(n):
        first, last = pred_ptr[v], pred_ptr[v + 1]
        release = release_ns[v]
        if first == last:
            if release == NO_RELEASE:
                release = origin
            for k in range(columns):
                end[v, k] = release + dur_ns[v, k]
            continue
        p, lag = pred[first], lag_ns[first]
        for k in range(columns):
            end[v, k] = end[p, k] + lag
        for e in range(first + 1, last):
            p, lag = pred[e], lag_ns[e]
            for k in range(columns):
                end[v, k] = max(end[v, k], end[p, k] + lag)
        if release != NO_RELEASE:
            for k in range(columns):
                end[v, k] = max(end[v, k], release)
        for k in range(columns):
            end[v, k] += dur_ns[v, k]
    return end


@jit
def _sweep_arbitrated(
    dur_ns: IntArray,
    release_ns: IntArray,
    pred_ptr: IntArray,
    pred: Int32Array,
    lag_ns: IntArray,
    skip_edge: BoolArray,
    rank: Int32Array,
    lane: Int32Array,
    is_kernel: BoolArray,
    is_full: BoolArray,
    tail_ns: int,
) -> tuple[IntArray, IntArray, Int32Array]:
    """The sweep where a ready kernel also waits for the tail of a full-GPU kernel of another stream of its rank."""
    n = len(dur_ns)
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    binding = np.full(n, -1, np.int32)
    depth = 8
    recent = np.full((int(rank.max()) + 1 if n else 1, depth), -1, np.int64)
    slot = np.zeros(len(recent), np.int64)
    origin = origin_of(release_ns)
    for v in range(n):
        t = release_ns[v]
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            if skip_edge[e]:
                continue
            arrival = end[pred[e]] + lag_ns[e]
            if arrival > t:
                t = arrival
                binding[v] = pred[e]
        if t == NO_RELEASE:
            t = origin
        if is_kernel[v]:
            for i in range(depth):
                u = recent[rank[v], i]
                if u >= 0 and lane[u] != lane[v] and start[u] <= t < end[u] - tail_ns:
                    t = end[u] - tail_ns
                    binding[v] = u
        start[v] = t
        end[v] = t + dur_ns[v]
        if is_full[v]:
            recent[rank[v], slot[rank[v]] % depth] = v
            slot[rank[v]] += 1
    return start, end, binding


def replay(graph: Graph, dur_ns: IntArray | None = None, *, arbitrate: bool = False) -> Timeline:
    """Replay `graph`, with other durations if given (int64[n]).

    With `arbitrate` the OCCUPANCY edges, which measured times chose, are left out; instead a kernel that becomes ready
    while a full-GPU kernel of another stream runs starts at the latter's end.
    """
    durations = graph.dur_ns if dur_ns is None else _checked(graph, dur_ns)
    if not arbitrate or not len(graph.blocks):
        start, end, binding = sweep(durations, graph.release_ns, graph.pred_ptr, graph.pred, graph.lag_ns)
        return Timeline(graph, start, end, binding)
    kernel = graph.nodes(NodeKind.KERNEL)
    start, end, binding = _sweep_arbitrated(
        durations,
        graph.release_ns,
        graph.pred_ptr,
        graph.pred,
        graph.lag_ns,
        graph.edge_kind == int(EdgeKind.OCCUPANCY),
        graph.rank,
        graph.lane,
        kernel | graph.nodes(NodeKind.ARRIVE),
        graph.fills_device(),
        0,
    )
    return Timeline(graph, start, end, binding)


def replay_columns(graph: Graph, dur_ns: IntArray) -> IntArray:
    """End of every node for K sets of durations at once: int64[n, K] for `dur_ns` int64[n, K]."""
    if dur_ns.ndim != 2 or len(dur_ns) != len(graph):
        raise UsageError(f"durations of shape {dur_ns.shape} do not fit a graph of {len(graph)} nodes; give (n, K)")
    return sweep_columns(
        np.ascontiguousarray(dur_ns, np.int64), graph.release_ns, graph.pred_ptr, graph.pred, graph.lag_ns
    )


def _checked(graph: Graph, dur_ns: IntArray) -> IntArray:
    if dur_ns.shape != (len(graph),):
        raise UsageError(f"durations of shape {dur_ns.shape} do not fit a graph of {len(graph)} nodes; give (n,)")
    return dur_ns.astype(np.int64, copy=False)
