"""The Graph: a job's dependencies as arrays, in topological order, without a single measured start time.

A node starts when all its predecessors have ended (plus each edge's lag) and its release time has come:

    start[v] = max(release_ns[v], max over predecessors u of end[u] + lag_ns[u→v]);   end[v] = start[v] + dur_ns[v]

One that has neither predecessor nor release starts with the earliest release of the graph.

A collective member is two nodes: ARRIVE (no duration: this rank is ready) and TRANSFER (the part after the last
awaited member has arrived). Rendezvous edges lead from the members' ARRIVE nodes, where there are many through one
RENDEZVOUS hub per instance, to their TRANSFER nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray

if TYPE_CHECKING:
    import networkx

UNKNOWN_DEVICE_BLOCKS = 80
"""Blocks that fill a device about which the trace says nothing: one on each of the 80 processors of a V100."""

NO_RELEASE = -(2**62)
"""`release_ns` of a node that waits for its predecessors only."""


BETWEEN = "between operators"
"""How the names of host stretches without an operator begin."""
LOADER = "enumerate(DataLoader)"
"""How the annotation begins in which a thread fetches the next batch."""
LOADER_WAIT, THREAD_WAIT = "wait for the data loader", "wait for another thread"
"""Names of the nodes in which a thread waits for another one to prepare the batch, or to end."""


class NodeKind(IntEnum):
    """What a node stands for."""

    HOST = 0
    LAUNCH = 1
    WAIT = 2
    KERNEL = 3
    COPY = 4
    ARRIVE = 5
    TRANSFER = 6
    RENDEZVOUS = 7
    STALL = 8
    ORIGIN = 9
    STEP = 10


class EdgeKind(IntEnum):
    """Why one node waits for another."""

    PROGRAM = 0
    LAUNCH = 1
    STREAM = 2
    EVENT_WAIT = 3
    HOST_SYNC = 4
    HAND_OVER = 5
    RENDEZVOUS = 6
    OCCUPANCY = 7
    DATALOADER = 8


class EdgeSource(IntEnum):
    """Where the knowledge of an edge comes from (docs/method).

    THREAD: one thread of the host ended what another one waited for;  HIDDEN: a collective that one rank's trace lacks
    """

    RECORDED = 0
    ORDER = 1
    ENTRY = 2
    WORK_WAIT = 3
    FUTURE_WAIT = 4
    STREAM_WAIT = 5
    BLOCKING_CALL = 6
    IN_GRAPH = 7
    TIGHT_END = 8
    OCCUPANCY = 9
    MATCH = 10
    FLOW = 11
    REWRITE = 12
    THREAD = 13
    HIDDEN = 14


@dataclass(frozen=True, slots=True)
class GraphLane:
    """A thread or stream of one rank, as replay and view show it."""

    rank: int
    name: str
    is_device: bool


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """A process group by shape, never by its list of ranks."""

    axis: str
    size: int
    stride: int
    nodes_spanned: int = 1
    description: str = ""


@dataclass(frozen=True, slots=True)
class GraphCollective:
    """One collective instance: what is moved, over which group (index into `Graph.groups`, -1 unknown)."""

    kind: str
    group: int
    bytes_in: int
    bytes_out: int
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """n nodes in topological order; m edges in CSR by destination: predecessors of v are pred[pred_ptr[v]:pred_ptr[v+1]].

    dur_ns, release_ns      int64[n]
    kind                    uint8[n]   NodeKind
    rank, lane, name, step  int32[n]   lane indexes `lanes`, name indexes `names`; step -1 = outside any step
    event                   int32[n]   row in that rank's Events, -1 for nodes that no event stands for
    instance                int32[n]   index into `collectives`, -1 for others
    pred                    int32[m], lag_ns int64[m], edge_kind uint8[m], edge_source uint8[m], pred_ptr int64[n+1]
    multiplicity            int32 per rank class: how many real ranks a rank of this graph stands for (default 1 each)
    blocks                  int32[n] or empty: thread blocks of a kernel's grid, 0 unknown
    layer                   int32[n] or empty: index into `layers`, -1 unknown
    full_blocks             int32 per name or shorter: blocks from which a kernel of that name fills its device, 0 unknown
    """

    dur_ns: IntArray
    release_ns: IntArray
    kind: ByteArray
    rank: Int32Array
    lane: Int32Array
    name: Int32Array
    step: Int32Array
    event: Int32Array
    instance: Int32Array
    pred_ptr: IntArray
    pred: Int32Array
    lag_ns: IntArray
    edge_kind: ByteArray
    edge_source: ByteArray
    names: tuple[str, ...]
    lanes: tuple[GraphLane, ...]
    groups: tuple[GraphGroup, ...] = ()
    collectives: tuple[GraphCollective, ...] = ()
    multiplicity: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    blocks: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    layer: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    layers: tuple[str, ...] = ()
    full_blocks: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.dur_ns)

    @property
    def edge_count(self) -> int:
        return len(self.pred)

    @property
    def edge_dst(self) -> Int32Array:
        """int32[m]: the destination of every edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.pred_ptr))

    def name_of(self, node: int) -> str:
        return self.names[int(self.name[node])]

    def nodes(self, *kinds: NodeKind) -> BoolArray:
        """Mask of the nodes of these kinds."""
        return np.isin(self.kind, np.array([int(kind) for kind in kinds], np.uint8))

    def is_topological(self) -> bool:
        """Whether every edge leads from a lower to a higher node, which makes the graph a DAG."""
        return bool(np.all(self.pred < self.edge_dst))

    def fills_device(self) -> BoolArray:
        """Mask of the kernels that leave no room on their device for the kernel of another stream."""
        if not len(self.blocks):
            return np.zeros(len(self), np.bool_)
        table = np.zeros(max(len(self.names), len(self.full_blocks)) + 1, np.int64)
        table[: len(self.full_blocks)] = self.full_blocks
        table[table <= 0] = UNKNOWN_DEVICE_BLOCKS
        return self.nodes(NodeKind.KERNEL) & (self.blocks >= table[self.name])

    def layer_of(self, node: int) -> str:
        """The layer (module path) that a node belongs to, "" where unknown."""
        if not len(self.layer) or self.layer[node] < 0:
            return ""
        return self.layers[int(self.layer[node])]

    def axis_of(self, node: int) -> str:
        """The parallel axis of the collective that a node belongs to, "" where unknown or none."""
        if self.instance[node] < 0:
            return ""
        group = self.collectives[int(self.instance[node])].group
        return self.groups[group].axis if group >= 0 else ""

    def without(self, *, kinds: Iterable[EdgeKind] = (), sources: Iterable[EdgeSource] = ()) -> Graph:
        """The same nodes without the edges of these kinds or sources (to see what a class of edges is worth)."""
        drop = np.isin(self.edge_kind, np.array([int(k) for k in kinds], np.uint8))
        drop |= np.isin(self.edge_source, np.array([int(s) for s in sources], np.uint8))
        keep = ~drop
        pred_ptr = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.bincount(self.edge_dst[keep], minlength=len(self)), out=pred_ptr[1:])
        return replace(
            self,
            pred_ptr=pred_ptr,
            pred=self.pred[keep],
            lag_ns=self.lag_ns[keep],
            edge_kind=self.edge_kind[keep],
            edge_source=self.edge_source[keep],
        )

    def to_graphml(self, path: str | Path) -> None:
        """Write nodes and edges with their columns as GraphML, for Gephi, yEd and the like (small graphs)."""
        import networkx

        networkx.write_graphml(self.to_networkx(), str(path))

    def to_networkx(self) -> networkx.DiGraph:
        """The door to the Python graph world: nodes and edges with their columns as attributes (small graphs)."""
        import networkx

        out = networkx.DiGraph()
        for node in range(len(self)):
            out.add_node(
                node,
                name=self.name_of(node),
                kind=NodeKind(self.kind[node]).name.lower(),
                rank=int(self.rank[node]),
                lane=self.lanes[self.lane[node]].name if self.lane[node] >= 0 else "",
                dur_ns=int(self.dur_ns[node]),
                step=int(self.step[node]),
            )
        for src, dst, lag, kind, source in zip(
            self.pred.tolist(),
            self.edge_dst.tolist(),
            self.lag_ns.tolist(),
            self.edge_kind,
            self.edge_source,
            strict=True,
        ):
            out.add_edge(src, dst, lag_ns=lag, kind=EdgeKind(kind).name.lower(), source=EdgeSource(source).name.lower())
        return out


@dataclass(frozen=True, slots=True)
class Measured:
    """What the trace measured for each node; it never reaches the engine, only the comparison with its answer.

    start_ns, end_ns int64[n]; a node without a measurement has `known` False.
    step_bounds: for each step number, (start_ns, end_ns) of the job (earliest rank start, latest end).
    """

    start_ns: IntArray
    end_ns: IntArray
    known: BoolArray
    step_bounds: dict[int, tuple[int, int]] = field(default_factory=dict)


def edges_by_destination(
    n: int,
    src: npt.ArrayLike,
    dst: npt.ArrayLike,
    lag_ns: npt.ArrayLike,
    kind: npt.ArrayLike,
    source: npt.ArrayLike,
) -> tuple[IntArray, Int32Array, IntArray, ByteArray, ByteArray]:
    """Sort edge lists into CSR by destination: (pred_ptr, pred, lag_ns, edge_kind, edge_source). Stable, so repeatable."""
    to = np.asarray(dst, np.int64)
    order = np.argsort(to, kind="stable")
    pred_ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(to, minlength=n), out=pred_ptr[1:])
    return (
        pred_ptr,
        np.asarray(src, np.int32)[order],
        np.asarray(lag_ns, np.int64)[order],
        np.asarray(kind, np.uint8)[order],
        np.asarray(source, np.uint8)[order],
    )
