"""Turns a Timeline into where each rank's wall time went: parts that exclude each other and sum to the wall exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, LOADER, LOADER_WAIT, EdgeKind, Graph, NodeKind
from scaletrace.replay.steps import step_window
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
    loader_ns           the part of host_ns in which the rank fetches its next batch, or waits for the loader's threads
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
    loader_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        parts = {f"{part}_ns": getattr(self, f"{part}_ns") for part in PARTS}
        by_kind = {"host_by_kind_ns": {"data loader": self.loader_ns, "other": self.host_ns - self.loader_ns}}
        return {**parts, "exposed_by_axis_ns": self.exposed_by_axis_ns, **by_kind, "wall_ns": self.wall_ns}


def breakdown(timeline: Timeline, window: tuple[int, int] | None = None) -> list[RankBreakdown]:
    """One RankBreakdown a rank over `window` (start_ns, end_ns), by default from the first start to the last end."""
    graph = timeline.graph
    if not len(graph):
        return []
    whole = window or (timeline.origin_ns, int(timeline.end_ns.max()))
    return _over(timeline, dict.fromkeys(np.unique(graph.rank[graph.lane >= 0]).tolist(), whole))


def step_breakdown(timeline: Timeline) -> dict[str, float]:
    """The parts of the mean step of the mean rank in ns, over what the step time counts (replay.steps); they add up to it.

    Empty for a graph without work.
    """
    graph = timeline.graph
    seen = step_window(graph, timeline.start_ns, timeline.end_ns)
    spans = zip(seen.ranks.tolist(), seen.low_ns.tolist(), seen.high_ns.tolist(), strict=True)
    found = _over(timeline, {rank: (low, high) for rank, low, high in spans})
    count = int(seen.steps.sum())
    return {
        f"{part}_ns": sum(getattr(one, f"{part}_ns") for one in found) / count for part in (*PARTS, "wall") if count
    }


def _over(timeline: Timeline, windows: Mapping[int, tuple[int, int]]) -> list[RankBreakdown]:
    """One RankBreakdown for each of these ranks, each over its own window."""
    graph = timeline.graph
    comm_start = _arrivals(timeline)
    used = np.unique(graph.instance[graph.nodes(NodeKind.TRANSFER)]).tolist()
    named = {instance: _axis(graph, instance) for instance in used}
    axes = sorted(set(named.values()))
    table = np.zeros(len(graph.collectives) + 1, np.int32)
    for instance, axis in named.items():
        table[instance] = axes.index(axis)
    return [
        _of_rank(timeline, rank, low, high, comm_start, table[graph.instance], axes)
        for rank, (low, high) in windows.items()
    ]


def to_frame(parts: list[RankBreakdown]) -> pd.DataFrame:
    """One row a rank."""
    columns = (*PARTS, "loader")
    rows = [{"rank": p.rank, "wall_ns": p.wall_ns} | {f"{k}_ns": getattr(p, f"{k}_ns") for k in columns} for p in parts]
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
    """Class of every node (index into compute, comm, memory, stall, host, data loader; -1 none), and whether it has one."""
    of_kind = np.full(len(NodeKind), -1, np.int8)
    of_kind[[NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.COPY, NodeKind.STALL]] = (0, 1, 2, 3)
    of_kind[[NodeKind.HOST, NodeKind.LAUNCH]] = (4, 4)
    out = of_kind[graph.kind]
    if not has_device:
        out[graph.nodes(NodeKind.HOST) & ~_named(graph, (BETWEEN,))] = 0
    out[graph.nodes(NodeKind.HOST, NodeKind.WAIT) & _named(graph, (LOADER, LOADER_WAIT))] = 5
    return out, out >= 0


def _named(graph: Graph, starts: tuple[str, ...]) -> BoolArray:
    table = np.array([name.startswith(starts) for name in graph.names] + [False], np.bool_)
    return table[graph.name]


def _loader_waits(timeline: Timeline, start: IntArray) -> IntArray:
    """Starts of the nodes, for a WAIT the end of what its own thread did before it: a wait has no duration of its own."""
    graph, dst = timeline.graph, timeline.graph.edge_dst
    own = graph.nodes(NodeKind.WAIT)[dst] & (graph.edge_kind == EdgeKind.PROGRAM)
    out = start.copy()
    out[dst[own]] = np.minimum(start[dst[own]], timeline.end_ns[graph.pred[own]])
    return out


def _of_rank(
    timeline: Timeline, rank: int, low: int, high: int, comm_start: IntArray, axis_of: Int32Array, axes: list[str]
) -> RankBreakdown:
    graph = timeline.graph
    mine = graph.rank == rank
    has_device = any(lane.is_device for lane in graph.lanes if lane.rank == rank)
    kind, counted = _classes(graph, has_device)
    nodes = np.flatnonzero(mine & counted)
    begun = _loader_waits(timeline, timeline.start_ns) if (kind[nodes] == 5).any() else timeline.start_ns
    start = np.where(kind[nodes] == 1, comm_start[nodes], begun[nodes])
    end = timeline.end_ns[nodes]
    column = np.where(kind[nodes] == 1, 6 + axis_of[nodes], kind[nodes])
    time, active = _active(np.clip(start, low, high), np.clip(end, low, high), column, 6 + len(axes), low, high)
    work, memory, stall, loading = active[0], active[2], active[3], active[5]
    host = active[4] | loading
    comm = active[6:].any(axis=0) if len(axes) else np.zeros(len(time), np.bool_)
    everything = np.ones(len(time), np.bool_)
    if not has_device:
        work = work & ~loading  # while the main thread waits for a batch, what other threads do is loading it
        busy = work | host
        states = [work & ~comm, busy & comm, comm & ~busy, memory & ~busy, stall, host, everything]
    else:
        states = [work & ~comm, work & comm, comm, memory, stall, host, everything]
    parts, left = {}, everything.copy()
    for name, state in zip(PARTS, states, strict=True):
        parts[name] = state & left
        left &= ~state
    return RankBreakdown(
        rank=rank,
        wall_ns=high - low,
        exposed_by_axis_ns=_by_axis(time, parts["exposed_comm"], active[6:], axes),
        loader_ns=int(time[parts["host"] & loading].sum()),
        **{f"{name}_ns": int(time[part].sum()) for name, part in parts.items()},
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
