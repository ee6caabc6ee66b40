"""Turns a replay into where its time went: compute and what it lost to communication, exposed communication by axis, rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.layout import axis_of
from scaletrace.extrapolate.overlap import Plan, covered, plan, resident, union
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph
from scaletrace.replay.steps import step_window

Floats = npt.NDArray[np.float64]


def step_times_ns(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Every counted step, mean over ranks (replay.steps.StepWindow); int64[steps]."""
    return step_window(graph, start_ns, end_ns).times_ns


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the mean rank's time goes, as shares of the window; exposed by axis adds up to at least `exposed`.

    resident          some collective is on the rank, exposed or not
    waiting_by_axis   the part of by_axis in which the rank waits for others and nothing moves
    slowed            the part of `compute` by which kernels take longer for collectives beside them
    hidden_by_axis    a collective of the axis is on the rank while it computes
    """

    compute: float
    exposed: float
    by_axis: Mapping[str, float]
    resident: float = 0.0
    waiting_by_axis: Mapping[str, float] = field(default_factory=dict)
    slowed: float = 0.0
    hidden_by_axis: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """Neither computing nor exposed to communication: host, stalls, idle."""
        return max(0.0, 1.0 - self.compute - self.exposed)


def shares(
    graph: Graph, start_ns: IntArray, end_ns: IntArray, made: Plan | None = None, lost: Floats | None = None
) -> Shares:
    """Compute and exposed communication of a replay, averaged over ranks weighted by their multiplicity.

    Exposed = a collective is resident on the rank (waiting or moving data) and no compute runs there. Each rank counts
    over its own steps (replay.steps).
    lost: of every node the share of its run that it lost to what ran beside it (overlap.lost_shares); default none.
    """
    window, made = step_window(graph, start_ns, end_ns), made or plan(graph)
    stays = resident(graph, start_ns, end_ns, made)
    axis = np.array([_axis(graph, at) for at in range(len(graph.collectives))] + [""])[stays.instance]
    names = sorted(set(axis.tolist()))
    all_ranks = np.unique([*made.compute, *np.unique(graph.rank[made.transfers]).tolist()])
    count = graph.multiplicity if len(graph.multiplicity) == len(all_ranks) else np.ones(len(all_ranks))
    weight_of = dict(zip(all_ranks.tolist(), count.tolist(), strict=True))
    weights = np.array([weight_of.get(rank, 0.0) for rank in window.ranks.tolist()], np.float64)
    weights /= max(1e-300, weights.sum())
    busy = exposed = held = slowed = 0.0
    by_axis, waiting, hidden = (dict.fromkeys(names, 0.0) for _ in range(3))
    for at, rank in enumerate(window.ranks.tolist()):
        low, high = int(window.low_ns[at]), int(window.high_ns[at])
        weight = weights[at] / max(1, high - low)
        work = made.compute.get(rank, np.zeros(0, np.int64))
        ours = union(np.clip(start_ns[work], low, high), np.clip(end_ns[work], low, high))
        mine = np.flatnonzero(stays.rank == rank)
        begin, moving, end = (np.clip(t[mine], low, high) for t in (stays.low_ns, stays.moving_ns, stays.high_ns))
        busy += weight * _length(*ours)
        if lost is not None and len(work):
            took = (end_ns[work] - start_ns[work]).astype(np.float64)
            slowed += weight * _length(*ours) * float((took * lost[work]).sum() / max(1.0, took.sum()))
        held += weight * _length(*union(begin, end))
        exposed += weight * _uncovered(begin, end, *ours)
        for name in names:
            part = axis[mine] == name
            open_ns = _uncovered(begin[part], end[part], *ours)
            by_axis[name] += weight * open_ns
            hidden[name] += weight * (_length(*union(begin[part], end[part])) - open_ns)
            waiting[name] += weight * _uncovered(begin[part], moving[part], *ours)
    plain = [{name: float(share) for name, share in each.items()} for each in (by_axis, waiting, hidden)]
    return Shares(float(busy), float(exposed), plain[0], float(held), plain[1], float(slowed), plain[2])


def _length(low: IntArray, high: IntArray) -> float:
    """Total of disjoint intervals."""
    return float((high - low).sum())


def _axis(graph: Graph, collective: int) -> str:
    group = graph.collectives[collective].group
    return axis_of(graph.groups[group].axis) if group >= 0 else "dp"


def _uncovered(low: IntArray, high: IntArray, work_low: IntArray, work_high: IntArray) -> float:
    """ns of the union of [low, high) outside the disjoint [work_low, work_high)."""
    low, high = union(low, high)
    if not len(low):
        return 0.0
    return _length(low, high) - float(covered(low, high, work_low, work_high).sum())
