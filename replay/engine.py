"""Turns a graph and durations into start times: one forward max-plus sweep in integer nanoseconds."""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, Graph
from scaletrace.replay.timeline import Timeline


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
    for v in range(n):
        t = release_ns[v]
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            arrival = end[pred[e]] + lag_ns[e]
            if arrival > t:
                t = arrival
                binding[v] = pred[e]
        if t == NO_RELEASE:
            t = 0
        start[v] = t
        end[v] = t + dur_ns[v]
    return start, end, binding


def replay(graph: Graph, dur_ns: IntArray | None = None) -> Timeline:
    """Replay `graph`, with other durations if given (int64[n])."""
    start, end, binding = sweep(
        graph.dur_ns if dur_ns is None else dur_ns, graph.release_ns, graph.pred_ptr, graph.pred, graph.lag_ns
    )
    return Timeline(graph, start, end, binding)
