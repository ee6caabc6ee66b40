"""Turns the points of a curve into the sizes whose measurement would narrow their bands most.

For each candidate the transfers that the curve predicts there are taken as if they had been measured; the costs are
calibrated anew with them, and the errors that the new calibration states at every point are compared with the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import FAMILY, Calibration, collective_seconds
from scaletrace.extrapolate.transfers import whole_bytes
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind

MOST_SUGGESTIONS = 3
NEARLY_BEST = 0.5
"""A size is suggested too where it narrows at least this share of what the best one does."""
REACH = 8
"""Up to so many times the measured ranks are taken to be at hand; larger sizes are named behind those."""
ALIKE = 0.02
"""Differences below this are none."""

Key = tuple[str, int, int, int]
"""(kind, bytes of the whole vector, ranks, stride) of a collective."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the transfers of one point take: seconds of one rank by kind of collective, and how often; the point's step
    and the error of it that they cause (5 to 95 %)."""

    gpus: int
    seconds: Mapping[Key, float]
    counts: Mapping[Key, int]
    step_s: float
    comm_error_s: float


@dataclass(frozen=True, slots=True)
class Worth:
    """A size, and the share by which measuring it narrows the communication error of the points, on average."""

    gpus: int
    narrows: float


def load_of(graph: Graph, dur_ns: IntArray, gpus: int, step_s: float, comm_error_s: float) -> Load:
    """The load of a stretched graph with its durations."""
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    count = np.bincount(graph.instance[nodes], minlength=len(graph.collectives))
    total = np.bincount(graph.instance[nodes], weights=dur_ns[nodes], minlength=len(graph.collectives))
    seconds: dict[Key, float] = {}
    counts: dict[Key, int] = {}
    for at in np.flatnonzero(count).tolist():
        item = graph.collectives[at]
        if item.group < 0 or item.kind not in FAMILY:
            continue
        group = graph.groups[item.group]
        key = (item.kind, max(1, whole_bytes(item, group.size)), group.size, max(1, group.stride))
        seconds[key] = seconds.get(key, 0.0) + float(total[at] / count[at]) * 1e-9
        counts[key] = counts.get(key, 0) + 1
    return Load(gpus, seconds, counts, step_s, comm_error_s)


def worth_measuring(
    loads: Sequence[Load],
    candidates: Sequence[Load],
    found: Sequence[Evidence],
    cluster: Cluster,
    measured: int,
    calibration: Calibration,
    nics: int | None = None,
) -> tuple[Worth, ...]:
    """Sizes beyond `measured` whose measurement narrows the bands of `loads` most: first those within REACH of what was
    measured, then larger ones that narrow more than any of these; each by how much, the smaller one where that is alike."""
    wide = [load for load in loads if load.gpus > measured and load.comm_error_s > 0 and load.seconds]
    was = {load.gpus: _error(load, cluster, calibration, nics) for load in wide}
    gains: list[Worth] = []
    for candidate in candidates:
        seen = _seen(candidate)
        if candidate.gpus <= measured or not seen or not wide:
            continue
        known = calibrate([*found, *seen], cluster)
        left = [_left(load, candidate, was[load.gpus], _error(load, cluster, known, nics)) for load in wide]
        gains.append(Worth(candidate.gpus, 1 - sum(left) / len(left)))
    near = _best([each for each in gains if each.gpus <= REACH * measured])
    beyond = max((each.narrows for each in near), default=0.0)
    far = _best([each for each in gains if each.gpus > REACH * measured and each.narrows > beyond + ALIKE])
    return (*near, *far)[:MOST_SUGGESTIONS]


def _best(gains: Sequence[Worth]) -> list[Worth]:
    """Those that narrow nearly as much as the best one, the best first, of those alike the smaller."""
    best = max((each.narrows for each in gains), default=0.0)
    kept = [each for each in gains if each.narrows > ALIKE and each.narrows >= NEARLY_BEST * best]
    return sorted(kept, key=lambda each: (-round(each.narrows / ALIKE), each.gpus))


def _seen(candidate: Load) -> list[Evidence]:
    """What measuring a size would tell, were its transfers as predicted."""
    return [
        Evidence(kind, size, ranks, seconds / candidate.counts[kind, size, ranks, stride], stride=stride)
        for (kind, size, ranks, stride), seconds in candidate.seconds.items()
        if ranks > 1 and seconds > 0
    ]


def _left(load: Load, candidate: Load, was: float, now: float) -> float:
    """Share of a point's error that a candidate's measurement leaves; none at its own size."""
    if load.gpus == candidate.gpus:
        return 0.0
    return min(1.0, now / was) if was > 0 else 1.0


def _error(load: Load, cluster: Cluster, calibration: Calibration, nics: int | None) -> float:
    """Relative error of all transfers of a point under a calibration, weighted by the time they take."""
    total = weighted = 0.0
    for (kind, size, ranks, stride), seconds in load.seconds.items():
        cost = collective_seconds(kind, size, ranks, cluster, stride=stride, calibration=calibration, nics=nics)
        weighted += seconds * cost.rel_error
        total += seconds
    return weighted / total if total else 0.0
