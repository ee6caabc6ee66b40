"""Small graphs written out by hand, and a large one, for the tests and the benchmark of the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


class Node(NamedTuple):
    kind: NodeKind
    lane: int
    name: str
    dur_ns: int
    instance: int = -1
    release_ns: int = NO_RELEASE
    step: int = 0


def make_graph(
    lanes: Sequence[GraphLane],
    nodes: Sequence[Node],
    edges: Sequence[tuple[int, int, EdgeKind]],
    groups: Sequence[GraphGroup] = (),
    collectives: Sequence[GraphCollective] = (),
) -> Graph:
    """A graph from lists; nodes must be in topological order, a lane of -1 stands for none."""
    names = list(dict.fromkeys(node.name for node in nodes))
    n = len(nodes)
    pred_ptr, pred, lag, kind, source = edges_by_destination(
        n,
        [e[0] for e in edges],
        [e[1] for e in edges],
        [0] * len(edges),
        [int(e[2]) for e in edges],
        [int(EdgeSource.RECORDED)] * len(edges),
    )
    return Graph(
        dur_ns=np.array([node.dur_ns for node in nodes], np.int64),
        release_ns=np.array([node.release_ns for node in nodes], np.int64),
        kind=np.array([node.kind for node in nodes], np.uint8),
        rank=np.array([lanes[node.lane].rank if node.lane >= 0 else 0 for node in nodes], np.int32),
        lane=np.array([node.lane for node in nodes], np.int32),
        name=np.array([names.index(node.name) for node in nodes], np.int32),
        step=np.array([node.step for node in nodes], np.int32),
        event=np.arange(n, dtype=np.int32),
        instance=np.array([node.instance for node in nodes], np.int32),
        pred_ptr=pred_ptr,
        pred=pred,
        lag_ns=lag,
        edge_kind=kind,
        edge_source=source,
        names=tuple(names),
        lanes=tuple(lanes),
        groups=tuple(groups),
        collectives=tuple(collectives),
    )


def two_ranks() -> Graph:
    """Two ranks, each a thread, a compute stream and a communication stream; rank 1 arrives late at an all-reduce."""
    lanes = [GraphLane(rank, name, name != "main") for rank in (0, 1) for name in ("main", "stream 7", "stream 20")]
    nodes = []
    edges = []
    for rank, work in ((0, 40), (1, 90)):
        base, lane = len(nodes), 3 * rank
        nodes += [
            Node(NodeKind.HOST, lane, "aten::mm", 10, release_ns=1000),
            Node(NodeKind.LAUNCH, lane, "cudaLaunchKernel", 5),
            Node(NodeKind.KERNEL, lane + 1, "gemm", work),
            Node(NodeKind.ARRIVE, lane + 2, "ncclAllReduce", 0, instance=0),
        ]
        edges += [
            (base, base + 1, EdgeKind.PROGRAM),
            (base + 1, base + 2, EdgeKind.LAUNCH),
            (base + 2, base + 3, EdgeKind.EVENT_WAIT),
        ]
    for lane in (2, 5):
        nodes.append(Node(NodeKind.TRANSFER, lane, "ncclAllReduce", 30, instance=0))
        edges += [(3, len(nodes) - 1, EdgeKind.RENDEZVOUS), (7, len(nodes) - 1, EdgeKind.RENDEZVOUS)]
    return make_graph(
        lanes,
        nodes,
        edges,
        [GraphGroup("dp", 2, 1, 1, "data parallel")],
        [GraphCollective("all_reduce", 0, 3000, 3000)],
    )


def ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def make_longer(graph: Graph, by_ns: int) -> Graph:
    """The same graph, begun later, with the first host operation of every rank longer."""
    graph.dur_ns[[0, 4]] += by_ns
    graph.release_ns[[0, 4]] += 7000
    return graph
