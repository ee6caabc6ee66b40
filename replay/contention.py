"""Turns a Timeline into how much kernels lose while communication runs beside them, and durations with or without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.kernels import UNKNOWN, classify
from scaletrace.replay.timeline import Timeline

FloatArray = npt.NDArray[np.float64]
ENOUGH = 5
LARGEST = 3.0
BESIDE, ALONE = 0.9, 0.1


@dataclass(frozen=True, slots=True)
class Slowdown:
    """factor float64[n]: how many times longer each node takes under full overlap (1 for all but kernels).

    measured  names with at least five samples with and without overlap; others take the median of their class, and
    pooled    where no name of the class was measured, the median of all
    """

    factor: FloatArray
    measured: dict[str, float]
    pooled: float

    def stretch(self, share: FloatArray) -> FloatArray:
        """The factor at a given overlapped share, float64[n]."""
        return 1 + (self.factor - 1) * share

    def describe(self) -> str:
        if not self.measured:
            return "no kernel has samples both with and without overlap: no slowdown by overlap is assumed"
        return (
            f"slowdown by overlapped communication: measured for {len(self.measured)} kernel names, "
            f"the median of their class, or of all ({self.pooled:.2f}), taken for the rest"
        )


def overlapped_share(timeline: Timeline) -> FloatArray:
    """Share of each kernel's time during which its rank moves data, float64[n]; 0 for other nodes."""
    graph = timeline.graph
    out = np.zeros(len(graph))
    kernel, transfer = graph.nodes(NodeKind.KERNEL), graph.nodes(NodeKind.TRANSFER)
    for rank in np.unique(graph.rank[transfer]).tolist():
        at = np.flatnonzero(kernel & (graph.rank == rank))
        busy = np.flatnonzero(transfer & (graph.rank == rank))
        start, end = _union(timeline.start_ns[busy], timeline.end_ns[busy])
        low, high = timeline.start_ns[at], timeline.end_ns[at]
        covered = _covered(high, start, end) - _covered(low, start, end)
        out[at] = covered / np.maximum(high - low, 1)
    return out


def _union(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Disjoint intervals that cover the same time."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    fresh = np.ones(len(start), np.bool_)
    fresh[1:] = start[1:] > reach[:-1]
    return start[fresh], reach[np.append(np.flatnonzero(fresh)[1:] - 1, len(start) - 1)]


def _covered(time: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """How much of the intervals lies before each time."""
    total = np.concatenate(([0], np.cumsum(end - start)))
    at = np.searchsorted(start, time, side="right")
    inside = np.minimum(time, end[np.maximum(at - 1, 0)]) - start[np.maximum(at - 1, 0)]
    return np.where(at > 0, total[np.maximum(at - 1, 0)] + inside, 0)


def fit_slowdown(timeline: Timeline) -> Slowdown:
    """Measure the slowdown per kernel name from samples of the same trace, medians on both sides."""
    graph, share = timeline.graph, overlapped_share(timeline)
    kernel = np.flatnonzero(graph.nodes(NodeKind.KERNEL))
    by_name: dict[int, float] = {}
    order = kernel[np.lexsort((_blocks(graph)[kernel], graph.name[kernel]))]
    key = np.stack((graph.name[order], _blocks(graph)[order]), axis=1) if len(order) else np.zeros((0, 2))
    cuts = np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1 if len(order) else np.zeros(0, np.int64)
    ratios: dict[int, list[tuple[float, int]]] = {}
    for part in np.split(order, cuts):
        beside, alone = part[share[part] >= BESIDE], part[share[part] <= ALONE]
        if len(beside) < ENOUGH or len(alone) < ENOUGH or not np.median(graph.dur_ns[alone]):
            continue
        ratio = float(np.median(graph.dur_ns[beside]) / np.median(graph.dur_ns[alone]))
        ratios.setdefault(int(graph.name[part[0]]), []).append((ratio, len(beside)))
    for name, found in ratios.items():
        weighted = sum(r * w for r, w in found) / sum(w for _, w in found)
        by_name[name] = float(np.clip(weighted, 1.0, LARGEST))
    pooled = float(np.median(list(by_name.values()))) if by_name else 1.0
    table = _by_class(graph, by_name, pooled)
    factor = np.where(graph.nodes(NodeKind.KERNEL), table[graph.name], 1.0)
    return Slowdown(factor, {graph.names[name]: value for name, value in by_name.items()}, pooled)


def _by_class(graph: Graph, by_name: dict[int, float], pooled: float) -> FloatArray:
    """Factor of each name: its own, else the median of its class (matmul, norm, …), else the pooled one."""
    table = np.full(len(graph.names) + 1, pooled)
    if not by_name:
        return table
    codes = classify(graph.names)
    measured = np.array(sorted(by_name), np.int64)
    values = np.array([by_name[int(name)] for name in measured])
    for code in np.unique(codes[measured]):
        if code != UNKNOWN:
            table[:-1][codes == code] = np.median(values[codes[measured] == code])
    table[measured] = values
    return table


def _blocks(graph: Graph) -> npt.NDArray[np.int32]:
    return graph.blocks if len(graph.blocks) else np.zeros(len(graph), np.int32)
