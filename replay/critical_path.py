"""Turns a Timeline into the chain of nodes that decides its length, from the first start to the last end, without a hole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, LOADER, LOADER_WAIT, EdgeKind, EdgeSource, Graph, NodeKind
from scaletrace.replay.timeline import Timeline

MOST_LOOKS = 500
"""Chains that the search for the next paths looks at, at most."""
SHARES = ("compute", "communication", "memory", "host", "stall", "gap")
_SHARE = {
    NodeKind.KERNEL: "compute",
    NodeKind.COPY: "memory",
    NodeKind.TRANSFER: "communication",
    NodeKind.ARRIVE: "communication",
    NodeKind.RENDEZVOUS: "communication",
    NodeKind.HOST: "host",
    NodeKind.LAUNCH: "host",
    NodeKind.WAIT: "host",
    NodeKind.STEP: "host",
    NodeKind.STALL: "stall",
    NodeKind.ORIGIN: "gap",
}
EDGE_REASON = {
    EdgeKind.PROGRAM: "program order",
    EdgeKind.LAUNCH: "launch latency",
    EdgeKind.STREAM: "stream gap",
    EdgeKind.EVENT_WAIT: "event wait",
    EdgeKind.HOST_SYNC: "return of a blocking call",
    EdgeKind.HAND_OVER: "thread hand-over",
    EdgeKind.RENDEZVOUS: "rendezvous",
    EdgeKind.OCCUPANCY: "GPU occupied",
    EdgeKind.DATALOADER: "data loader",
}


def share_of(graph: Graph, nodes: Int32Array) -> npt.NDArray[np.int8]:
    """Which of SHARES each of these nodes counts to, int8[len(nodes)].

    On a rank without a device the operators are the computation; what lies between them stays host time.
    """
    of_kind = np.array([SHARES.index(_SHARE[kind]) for kind in NodeKind], np.int8)
    out = of_kind[graph.kind[nodes]]
    with_device = {lane.rank for lane in graph.lanes if lane.is_device}
    between = np.array([name.startswith(BETWEEN) for name in graph.names], np.bool_)
    operator = (graph.kind[nodes] == NodeKind.HOST) & ~between[graph.name[nodes]]
    out[operator & ~np.isin(graph.rank[nodes], sorted(with_device))] = SHARES.index("compute")
    return out


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The path's nodes in order of time, what each contributes, and the labelled gap before each.

    nodes   int32[p];  own_ns int64[p]: time of the node on the path, cut where the next one overlaps it
    gap_ns  int64[p]: time between the last node's contribution and this node's start;  gap_kind: EdgeKind, -1 release
    length_ns = own_ns.sum() + gap_ns.sum() = makespan of the timeline
    """

    timeline: Timeline
    nodes: Int32Array
    own_ns: IntArray
    gap_ns: IntArray
    gap_kind: Int32Array
    gap_source: Int32Array

    @property
    def length_ns(self) -> int:
        return int(self.own_ns.sum() + self.gap_ns.sum())

    def gap_reason(self, at: int) -> str:
        """Why the path's node number `at` did not start at once."""
        kind = int(self.gap_kind[at])
        return EDGE_REASON[EdgeKind(kind)] if kind >= 0 else "started before the window"

    def segments(self) -> list[dict[str, object]]:
        """Nodes and gaps of the path in order, as cli.md's `critical_path.segments`; the durations sum to the length."""
        graph, out = self.timeline.graph, []
        kinds = share_of(graph, self.nodes).tolist()
        for at, node in enumerate(self.nodes.tolist()):
            lane = graph.lanes[graph.lane[node]].name if graph.lane[node] >= 0 else ""
            rank, start = int(graph.rank[node]), int(self.timeline.start_ns[node])
            if self.gap_ns[at]:
                begin = start - int(self.gap_ns[at])
                out.append(_segment(rank, lane, self.gap_reason(at), "gap", begin, int(self.gap_ns[at])))
            if self.own_ns[at]:
                out.append(_segment(rank, lane, graph.name_of(node), SHARES[kinds[at]], start, int(self.own_ns[at])))
        return out

    def to_frame(self) -> pd.DataFrame:
        """One row per node of the path: where, what, when, how long, and the gap before it with its reason."""
        graph = self.timeline.graph
        lanes = [graph.lanes[lane].name if lane >= 0 else "" for lane in graph.lane[self.nodes].tolist()]
        return pd.DataFrame(
            {
                "node": self.nodes,
                "rank": graph.rank[self.nodes],
                "lane": lanes,
                "name": [graph.name_of(node) for node in self.nodes.tolist()],
                "kind": [NodeKind(kind).name.lower() for kind in graph.kind[self.nodes].tolist()],
                "step": graph.step[self.nodes],
                "axis": [graph.axis_of(node) for node in self.nodes.tolist()],
                "layer": [graph.layer_of(node) for node in self.nodes.tolist()],
                "start_ns": self.timeline.start_ns[self.nodes],
                "dur_ns": self.own_ns,
                "gap_ns": self.gap_ns,
                "gap_reason": [self.gap_reason(at) if self.gap_ns[at] else "" for at in range(len(self.nodes))],
                "source": [EdgeSource(s).name.lower() if s >= 0 else "" for s in self.gap_source.tolist()],
            }
        )

    def shares(self) -> dict[str, float]:
        """Share of the length by kind: compute, communication, memory, host, stall, gap; they sum to 1."""
        by_share = np.zeros(len(SHARES), np.int64)
        np.add.at(by_share, share_of(self.timeline.graph, self.nodes), self.own_ns)
        total = dict(zip(SHARES, by_share.tolist(), strict=True))
        total["gap"] += int(self.gap_ns.sum())
        length = self.length_ns
        return {key: value / length if length else 0.0 for key, value in total.items()}

    def loader_ns(self) -> int:
        """Nanoseconds of the path in which a rank fetches its next batch, or waits for the loader's threads to return."""
        graph = self.timeline.graph
        loading = np.array([name.startswith((LOADER, LOADER_WAIT)) for name in graph.names] + [False], np.bool_)
        return int((self.own_ns + self.gap_ns)[loading[graph.name[self.nodes]]].sum())

    def time_by(self, what: str) -> dict[str, int]:
        """Nanoseconds of the path by "axis", "layer", "rank", "name" or "reason", gaps with the node they delay."""
        graph, out = self.timeline.graph, defaultdict[str, int](int)
        labels: dict[str, Callable[[int], str]] = {
            "axis": graph.axis_of,
            "layer": graph.layer_of,
            "name": graph.name_of,
            "rank": lambda node: str(graph.rank[node]),
        }
        label = labels.get(what, graph.name_of)
        for at, node in enumerate(self.nodes.tolist()):
            if what == "reason":
                out[self.gap_reason(at)] += int(self.gap_ns[at])
                continue
            out[label(node)] += int(self.own_ns[at] + self.gap_ns[at])
        return dict(sorted(out.items(), key=lambda item: (-item[1], item[0])))


def _segment(rank: int, lane: str, name: str, kind: str, start_ns: int, dur_ns: int) -> dict[str, object]:
    return {"rank": rank, "lane": lane, "name": name, "kind": kind, "start_ns": start_ns, "dur_ns": dur_ns}


@jit
def _walk_back(binding: Int32Array, last: int) -> Int32Array:
    length = 0
    v = last
    while v >= 0:
        length += 1
        v = binding[v]
    out = np.empty(length, np.int32)
    v = last
    for i in range(length - 1, -1, -1):
        out[i] = v
        v = binding[v]
    return out


def critical_path(timeline: Timeline) -> CriticalPath:
    """The path that ends with the last node to end; its length is the makespan to the nanosecond."""
    if not len(timeline.end_ns):
        empty = np.zeros(0, np.int64)
        return CriticalPath(
            timeline, empty.astype(np.int32), empty, empty, empty.astype(np.int32), empty.astype(np.int32)
        )
    nodes = _walk_back(timeline.binding, int(timeline.end_ns.argmax()))
    return _measure(timeline, nodes)


def _measure(timeline: Timeline, nodes: Int32Array) -> CriticalPath:
    """Contributions and gaps along a chain of nodes of which each one decides the start of the next."""
    start, end = timeline.start_ns[nodes], timeline.end_ns[nodes]
    own = end - start
    gap = np.zeros(len(nodes), np.int64)
    gap[0] = start[0] - timeline.origin_ns
    gap[1:] = start[1:] - end[:-1]
    own[:-1] += np.minimum(gap[1:], 0)
    borrowed = np.minimum(own, 0)
    own -= borrowed
    gap[1:] = np.maximum(gap[1:], 0)
    gap[1:] += borrowed[:-1]
    kind, source = _edge_labels(timeline.graph, nodes)
    return CriticalPath(timeline, nodes, own, gap, kind, source)


@jit
def _find_edges(pred_ptr: IntArray, pred: Int32Array, nodes: Int32Array) -> IntArray:
    out = np.full(len(nodes), -1, np.int64)
    for i in range(1, len(nodes)):
        for e in range(pred_ptr[nodes[i]], pred_ptr[nodes[i] + 1]):
            if pred[e] == nodes[i - 1]:
                out[i] = e
                break
    return out


def _edge_labels(graph: Graph, nodes: Int32Array) -> tuple[Int32Array, Int32Array]:
    edge = _find_edges(graph.pred_ptr, graph.pred, nodes)
    kind, source = np.full(len(nodes), -1, np.int32), np.full(len(nodes), -1, np.int32)
    found = edge >= 0
    kind[found], source[found] = graph.edge_kind[edge[found]], graph.edge_source[edge[found]]
    return kind, source


@jit
def _tails(dur_ns: IntArray, pred_ptr: IntArray, pred: Int32Array, lag_ns: IntArray) -> tuple[IntArray, Int32Array]:
    """Longest time from the end of each node to the end of any other, and the successor on that way (-1 none)."""
    n = len(dur_ns)
    tail, following = np.zeros(n, np.int64), np.full(n, -1, np.int32)
    for v in range(n - 1, -1, -1):
        for e in range(pred_ptr[v], pred_ptr[v + 1]):
            through = lag_ns[e] + dur_ns[v] + tail[v]
            if through > tail[pred[e]]:
                tail[pred[e]] = through
                following[pred[e]] = v
    return tail, following


def slack(timeline: Timeline) -> IntArray:
    """How much later each node could end without moving the last end, int64[n]; 0 on the critical path."""
    graph = timeline.graph
    tail, _ = _tails(timeline.end_ns - timeline.start_ns, graph.pred_ptr, graph.pred, graph.lag_ns)
    return int(timeline.end_ns.max()) - (timeline.end_ns + tail) if len(graph) else np.zeros(0, np.int64)


def next_paths(timeline: Timeline, count: int = 5, differ: float = 0.2) -> list[tuple[int, Int32Array]]:
    """The longest chains that differ from each other in at least `differ` of their time: (length_ns, nodes), longest first.

    Each is the longest chain through one edge off the paths found so far. The first is the critical path.
    """
    graph = timeline.graph
    if not len(graph):
        return []
    dur = timeline.end_ns - timeline.start_ns
    tail, following = _tails(dur, graph.pred_ptr, graph.pred, graph.lag_ns)
    dst = graph.edge_dst
    through = timeline.end_ns[graph.pred] + graph.lag_ns + dur[dst] + tail[dst] - timeline.origin_ns
    first = critical_path(timeline).nodes
    found = [(timeline.makespan_ns, first)]
    used = np.zeros(len(graph), np.bool_)
    used[first] = True
    looked = 0
    for edge in np.argsort(-through, kind="stable").tolist():
        if len(found) > count or looked >= MOST_LOOKS:
            break
        if used[dst[edge]]:
            continue
        looked += 1
        nodes = _through(timeline, following, int(graph.pred[edge]), int(dst[edge]))
        if _new_share(nodes, used, dur) >= differ:
            found.append((int(through[edge]), nodes))
        used[nodes] = True  # a chain too like the others is not looked at again either
    return found


def _through(timeline: Timeline, following: Int32Array, src: int, dst: int) -> Int32Array:
    return np.concatenate((_walk_back(timeline.binding, src), _walk_back(following, dst)[::-1]))


def _new_share(nodes: Int32Array, used: BoolArray, dur: IntArray) -> float:
    total = int(dur[nodes].sum())
    return float(dur[nodes[~used[nodes]]].sum() / total) if total else 0.0
