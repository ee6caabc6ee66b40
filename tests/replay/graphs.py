"""Small graphs by hand, for tests that need to see every number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    GraphLane,
    NodeKind,
    edges_by_destination,
)

Node = tuple[str, NodeKind, int, int, int]
Edge = tuple[int, int, int, EdgeKind]


def graph_of(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    *,
    release: dict[int, int] | None = None,
    instance: dict[int, int] | None = None,
    step: Sequence[int] | None = None,
    lanes: Sequence[GraphLane] | None = None,
    groups: Sequence[GraphGroup] = (),
    collectives: Sequence[GraphCollective] = (),
) -> Graph:
    """A graph of (name, kind, rank, lane, dur_ns) nodes and (src, dst, lag_ns, kind) edges; ids are positions."""
    n = len(nodes)
    names = list(dict.fromkeys(name for name, *_ in nodes))
    released = np.full(n, NO_RELEASE, np.int64)
    for at, time in (release or {}).items():
        released[at] = time
    of = np.full(n, -1, np.int32)
    for at, one in (instance or {}).items():
        of[at] = one
    src, dst, lag, kind = zip(*edges, strict=True) if edges else ((), (), (), ())
    ptr, pred, lag_ns, edge_kind, edge_source = edges_by_destination(
        n, src, dst, lag, [int(k) for k in kind], [int(EdgeSource.ORDER)] * len(edges)
    )
    count = max((lane for *_, lane, _ in nodes), default=0) + 1
    return Graph(
        dur_ns=np.array([dur for *_, dur in nodes], np.int64),
        release_ns=released,
        kind=np.array([int(kind) for _, kind, *_ in nodes], np.uint8),
        rank=np.array([rank for _, _, rank, *_ in nodes], np.int32),
        lane=np.array([lane for *_, lane, _ in nodes], np.int32),
        name=np.array([names.index(name) for name, *_ in nodes], np.int32),
        step=np.array(step if step is not None else [-1] * n, np.int32),
        event=np.full(n, -1, np.int32),
        instance=of,
        pred_ptr=ptr,
        pred=pred,
        lag_ns=lag_ns,
        edge_kind=edge_kind,
        edge_source=edge_source,
        names=tuple(names),
        lanes=tuple(lanes or [GraphLane(0, f"lane {i}", i > 0) for i in range(count)]),
        groups=tuple(groups),
        collectives=tuple(collectives),
    )


def two_ranks(late_ns: int = 0) -> Graph:
    """Two ranks that compute, meet in an all-reduce of 40 ns, and compute again; rank 1 computes `late_ns` longer."""
    H, K, A, T = NodeKind.HOST, NodeKind.KERNEL, NodeKind.ARRIVE, NodeKind.TRANSFER
    nodes = [
        ("launch", H, 0, 0, 10),
        ("launch", H, 1, 1, 10),
        ("gemm", K, 0, 2, 100),
        ("gemm", K, 1, 3, 100 + late_ns),
        ("nccl", A, 0, 4, 0),
        ("nccl", A, 1, 5, 0),
        ("nccl", T, 0, 4, 40),
        ("nccl", T, 1, 5, 40),
        ("add", K, 0, 2, 30),
        ("add", K, 1, 3, 30),
    ]
    launch, stream, wait, meet = EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.EVENT_WAIT, EdgeKind.RENDEZVOUS
    edges = [(0, 2, 5, launch), (1, 3, 5, launch), (2, 4, 1, wait), (3, 5, 1, wait)]
    edges += [(4, 6, 0, stream), (5, 7, 0, stream), (4, 7, 0, meet), (5, 6, 0, meet)]
    edges += [(6, 8, 1, wait), (7, 9, 1, wait)]
    lanes = [GraphLane(0, "main", False), GraphLane(1, "main", False)]
    lanes += [GraphLane(0, "stream 7", True), GraphLane(1, "stream 7", True)]
    lanes += [GraphLane(0, "stream 20", True), GraphLane(1, "stream 20", True)]
    return graph_of(
        nodes,
        edges,
        release={0: 0, 1: 0},
        instance={4: 0, 5: 0, 6: 0, 7: 0},
        step=[1] * 10,
        lanes=lanes,
        groups=[GraphGroup("dp", 2, 1)],
        collectives=[GraphCollective("all_reduce", 0, 1000, 1000)],
    )
