"""Turns nodes and edges, in whatever order they were found, into a Graph in topological order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    GraphLane,
    Measured,
)

NODE_COLUMNS: dict[str, tuple[Any, int]] = {
    "dur_ns": (np.int64, 0),
    "release_ns": (np.int64, NO_RELEASE),
    "kind": (np.uint8, 0),
    "rank": (np.int32, 0),
    "lane": (np.int32, -1),
    "name": (np.int32, -1),
    "step": (np.int32, -1),
    "event": (np.int32, -1),
    "instance": (np.int32, -1),
    "blocks": (np.int32, 0),
    "layer": (np.int32, -1),
    "start_ns": (np.int64, 0),
    "end_ns": (np.int64, 0),
}
"""Column → (dtype, default). `start_ns` and `end_ns` are measured: they order and judge, and never reach the Graph."""

EDGE_COLUMNS: dict[str, Any] = {
    "src": np.int32,
    "dst": np.int32,
    "lag_ns": np.int64,
    "edge_kind": np.uint8,
    "edge_source": np.uint8,
}


Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Draft:
    """Nodes and edges while they are collected; ids are positions in order of addition."""

    count: int = 0
    names: dict[str, int] = field(default_factory=dict)
    lanes: list[GraphLane] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    groups: list[GraphGroup] = field(default_factory=list)
    collectives: list[GraphCollective] = field(default_factory=list)
    full_blocks: dict[int, int] = field(default_factory=dict)
    contradicted: Counter[str] = field(default_factory=Counter)
    offered: Counter[str] = field(default_factory=Counter)
    _nodes: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    _edges: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def layer(self, text: str) -> int:
        return self.layers.setdefault(text, len(self.layers))

    def name_codes(self, strings: Sequence[str], codes: npt.NDArray[Any]) -> Int32Array:
        """Codes of one rank's string table as codes of the graph's names."""
        used, inverse = np.unique(codes, return_inverse=True)
        ids = np.array([self.name(strings[int(code)]) if code >= 0 else -1 for code in used], np.int32)
        return ids[inverse] if len(codes) else np.zeros(0, np.int32)

    def note_fill(self, names: Int32Array, fill: Int32Array) -> None:
        """Remember from how many blocks on kernels of these names fill their device; of several shapes the largest."""
        most = np.zeros(int(names.max(initial=-1)) + 1, np.int32)
        np.maximum.at(most, names, fill)
        for name in np.unique(names).tolist():
            self.full_blocks[name] = max(self.full_blocks.get(name, 0), int(most[name]))

    def lane(self, rank: int, name: str, is_device: bool) -> int:
        self.lanes.append(GraphLane(rank, name, is_device))
        return len(self.lanes) - 1

    def add_nodes(self, count: int, **columns: Any) -> Int32Array:
        """Add `count` nodes; a column may be a scalar or an array of that length. Returns their ids, int32[count]."""
        chunk = {}
        for key, (dtype, default) in NODE_COLUMNS.items():
            value = columns.pop(key, default)
            chunk[key] = np.broadcast_to(np.asarray(value, dtype), (count,))
        if columns:
            raise TypeError(f"unknown node columns: {sorted(columns)}")
        self._nodes.append(chunk)
        first = self.count
        self.count += count
        return np.arange(first, self.count, dtype=np.int32)

    def add_edges(self, src: Any, dst: Any, lag_ns: Any, kind: EdgeKind, source: EdgeSource | npt.NDArray[Any]) -> None:
        """Add edges; `src` gives the length, the others may be scalars. Those from or to no node (-1) are left out."""
        count = len(np.atleast_1d(src))
        values = (np.atleast_1d(src), dst, lag_ns, int(kind), source)
        chunk = {
            key: np.broadcast_to(np.asarray(value, dtype), (count,))
            for (key, dtype), value in zip(EDGE_COLUMNS.items(), values, strict=True)
        }
        real = (chunk["src"] >= 0) & (chunk["dst"] >= 0)
        self._edges.append(chunk if real.all() else {key: value[real] for key, value in chunk.items()})

    def nodes(self) -> dict[str, npt.NDArray[Any]]:
        """All node columns, one array each."""
        return {
            key: np.concatenate([chunk[key] for chunk in self._nodes]) if self._nodes else np.zeros(0, dtype)
            for key, (dtype, _) in NODE_COLUMNS.items()
        }

    def edges(self) -> dict[str, npt.NDArray[Any]]:
        """All edge columns, one array each."""
        return {
            key: np.concatenate([chunk[key] for chunk in self._edges]) if self._edges else np.zeros(0, dtype)
            for key, dtype in EDGE_COLUMNS.items()
        }

    def contradict(self, source: EdgeSource, offered: int, dropped: int) -> None:
        """Count edges that a rule offered, and those that the trace refutes."""
        self.offered[source.name.lower()] += offered
        if dropped:
            self.contradicted[source.name.lower()] += dropped


@jit
def group_by(keys: Int32Array, n: int) -> tuple[IntArray, IntArray]:
    """Counting sort: (ptr int64[n+1], order int64[m]) with the positions of key k in order[ptr[k]:ptr[k+1]]."""
    ptr = np.zeros(n + 1, np.int64)
    for key in keys:
        ptr[key + 1] += 1
    for k in range(n):
        ptr[k + 1] += ptr[k]
    at = ptr[:n].copy()
    order = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        order[at[keys[i]]] = i
        at[keys[i]] += 1
    return ptr, order


@jit
def _push_keys(key_ns: IntArray, ptr: IntArray, order: IntArray, dst: Int32Array, indegree: Int32Array) -> int:
    """Kahn's walk that raises each key above its predecessors' in place; returns how many nodes it reached."""
    n = len(key_ns)
    stack = np.empty(n, np.int64)
    top = 0
    for v in range(n):
        if indegree[v] == 0:
            stack[top] = v
            top += 1
    reached = 0
    while top > 0:
        top -= 1
        u = stack[top]
        reached += 1
        for i in range(ptr[u], ptr[u + 1]):
            v = dst[order[i]]
            key_ns[v] = max(key_ns[v], key_ns[u] + 1)
            indegree[v] -= 1
            if indegree[v] == 0:
                stack[top] = v
                top += 1
    return reached


def topological_keys(key_ns: IntArray, src: Int32Array, dst: Int32Array) -> tuple[IntArray, BoolArray]:
    """Keys that grow along every kept edge, and which edges were kept (bool[m]).

    `key_ns` is the measured start. Edges are dropped only inside a cycle, and there those that lead back in time.
    """
    n = len(key_ns)
    keep = src != dst
    while True:
        kept = np.flatnonzero(keep)
        ptr, order = group_by(src[kept], n)
        keys = key_ns.copy()
        indegree = np.bincount(dst[kept], minlength=n).astype(np.int32)
        if _push_keys(keys, ptr, order, dst[kept], indegree) == n:
            return keys, keep
        stuck = indegree > 0
        keep &= ~(stuck[src] & stuck[dst] & (key_ns[src] >= key_ns[dst]))


def finish(
    draft: Draft, nodes: dict[str, npt.NDArray[Any]], edges: dict[str, npt.NDArray[Any]]
) -> tuple[Graph, Measured, int]:
    """Sort into topological order: the Graph, what was measured for its nodes, and the edges dropped from cycles."""
    n = draft.count
    keys, keep = topological_keys(nodes["start_ns"], edges["src"], edges["dst"])
    order = np.argsort(keys, kind="stable")
    position = np.empty(n, np.int32)
    position[order] = np.arange(n, dtype=np.int32)
    kept = np.flatnonzero(keep)
    dst = position[edges["dst"][kept]]
    pred_ptr, by_dst = group_by(dst, n)
    pick = kept[by_dst]
    columns = {key: nodes[key][order] for key in NODE_COLUMNS}
    start, end = columns.pop("start_ns"), columns.pop("end_ns")
    graph = Graph(
        **columns,
        pred_ptr=pred_ptr,
        pred=position[edges["src"][pick]],
        lag_ns=edges["lag_ns"][pick],
        edge_kind=edges["edge_kind"][pick],
        edge_source=edges["edge_source"][pick],
        names=tuple(draft.names),
        lanes=tuple(draft.lanes),
        groups=tuple(draft.groups),
        collectives=tuple(draft.collectives),
        layers=tuple(draft.layers),
        full_blocks=np.array([draft.full_blocks.get(name, 0) for name in range(len(draft.names))], np.int32),
    )
    return graph, Measured(start, end, np.ones(n, np.bool_)), int(n and (~keep).sum())
