"""Turns a graph into start and end times in ten plain lines, the answer that the engine is tested against."""

from __future__ import annotations

from scaletrace.parse.graph import NO_RELEASE, Graph


def reference(graph: Graph, dur_ns: list[int] | None = None) -> tuple[list[int], list[int], list[int]]:
    """start, end and binding predecessor of every node: each starts when the last predecessor (plus lag) has ended."""
    released = [int(t) for t in graph.release_ns if t != NO_RELEASE]
    start: list[int] = []
    end: list[int] = []
    binding: list[int] = []
    for v in range(len(graph)):
        ready, binds = int(graph.release_ns[v]), -1
        for e in range(int(graph.pred_ptr[v]), int(graph.pred_ptr[v + 1])):
            arrival = end[graph.pred[e]] + int(graph.lag_ns[e])
            if arrival > ready:
                ready, binds = arrival, int(graph.pred[e])
        start.append(min(released, default=0) if ready == NO_RELEASE else ready)
        end.append(start[v] + int(graph.dur_ns[v] if dur_ns is None else dur_ns[v]))
        binding.append(binds)
    return start, end, binding
