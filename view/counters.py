"""Turns the slices of one rank into step functions: exposed communication, overlap, queue depth, link throughput."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, GraphCollective, NodeKind
from scaletrace.view.layout import Rows
from scaletrace.view.sink import FloatArray

_TWICE = "all_reduce"
_WHOLE = ("broadcast", "reduce", "send", "recv", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Curve:
    """A counter to draw: `values[i]` holds from `at_ns[i]` on."""

    name: str
    unit: str
    at_ns: IntArray
    values: IntArray | FloatArray


def bus_bytes(collective: GraphCollective, ranks: int) -> float:
    """Bytes over the busiest link, in NCCL's convention (nccl-tests PERFORMANCE.md): 0 where the payload is unknown."""
    payload = max(collective.bytes_in, collective.bytes_out)
    if payload <= 0 or ranks < 2 or collective.kind == "barrier":
        return 0.0
    factor = 1.0 if collective.kind in _WHOLE else (ranks - 1) / ranks
    return payload * factor * (2 if collective.kind == _TWICE else 1)


def steps(start: IntArray, end: IntArray, weight: FloatArray | None = None) -> tuple[IntArray, FloatArray]:
    """(times, sums): the sum of the weights of the open intervals, from each time on; without weights, how many are open."""
    many = np.ones(len(start)) if weight is None else weight
    at = np.concatenate([start, end])
    change = np.concatenate([many, -many])
    order = np.argsort(at, kind="stable")
    times, first = np.unique(at[order], return_index=True)
    if not len(times):
        return np.zeros(0, np.int64), np.zeros(0)
    return times, np.cumsum(np.add.reduceat(change[order], first))


def _changes(at: IntArray, values: IntArray | FloatArray) -> tuple[IntArray, IntArray | FloatArray]:
    """Only the steps where the value changes."""
    kept = np.ones(len(values), np.bool_)
    kept[1:] = values[1:] != values[:-1]
    return at[kept], values[kept]


def _at(times: IntArray, values: FloatArray, when: IntArray) -> FloatArray:
    """Value of a step function at some times, 0 before its first step."""
    return np.concatenate([np.zeros(1), values])[np.searchsorted(times, when, side="right")]


def loads_of(rows: Rows) -> FloatArray:
    """float64[instances]: bytes over the busiest link of every collective of the graph."""
    graph = rows.variant.graph
    sizes = [graph.groups[c.group].size if 0 <= c.group < len(graph.groups) else 0 for c in graph.collectives]
    return np.array([bus_bytes(c, size) for c, size in zip(graph.collectives, sizes, strict=True)], np.float64)


def rank_curves(rows: Rows, mine: IntArray, loads: FloatArray) -> list[Curve]:
    """The counters of one rank; `mine` int64[k] are its rows, `loads` the answer of `loads_of`. Empty ones are left out."""
    graph = rows.variant.graph
    node = rows.node[mine]
    kind = graph.kind[node]
    communicates = (kind == NodeKind.TRANSFER) | ((graph.instance[node] >= 0) & (kind == NodeKind.KERNEL))
    computes = _computes(rows, mine, communicates)
    comm_at, comm = steps(rows.start_ns[mine][communicates], rows.end_ns[mine][communicates])
    work_at, work = steps(rows.start_ns[mine][computes], rows.end_ns[mine][computes])
    when = np.union1d(comm_at, work_at)
    in_comm, in_work = _at(comm_at, comm, when) > 0, _at(work_at, work, when) > 0
    curves = []
    if len(comm_at):
        curves.append(Curve("exposed communication", "0 or 1", *_changes(when, (in_comm & ~in_work).astype(np.int64))))
        curves.append(Curve("overlap", "0 or 1", *_changes(when, (in_comm & in_work).astype(np.int64))))
    queue = _queue(rows, mine)
    if queue is not None:
        curves.append(queue)
    bandwidth = _bandwidth(rows, mine[kind == NodeKind.TRANSFER], loads)
    return curves + ([bandwidth] if bandwidth is not None else [])


def _computes(rows: Rows, mine: IntArray, communicates: BoolArray) -> BoolArray:
    """What counts as computing: kernels on a rank that has streams, host operations on one that has none (gloo)."""
    graph = rows.variant.graph
    kind = graph.kind[rows.node[mine]]
    wanted = NodeKind.KERNEL if np.any((kind == NodeKind.KERNEL) & ~communicates) else NodeKind.HOST
    computes: BoolArray = (kind == wanted) & ~communicates
    return computes


def _queue(rows: Rows, mine: IntArray) -> Curve | None:
    """Kernels launched but not started: up when the launch call ends, down when the kernel starts."""
    graph = rows.variant.graph
    nodes = rows.node[mine]
    device = nodes[np.isin(graph.kind[nodes], np.array((NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER), np.uint8))]
    first, last = graph.pred_ptr[device], graph.pred_ptr[device + 1]
    edge = np.repeat(first - np.concatenate([np.zeros(1, np.int64), np.cumsum(last - first)[:-1]]), last - first)
    edge = edge + np.arange(len(edge))
    target = np.repeat(device, last - first)
    launch = graph.edge_kind[edge] == EdgeKind.LAUNCH
    src, dst = graph.pred[edge[launch]].astype(np.int64), target[launch]
    known = rows.variant.known[src]
    up = rows.variant.end_ns[src[known]]
    down = rows.start_ns[rows.row_of[dst[known]]]
    if not len(up):
        return None
    at, depth = steps(up, np.maximum(up, down))
    return Curve("queue depth", "kernels", *_changes(at, depth.astype(np.int64)))


def _bandwidth(rows: Rows, row: IntArray, loads: FloatArray) -> Curve | None:
    """Bus bandwidth in GB/s while transfers run; instances of unknown payload or of no duration are left out."""
    if not len(loads) or not len(row):
        return None
    instance = rows.variant.graph.instance[rows.node[row]]
    start, end = rows.start_ns[row] + rows.wait_ns[row], rows.end_ns[row]
    useful = (instance >= 0) & (end > start)
    load = np.where(instance >= 0, loads[np.maximum(instance, 0)], 0.0)
    useful &= load > 0
    if not useful.any():
        return None
    at, rate = steps(start[useful], end[useful], load[useful] / (end[useful] - start[useful]))
    return Curve("link throughput", "GB/s", *_changes(at, np.maximum(rate, 0.0).round(6)))
