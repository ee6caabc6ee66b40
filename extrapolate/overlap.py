"""Turns a replay into how long each kernel ran beside a resident collective, and durations into ones with that slowdown.

Measured durations hold the slowdown of the measured overlap. It is taken out before another overlap is put in:
dur' = dur · (1 + κ·f') / (1 + κ·f), with f the share of the kernel during which a collective was resident on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.compute import device_lanes
from scaletrace.jit import jit
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind

Floats = npt.NDArray[np.float64]
PAIRS_WANTED = 5
"""A kernel counts as evidence where it ran at least this often with, and as often without, a resident collective."""
MOSTLY, HARDLY = 0.8, 0.05
LARGEST_KAPPA = 2.0


@jit
def _covered(start: IntArray, end: IntArray, low: IntArray, high: IntArray, before: IntArray) -> IntArray:
    """How much of each [start, end) the sorted disjoint intervals [low, high) cover; before: running total of them."""
    out = np.zeros(len(start), np.int64)
    count = len(low)
    for i in range(len(start)):
        first = np.searchsorted(high, start[i], side="right")
        last = np.searchsorted(low, end[i], side="left")
        if first >= last or first >= count:
            continue
        total = before[last] - before[first]
        total -= max(0, start[i] - low[first])
        total -= max(0, high[last - 1] - end[i])
        out[i] = max(0, total)
    return out


def union(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Disjoint intervals, sorted, that cover the same as [low, high)."""
    keep = high > low
    low, high = low[keep], high[keep]
    if not len(low):
        return low, high
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.ones(len(low), np.bool_)
    new[1:] = low[1:] > high[:-1]
    firsts = np.flatnonzero(new)
    return low[firsts], high[np.append(firsts[1:], len(low)) - 1]


def covered(start: IntArray, end: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """ns of each [start, end) that the union of [low, high) covers; all int64."""
    low, high = union(low, high)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(high - low)))
    return _covered(start, end, low, high, before)


def resident(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Rank, instance, start and end of every member's stay: from its arrival to the end of its transfer."""
    nodes = np.flatnonzero(graph.kind == NodeKind.TRANSFER)
    begin = start_ns[nodes].copy()
    for at, node in enumerate(nodes.tolist()):
        preds = graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]]
        own = preds[(graph.kind[preds] == NodeKind.ARRIVE) & (graph.rank[preds] == graph.rank[node])]
        if len(own):
            begin[at] = min(begin[at], start_ns[own].min())
    return graph.rank[nodes].astype(np.int64), graph.instance[nodes].astype(np.int64), begin, end_ns[nodes]


def overlap_share(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> Floats:
    """Share of every device kernel that ran while a collective was resident on its rank; float64[n], 0 elsewhere."""
    out = np.zeros(len(graph))
    kernels = np.flatnonzero((graph.kind == NodeKind.KERNEL) & device_lanes(graph))
    ranks, _, low, high = resident(graph, start_ns, end_ns)
    for rank in np.unique(graph.rank[kernels]):
        mine = kernels[graph.rank[kernels] == rank]
        stay = ranks == rank
        busy = covered(start_ns[mine], end_ns[mine], low[stay], high[stay])
        out[mine] = busy / np.maximum(1, end_ns[mine] - start_ns[mine])
    return out


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much slower compute runs while a collective is resident (κ), by kernel class, and how that is known.

    default  κ of classes without evidence;  by_name  κ of kernels that the trace itself tells
    """

    default: float
    by_name: Mapping[str, float]
    source: str
    pairs: int = 0

    def per_node(self, graph: Graph) -> Floats:
        """κ of every node; float64[n]."""
        by_code = np.array([self.by_name.get(name, self.default) for name in graph.names] + [self.default])
        return np.asarray(by_code[graph.name])


def measure(graph: Graph, share: Floats, prior: float, dur_ns: IntArray | None = None) -> Slowdown:
    """κ from kernels that ran both with and without a resident collective, of the same name and grid.

    For each such kernel κ = ratio of medians - 1. The default becomes their time-weighted mean, drawn to the prior as
    if that were worth PAIRS_WANTED kernels. Negative values are kept in the mean but not applied.
    """
    durations = graph.dur_ns if dur_ns is None else dur_ns
    kernels = np.flatnonzero((graph.kind == NodeKind.KERNEL) & device_lanes(graph) & (durations > 0))
    blocks = graph.blocks if len(graph.blocks) else np.zeros(len(graph), np.int32)
    found: dict[str, list[tuple[float, float]]] = {}
    key = graph.name[kernels].astype(np.int64) * (2**31) + blocks[kernels]
    order = np.argsort(key, kind="stable")
    _, first = np.unique(key[order], return_index=True)
    for group in np.split(kernels[order], first[1:]):
        beside, free = group[share[group] >= MOSTLY], group[share[group] <= HARDLY]
        if min(len(beside), len(free)) < PAIRS_WANTED:
            continue
        ratio = float(np.median(durations[beside]) / np.median(durations[free]))
        weight = float(durations[group].sum())
        found.setdefault(graph.name_of(int(group[0])), []).append((ratio - 1.0, weight))
    if not found:
        return Slowdown(prior, {}, "prior of the device")
    by_name = {
        name: min(LARGEST_KAPPA, max(0.0, sum(k * w for k, w in rows) / sum(w for _, w in rows)))
        for name, rows in found.items()
    }
    weight = sum(w for rows in found.values() for _, w in rows)
    mean = sum(k * w for rows in found.values() for k, w in rows) / weight
    count = sum(len(rows) for rows in found.values())
    default = max(0.0, (mean * count + prior * PAIRS_WANTED) / (count + PAIRS_WANTED))
    return Slowdown(default, by_name, f"measured on {count} kernels with and without a resident collective", count)


def apply(dur_ns: IntArray, kappa: Floats, was: Floats, now: Floats) -> IntArray:
    """Durations with the overlap `was` taken out and `now` put in; bits stay where the overlap does."""
    same = was == now
    scaled = dur_ns * (1 + kappa * now) / (1 + kappa * was)
    return np.where(same, dur_ns, np.round(scaled)).astype(np.int64)
