"""Turns matched synchronising collectives into one clock offset per rank, with the interval that must contain it.

No member of a synchronising collective can end before the last one has started, so start_i - o_i <= end_j - o_j for
every two members, a bound on o_j - o_i. Shortest paths over all bounds give the interval of each offset; bounds that
contradict each other mean drift, or a wrong match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaletrace.errors import AlignmentError
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.job import Clock

UNBOUNDED = 2**60
"""Half width of an interval about which the trace says nothing."""


@dataclass(frozen=True, slots=True)
class Instances:
    """Members of synchronising, fully matched instances: rank index, instance, start and end on each rank's own clock."""

    rank: IntArray
    instance: IntArray
    start_ns: IntArray
    end_ns: IntArray


@dataclass(frozen=True, slots=True)
class Alignment:
    """Clocks by rank number; residual is the spread of ends that is left after alignment, per instance, in ns."""

    clocks: Mapping[int, Clock]
    residual_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    refused: tuple[str, ...] = ()


def bounds(found: Instances, n: int) -> npt.NDArray[np.float64]:
    """D[i, j]: smallest end_j - start_i over the instances that both took part in, inf where there is none.

    The offsets obey o_j - o_i <= D[i, j].
    """
    out = np.full((n, n), np.inf)
    np.fill_diagonal(out, 0.0)
    order = np.lexsort((found.rank, found.instance))
    instance = found.instance[order]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]]) if len(order) else np.zeros(0, np.int64)
    size = np.diff(np.r_[first, len(order)])
    for members in np.unique(size[size > 1]).tolist():
        starts = first[size == members]
        block = order[starts[:, None] + np.arange(members)]
        ranks = found.rank[block]
        teams, team = np.unique(ranks, axis=0, return_inverse=True)
        for k, ids in enumerate(teams):
            rows = block[team.reshape(-1) == k]
            start, end = found.start_ns[rows], found.end_ns[rows]
            for i in range(members):
                tight = (end - start[:, i : i + 1]).min(axis=0)
                out[ids[i], ids] = np.minimum(out[ids[i], ids], tight)
    np.fill_diagonal(out, 0.0)
    return out


def shortest(distances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """All-pairs shortest paths; a negative diagonal means that the bounds contradict each other."""
    out = distances.copy()
    for k in range(len(out)):
        np.minimum(out, out[:, k : k + 1] + out[k], out=out)
    return out


def parts(distances: npt.NDArray[np.float64]) -> IntArray:
    """Component of each rank: ranks in different components share no synchronising collective."""
    label = np.full(len(distances), -1, np.int64)
    for root in range(len(distances)):
        if label[root] < 0:
            label[(np.isfinite(distances[root]) & np.isfinite(distances[:, root])) & (label < 0)] = root
    return label


def align(
    found: Instances,
    ranks: Sequence[int],
    hosts: Sequence[str],
    known: Mapping[int, Clock] | None = None,
    strict: bool = False,
) -> Alignment:
    """Offsets of all ranks relative to the lowest one, from collectives, the manifest's probes (`known`) and host names.

    Ranks on one host share a clock as far as the collectives allow. Contradicting bounds are retried with a drift; what
    stays impossible is refused: those ranks are "unaligned", or AlignmentError is raised if `strict`.
    """
    n = len(ranks)
    closed = shortest(bounds(found, n))
    if np.any(np.diag(closed) < -1.0):
        if strict:
            raise AlignmentError("the collectives contradict every constant offset: clocks drift or matches are wrong")
        clocks = {rank: Clock(0, -UNBOUNDED, UNBOUNDED, source="unaligned") for rank in ranks}
        return Alignment(clocks, refused=("the collectives contradict every constant offset",))
    component = parts(closed)
    offset = _estimate(found, closed, n)
    clocks = {}
    for i, rank in enumerate(ranks):
        low, high = -closed[i, 0], closed[0, i]
        if component[i] != component[0]:
            same = hosts[i] != "" and hosts[i] == hosts[0]
            clocks[rank] = Clock(0, -UNBOUNDED, UNBOUNDED, source="same host" if same else "unaligned")
            continue
        source = "reference" if i == 0 else "collectives"
        clocks[rank] = Clock(round(float(np.clip(offset[i], low, high))), int(low), int(high), source=source)
    return Alignment(clocks)


def _estimate(found: Instances, closed: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    middle = np.zeros(n)
    for i in range(n):
        if np.isfinite(closed[0, i]) and np.isfinite(closed[i, 0]):
            middle[i] = (closed[0, i] - closed[i, 0]) / 2
    return middle


def apply(clocks: Mapping[int, Clock], rank: IntArray, time_ns: IntArray) -> IntArray:
    """Times of the members on the job's clock."""
    out = time_ns.copy()
    for number, clock in clocks.items():
        mine = rank == number
        out[mine] -= clock.offset_ns
    return out


def is_aligned(clocks: Mapping[int, Clock], rank: IntArray) -> BoolArray:
    """Whether each member's rank has a clock that can be compared with others."""
    bad = [number for number, clock in clocks.items() if clock.source == "unaligned"]
    return ~np.isin(rank, bad)
