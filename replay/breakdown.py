"""Turns a Timeline into where each rank's wall time went: parts that exclude each other and sum to the wall exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, EdgeKind, Graph, NodeKind
from scaletrace.replay.timeline import Timeline

PARTS = ("compute", "overlapped_comm", "exposed_comm", "memory", "stall", "host", "idle")


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """One rank's window in nanoseconds; the parts exclude each other and sum to `wall_ns`.

    compute_ns          kernels (operators of a rank without a device) while nothing communicates
    overlapped_comm_ns  communication under computation;  exposed_comm_ns: communication, waiting included, without any
    memory_ns           copies while nothing else runs;  stall_ns: delays that no rule explains
    host_ns             the device has nothing to do because the host is still at work;  idle_ns: the rest
    exposed_by_axis_ns  exposed_comm_ns by axis of the group ("" unknown)
    """

    rank: int
    wall_ns: int
    compute_ns: int
    overlapped_comm_ns: int
    exposed_comm_ns: int
    memory_ns: int
    stall_ns: int
    host_ns: int
    idle_ns: int
    exposed_by_axis_ns: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        parts = {f"{part}_ns": getattr(self, f"{part}_ns") for part in PARTS}
        return {**parts, "exposed_by_axis_ns": self.exposed_by_axis_ns, "wall_ns": self.wall_ns}


def breakdown(timeline: Timeline, window: tuple[int, int] | None = None) -> list[RankBreakdown]:
    """One RankBreakdown a rank over `window` (start_ns, end_ns), by default from the first start to the last end."""
    graph = timeline.graph
    if not len(graph):
        return []
    start, end = window or (timeline.origin_ns, int(timeline.end_ns.max()))
    comm_start = _arrivals(timeline)
    ranks = np.unique(graph.rank[graph.lane >= 0]).tolist()
    used = np.unique(graph.instance[graph.nodes(NodeKind.TRANSFER)]).tolist()
    named = {instance: _axis(graph, instance) for instance in used}
    axes = sorted(set(named.values()))
    table = np.zeros(len(graph.collectives) + 1, np.int32)
    for instance, axis in named.items():
        table[instance] = axes.index(axis)
    return [_of_rank(timeline, rank, start, end, comm_start, table[graph.instance], axes) for rank in ranks]


def to_frame(parts: list[RankBreakdown]) -> pd.DataFrame:
    """One row a rank."""
    rows = [{"rank": p.rank, "wall_ns": p.wall_ns} | {f"{k}_ns": getattr(p, f"{k}_ns") for k in PARTS} for p in parts]
    return pd.DataFrame(rows)


def _axis(graph: Graph, instance: int) -> str:
    group = graph.collectives[instance].group if instance >= 0 else -1
    return graph.groups[group].axis if group >= 0 else ""


def _arrivals(timeline: Timeline) -> IntArray:
    """For each TRANSFER node when its rank arrived; the start of the node for others (int64[n])."""
    graph = timeline.graph
    start = timeline.start_ns.copy()
    dst = graph.edge_dst
    own = (graph.kind[graph.pred] == NodeKind.ARRIVE) & (graph.kind[dst] == NodeKind.TRANSFER)
    own &= graph.edge_kind == EdgeKind.STREAM
    start[dst[own]] = timeline.end_ns[graph.pred[own]]
    return start


def _classes(graph: Graph, has_device: bool) -> tuple[npt.NDArray[np.int8], BoolArray]:
    """Class of every node (index into compute, comm, memory, stall, host; -1 none)."""
    of_kind = np.full(len(NodeKind), -1, np.int8)
    of_kind[[NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.COPY, NodeKind.STALL]] = (0, 1, 2, 3)
    of_kind[[NodeKind.HOST, NodeKind.LAUNCH]] = (4, 4)
    out = of_kind[graph.kind]
    if not has_device:
        between = [code for code, name in enumerate(graph.names) if name.startswith(BETWEEN)]
        out[(graph.kind == NodeKind.HOST) & ~np.isin(graph.name, between)] = 0
    return out, out >= 0


def _of_rank(
    timeline: Timeline, rank: int, low: int, high: int, comm_start: IntArray, axis_of: Int32Array, axes: list[str]
) -> RankBreakdown:
    graph = timeline.graph
    mine = graph.rank == rank
    has_device = any(lane.is_device for lane in graph.lanes if lane.rank == rank)
    kind, counted = _classes(graph, has_device)
    nodes = np.flatnonzero(mine & counted)
    start = np.where(kind[nodes] == 1, comm_start[nodes], timeline.start_ns[nodes])
    end = timeline.end_ns[nodes]
    column = np.where(kind[nodes] == 1, 5 + axis_of[nodes], kind[nodes])
    time, active = _active(np.clip(start, low, high), np.clip(end, low, high), column, 5 + len(axes), low, high)
    work, memory, stall, host = active[0], active[2], active[3], active[4]
    comm = active[5:].any(axis=0) if len(axes) else np.zeros(len(time), np.bool_)
    if not has_device:
        busy = work | host
        states = [work & ~comm, busy & comm, comm & ~busy, memory & ~busy, stall, host, np.ones(len(time), np.bool_)]
    else:
        states = [work & ~comm, work & comm, comm, memory, stall, host, np.ones(len(time), np.bool_)]
    values, left = [], np.ones(len(time), np.bool_)
    for at, state in enumerate(states):
        part = state & left
        if PARTS[at] == "exposed_comm":
            exposed = part
        left &= ~part
        values.append(int(time[part].sum()))
    parts = dict(zip((f"{part}_ns" for part in PARTS), values, strict=True))
    return RankBreakdown(
        rank=rank, wall_ns=high - low, exposed_by_axis_ns=_by_axis(time, exposed, active[5:], axes), **parts
    )


def _active(
    start: IntArray, end: IntArray, column: Int32Array, columns: int, low: int, high: int
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Elementary intervals of [low, high): their lengths, and for each column whether any of its intervals covers them."""
    moments = np.unique(np.concatenate((start, end, np.array([low, high]))))
    delta = np.zeros((columns, len(moments)), np.int32)
    np.add.at(delta, (column, np.searchsorted(moments, start)), 1)
    np.add.at(delta, (column, np.searchsorted(moments, end)), -1)
    return np.diff(moments), np.cumsum(delta, axis=1)[:, :-1] > 0


def _by_axis(time: IntArray, exposed: BoolArray, active: npt.NDArray[np.bool_], axes: list[str]) -> dict[str, int]:
    """Exposed time by axis; where several axes communicate at once the first in the alphabet gets it."""
    out, left = {}, exposed.copy()
    for at, axis in enumerate(axes):
        part = left & active[at]
        left &= ~part
        if part.any():
            out[axis] = int(time[part].sum())
    return out
