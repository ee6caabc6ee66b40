"""Turns a replay into where its time went: compute, exposed communication by axis, rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from scaletrace.extrapolate.layout import axis_of
from scaletrace.extrapolate.overlap import Plan, covered, plan, resident, union
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph
from scaletrace.replay.steps import step_window


def step_times_ns(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Every counted step, mean over ranks (replay.steps.StepWindow); int64[steps]."""
    return step_window(graph, start_ns, end_ns).times_ns


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the mean rank's time goes, as shares of the window; exposed by axis adds up to at least `exposed`.

    resident          some collective is on the rank, exposed or not
    waiting_by_axis   the part of by_axis in which the rank waits for others and nothing moves
    """

    compute: float
    exposed: float
    by_axis: Mapping[str, float]
    resident: float = 0.0
    waiting_by_axis: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """Neither computing nor exposed to communication: host, stalls, idle."""
        return max(0.0, 1.0 - self.compute - self.exposed)


def shares(graph: Graph, start_ns: IntArray, end_ns: IntArray, made: Plan | None = None) -> Shares:
    """Compute and exposed communication of a replay, averaged over ranks weighted by their multiplicity.

    Exposed = a collective is resident on the rank (waiting or moving data) and no compute runs there. Each rank counts
    over its own steps (replay.steps).
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
    busy = exposed = held = 0.0
    by_axis, waiting = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for at, rank in enumerate(window.ranks.tolist()):
        low, high = int(window.low_ns[at]), int(window.high_ns[at])
        weight = weights[at] / max(1, high - low)
        work = made.compute.get(rank, np.zeros(0, np.int64))
        ours = union(np.clip(start_ns[work], low, high), np.clip(end_ns[work], low, high))
        mine = np.flatnonzero(stays.rank == rank)
        begin, moving, end = (np.clip(t[mine], low, high) for t in (stays.low_ns, stays.moving_ns, stays.high_ns))
        busy += weight * _length(*ours)
        held += weight * _length(*union(begin, end))
        exposed += weight * _uncovered(begin, end, *ours)
        for name in names:
            part = axis[mine] == name
            by_axis[name] += weight * _uncovered(begin[part], end[part], *ours)
            waiting[name] += weight * _uncovered(begin[part], moving[part], *ours)
    plain = ({name: float(share) for name, share in each.items()} for each in (by_axis, waiting))
    return Shares(float(busy), float(exposed), next(plain), float(held), next(plain))


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
