"""Turns the ends of nodes into step times, and a replay into where its time went: compute, exposed communication, rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.layout import axis_of
from scaletrace.extrapolate.overlap import covered, resident, union
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind

Floats = npt.NDArray[np.float64]


def step_ends(graph: Graph, end_ns: IntArray) -> dict[int, int]:
    """Latest end of every step over all ranks, by step number."""
    inside = (graph.step >= 0) & (graph.kind != NodeKind.RENDEZVOUS)
    steps = np.unique(graph.step[inside])
    out = np.full(int(steps.max()) + 1 if len(steps) else 0, np.iinfo(np.int64).min)
    np.maximum.at(out, graph.step[inside], end_ns[inside])
    return {int(step): int(out[step]) for step in steps}


def step_window(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> tuple[int, int, int]:
    """(from, to, steps): the whole steps that can be timed from end to end; everything where there is one or none."""
    ends = sorted(step_ends(graph, end_ns).items())
    if len(ends) >= 2:
        return ends[0][1], ends[-1][1], len(ends) - 1
    if not len(graph):
        return 0, 0, 1
    return int(start_ns.min()), int(end_ns.max()), 1


def step_times_ns(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Time of each whole step, from the end of the one before it; int64[steps]."""
    ends = [end for _, end in sorted(step_ends(graph, end_ns).items())]
    if len(ends) >= 2:
        return np.array([b - a for a, b in pairwise(ends)], np.int64)
    low, high, _ = step_window(graph, start_ns, end_ns)
    return np.array([high - low], np.int64)


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the mean rank's time goes, as shares of the window; exposed by axis adds up to at least `exposed`."""

    compute: float
    exposed: float
    by_axis: Mapping[str, float]

    @property
    def rest(self) -> float:
        """Neither computing nor exposed to communication: host, stalls, idle."""
        return max(0.0, 1.0 - self.compute - self.exposed)


def shares(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> Shares:
    """Compute and exposed communication of a replay, averaged over ranks weighted by their multiplicity.

    Exposed = a collective is resident on the rank (waiting or moving data) and no compute runs there.
    """
    low, high, _ = step_window(graph, start_ns, end_ns)
    length = max(1, high - low)
    begin, end = np.clip(start_ns, low, high), np.clip(end_ns, low, high)
    compute = compute_nodes(graph)
    stays = resident(graph, start_ns, end_ns)
    stay_low, stay_high = np.clip(stays.low_ns, low, high), np.clip(stays.high_ns, low, high)
    axis = np.array([_axis(graph, at) for at in range(len(graph.collectives))] + [""])[stays.instance]
    ranks = np.unique(graph.rank[compute | (graph.kind == NodeKind.TRANSFER)])
    weights = graph.multiplicity.astype(np.float64) if len(graph.multiplicity) == len(ranks) else np.ones(len(ranks))
    busy, exposed, by_axis = 0.0, 0.0, dict.fromkeys(sorted(set(axis.tolist())), 0.0)
    for rank, weight in zip(ranks.tolist(), (weights / weights.sum()).tolist(), strict=True):
        work = compute & (graph.rank == rank)
        work_low, work_high = union(begin[work], end[work])
        busy += weight * float((work_high - work_low).sum()) / length
        mine = stays.rank == rank
        exposed += weight * _uncovered(stay_low[mine], stay_high[mine], work_low, work_high) / length
        for name in by_axis:
            part = mine & (axis == name)
            by_axis[name] += weight * _uncovered(stay_low[part], stay_high[part], work_low, work_high) / length
    return Shares(busy, exposed, by_axis)


def _axis(graph: Graph, collective: int) -> str:
    group = graph.collectives[collective].group
    return axis_of(graph.groups[group].axis) if group >= 0 else "dp"


def _uncovered(low: IntArray, high: IntArray, work_low: IntArray, work_high: IntArray) -> float:
    """ns of the union of [low, high) outside the disjoint [work_low, work_high)."""
    low, high = union(low, high)
    if not len(low):
        return 0.0
    return float((high - low).sum() - covered(low, high, work_low, work_high).sum())
