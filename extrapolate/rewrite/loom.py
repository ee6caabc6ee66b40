"""Turns node columns and edge rows into a Graph: the frame on which rewrites lay, add and bend nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.parse.build_draft import topological_keys
from scaletrace.parse.events import Int32Array, IntArray
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

FloatArray = npt.NDArray[np.float64]
NODE_COLUMNS = ("dur_ns", "release_ns", "kind", "rank", "lane", "name", "step", "event", "instance", "blocks", "layer")
DEFAULTS = {"dur_ns": 0, "release_ns": NO_RELEASE, "blocks": 0}
HUB_FROM = 3
"""Members from which all of a collective meet through one hub instead of an edge for each pair."""


@dataclass(frozen=True, slots=True)
class Woven:
    """A finished graph; origin, copy int32[n] (-1 = new node); exact_ns float64[n]: durations before rounding.

    entry int64[n, 3]: lag, kind and source with which a node follows on its thread or stream, kept where it now is the
    first there (lag -1 = it follows nothing)
    place int64[n]: where each node of the loom stands in the graph
    """

    graph: Graph
    origin: Int32Array
    copy: Int32Array
    exact_ns: FloatArray
    entry: IntArray
    place: IntArray


@dataclass(slots=True)
class Loom:
    """A graph under construction: n nodes in `columns`, edges as (src, dst, lag_ns, kind, source) rows.

    origin int32[n]: node of the source; copy int32[n]: index of the Copy that it came with; nodes added later have none
    exact_ns float64[n]: durations before rounding, to be scaled in place
    first, last int32[copies]: first and last node of each copy on its rank's thread of control (or its only stream)
    dropped: edges between pieces that have no counterpart in the new order
    """

    columns: dict[str, npt.NDArray[Any]]
    origin: Int32Array
    copy: Int32Array
    exact_ns: FloatArray
    entry: IntArray
    first: Int32Array
    last: Int32Array
    names: list[str]
    lanes: list[GraphLane]
    groups: list[GraphGroup]
    collectives: list[GraphCollective]
    layers: tuple[str, ...]
    dropped: int = 0
    edges: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _new: list[dict[str, int]] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _lanes: dict[tuple[int, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.origin) + len(self._new)

    def name(self, text: str) -> int:
        """Code of a node name."""
        if not self._names:
            self._names = {name: code for code, name in enumerate(self.names)}
        if text not in self._names:
            self._names[text] = len(self.names)
            self.names.append(text)
        return self._names[text]

    def lane(self, rank: int, name: str, is_device: bool) -> int:
        """Code of a lane, made where there is none."""
        if not self._lanes:
            self._lanes = {(lane.rank, lane.name): code for code, lane in enumerate(self.lanes)}
        if (rank, name) not in self._lanes:
            self._lanes[rank, name] = len(self.lanes)
            self.lanes.append(GraphLane(rank, name, is_device))
        return self._lanes[rank, name]

    def lane_of(self, node: int) -> int:
        """Lane of a node, woven or added."""
        old = len(self.origin)
        return int(self.columns["lane"][node]) if node < old else self._new[node - old]["lane"]

    def node(self, kind: NodeKind, **columns: int) -> int:
        """Add a node; columns left out have their default. Returns its number.

        `key`: the node behind which it stands in the order of nodes, where dependencies leave it open
        """
        self._new.append({"kind": int(kind), **columns})
        return len(self) - 1

    def fill(self, node: int, **columns: int) -> None:
        """Set columns of a node that was added, where they were not known yet."""
        self._new[node - len(self.origin)].update(columns)

    def edge(self, src: int, dst: int, kind: EdgeKind, lag_ns: int = 0) -> None:
        """Add one edge of this rewrite."""
        self.edges.append(np.array([[src, dst, lag_ns, int(kind), int(EdgeSource.REWRITE)]], np.int64))

    def meet(self, arrived: Sequence[int], moved: Sequence[int], step: int) -> None:
        """Let each TRANSFER of a collective wait for the ARRIVE of all members."""
        if len(arrived) >= HUB_FROM:
            hub = self.node(NodeKind.RENDEZVOUS, name=self.name("rendezvous"), step=step)
            for node in arrived:
                self.edge(node, hub, EdgeKind.RENDEZVOUS)
            for node in moved:
                self.edge(hub, node, EdgeKind.RENDEZVOUS)
            return
        for own, transfer in zip(arrived, moved, strict=True):
            for other in arrived:
                if other != own:
                    self.edge(other, transfer, EdgeKind.RENDEZVOUS)

    def finish(self) -> Woven:
        """The graph in topological order. Raises UsageError where the new order waits for itself."""
        self.columns["dur_ns"] = np.rint(self.exact_ns).astype(np.int64)
        columns = {}
        for key, old in self.columns.items():
            fresh = [row.get(key, DEFAULTS.get(key, -1)) for row in self._new]
            columns[key] = np.concatenate([old, np.array(fresh, old.dtype)])
        n = len(self)
        edges = np.concatenate(self.edges) if self.edges else np.zeros((0, 5), np.int64)
        old = np.arange(len(self.origin), dtype=np.int64) * len(self._new or [0])
        fresh_keys = [row.get("key", n) * len(self._new) + at for at, row in enumerate(self._new)]
        keys, keep = topological_keys(
            np.concatenate([old, np.array(fresh_keys, np.int64)]),
            edges[:, 0].astype(np.int32),
            edges[:, 1].astype(np.int32),
        )
        if not keep.all():
            at = int(edges[int(np.flatnonzero(~keep)[0]), 1])
            raise UsageError(
                f"the new order waits for itself at {self.names[int(columns['name'][at])]!r}, which the trace ties to another "
                "layer on some ranks or to none; record the calls of whole steps (CPU activity)"
            )
        order = np.argsort(keys, kind="stable")
        position = np.empty(n, np.int64)
        position[order] = np.arange(n)
        ptr, pred, lag, kind, source = edges_by_destination(
            n, position[edges[:, 0]], position[edges[:, 1]], edges[:, 2], edges[:, 3], edges[:, 4]
        )
        pad = np.full(len(self._new), -1, np.int32)
        graph = Graph(
            **{key: value[order] for key, value in columns.items()},
            pred_ptr=ptr,
            pred=pred,
            lag_ns=lag,
            edge_kind=kind,
            edge_source=source,
            names=tuple(self.names),
            lanes=tuple(self.lanes),
            groups=tuple(self.groups),
            collectives=tuple(self.collectives),
            layers=self.layers,
        )
        exact = np.concatenate([self.exact_ns, columns["dur_ns"][len(self.origin) :].astype(np.float64)])
        entry = np.concatenate([self.entry, np.tile([-1, 0, 0], (len(self._new), 1))])
        return Woven(
            graph,
            np.concatenate([self.origin, pad])[order],
            np.concatenate([self.copy, pad])[order],
            exact[order],
            entry[order],
            position,
        )


def reopen(graph: Graph, exact_ns: FloatArray, entry: IntArray | None = None) -> Loom:
    """A finished graph as a loom, to add nodes and edges to; node numbers stay."""
    n = len(graph)
    columns: dict[str, npt.NDArray[Any]] = {}
    for key in NODE_COLUMNS:
        values = getattr(graph, key)
        columns[key] = values.copy() if len(values) == n else np.full(n, DEFAULTS.get(key, -1), np.int32)
    loom = Loom(
        columns,
        np.arange(n, dtype=np.int32),
        np.full(n, -1, np.int32),
        exact_ns.copy(),
        np.tile(np.array([-1, 0, 0], np.int64), (n, 1)) if entry is None else entry.copy(),
        np.zeros(0, np.int32),
        np.zeros(0, np.int32),
        list(graph.names),
        list(graph.lanes),
        list(graph.groups),
        list(graph.collectives),
        graph.layers,
    )
    loom.edges.append(rows_of(graph.pred, graph.edge_dst, graph.lag_ns, graph.edge_kind, graph.edge_source))
    return loom


def rows_of(src: Any, dst: Any, lag: Any, kind: Any, origin: Any) -> npt.NDArray[np.int64]:
    """Edges as rows of a loom: (src, dst, lag, kind, source), scalars repeated."""
    return np.stack(np.broadcast_arrays(*(np.asarray(c, np.int64) for c in (src, dst, lag, kind, origin))), axis=1)
