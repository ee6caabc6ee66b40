"""Turns nodes and edges given one by one into a Graph: for small graphs that are described rather than recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Draft:
    """Nodes in topological order as they are added; edges may only lead forward."""

    groups: list[GraphGroup] = field(default_factory=list)
    collectives: list[GraphCollective] = field(default_factory=list)
    _nodes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    _edges: list[tuple[int, int, int, int]] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _lanes: dict[tuple[int, str], int] = field(default_factory=dict)

    def node(
        self,
        kind: NodeKind,
        dur_ns: int = 0,
        *,
        rank: int = 0,
        lane: str = "stream",
        name: str = "",
        after: Iterable[int] = (),
        instance: int = -1,
        step: int = 0,
    ) -> int:
        """Add a node behind `after` and say its number."""
        number = len(self._nodes)
        lane_id = self._lanes.setdefault((rank, lane), len(self._lanes))
        name_id = self._names.setdefault(name, len(self._names))
        self._nodes.append((int(kind), int(dur_ns), rank, lane_id, name_id, instance))
        for before in after:
            self.edge(before, number)
        return number

    def edge(self, src: int, dst: int, kind: EdgeKind = EdgeKind.PROGRAM, lag_ns: int = 0) -> None:
        self._edges.append((src, dst, lag_ns, int(kind)))

    def collective(
        self, kind: str, group: int, size_bytes: int, arrivals: Iterable[tuple[int, Iterable[int]]], dur_ns: int = 0
    ) -> list[int]:
        """One instance whose members (rank, predecessors) all wait for each other; says their TRANSFER nodes."""
        instance = len(self.collectives)
        self.collectives.append(GraphCollective(kind, group, size_bytes, size_bytes))
        members = list(arrivals)
        arrived = [
            self.node(NodeKind.ARRIVE, rank=rank, after=after, instance=instance, name=kind) for rank, after in members
        ]
        out = []
        for (rank, _), own in zip(members, arrived, strict=True):
            node = self.node(NodeKind.TRANSFER, dur_ns, rank=rank, after=[own], instance=instance, name=kind)
            for other in arrived:
                if other != own:
                    self.edge(other, node, EdgeKind.RENDEZVOUS)
            out.append(node)
        return out

    def graph(self) -> Graph:
        """The Graph of what was added so far."""
        columns = np.array(self._nodes, np.int64).reshape(-1, 6).T
        edges = np.array(self._edges, np.int64).reshape(-1, 4).T
        n = len(self._nodes)
        ptr, pred, lag, kind, source = edges_by_destination(
            n, edges[0], edges[1], edges[2], edges[3], np.full(edges.shape[1], int(EdgeSource.REWRITE), np.uint8)
        )
        return Graph(
            dur_ns=columns[1].copy(),
            release_ns=np.full(n, NO_RELEASE, np.int64),
            kind=columns[0].astype(np.uint8),
            rank=columns[2].astype(np.int32),
            lane=columns[3].astype(np.int32),
            name=columns[4].astype(np.int32),
            step=np.zeros(n, np.int32),
            event=np.full(n, -1, np.int32),
            instance=columns[5].astype(np.int32),
            pred_ptr=ptr,
            pred=pred,
            lag_ns=lag,
            edge_kind=kind,
            edge_source=source,
            names=tuple(self._names),
            lanes=tuple(GraphLane(rank, lane, lane.startswith("stream")) for rank, lane in self._lanes),
            groups=tuple(self.groups),
            collectives=tuple(self.collectives),
        )
