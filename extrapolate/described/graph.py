"""Turns a lane program into the Graph that the replay engine sweeps: the same step, seen by the one engine of the tool."""

from __future__ import annotations

import numpy as np

from scaletrace.extrapolate.described.lanes import FrozenProgram
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphLane,
    NodeKind,
    edges_by_destination,
)

NS = 1e9


def program_graph(program: FrozenProgram, unit_s: float) -> Graph:
    """Nodes in topological order, durations rounded to ns, one lane per rank and stream; interference is left out."""
    times = program.run(unit_s, 0.0, 0.0)
    n = len(program.fixed_s)
    # Start, then end, then lane order: an operation without duration precedes what it releases at the same instant.
    order = np.lexsort((np.arange(n), times.end_s, times.start_s))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    lane = np.repeat(np.arange(len(program.lane_ptr) - 1), np.diff(program.lane_ptr))
    counts = np.diff(program.dep_ptr)
    after = np.flatnonzero(np.diff(lane) == 0)
    src = np.concatenate([program.dep, after])
    dst = np.concatenate([np.repeat(np.arange(n), counts), after + 1])
    lag_ns = np.concatenate([np.rint(program.lag_s * NS).astype(np.int64), np.zeros(len(after), np.int64)])
    kinds = np.where(np.arange(len(src)) < len(program.dep), int(EdgeKind.EVENT_WAIT), int(EdgeKind.STREAM))
    csr = edges_by_destination(
        n, place[src], place[dst], lag_ns, kinds.astype(np.uint8), np.full(len(src), int(EdgeSource.REWRITE), np.uint8)
    )
    names, name = np.unique(np.array(program.labels, dtype=object)[order].astype(str), return_inverse=True)
    work = program.fixed_s + unit_s * program.weight
    is_collective = (lane[order] & 1) == 1
    return Graph(
        dur_ns=np.rint(work[order] * NS).astype(np.int64),
        release_ns=np.full(n, NO_RELEASE, np.int64),
        kind=np.where(is_collective, int(NodeKind.TRANSFER), int(NodeKind.KERNEL)).astype(np.uint8),
        rank=(lane[order] // 2).astype(np.int32),
        lane=lane[order].astype(np.int32),
        name=name.astype(np.int32),
        step=np.zeros(n, np.int32),
        event=np.full(n, -1, np.int32),
        instance=np.full(n, -1, np.int32),
        pred_ptr=csr[0],
        pred=csr[1],
        lag_ns=csr[2],
        edge_kind=csr[3],
        edge_source=csr[4],
        names=tuple(str(text) for text in names),
        lanes=tuple(
            GraphLane(rank, stream, is_device=True)
            for rank in range(program.ranks)
            for stream in ("compute", "communication")
        ),
    )
