"""Turns the sizes of recorded all-to-alls into how unevenly tokens fell on expert ranks, then and on other numbers of them.

Fewer ranks add the loads of neighbours, which were measured. More ranks divide the experts of one, and how evenly the
tokens fell on those is not in a trace: loads are then drawn anew (gamma, from a stated seed), with the spread that
independent experts would have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.parse.job import KINDS, Job

FloatArray = npt.NDArray[np.float64]
SEED = 20_240_501
"""Seed of drawn loads; the same job and degree give the same answer."""
DRAWS = 512
UNKNOWN_CV = 0.25
"""Spread between expert ranks that the band assumes where nothing was observed; half of it either way of even."""
TINY = 0.125
"""An all-to-all of less than this share of the largest of its group carries counts, not tokens."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a capture tells of where tokens went: loads float64[exchanges, ranks], tokens or bytes a rank worked on.

    source  "bytes received", "split sizes" (of the ranks that are there) or "" where nothing tells
    """

    loads: FloatArray
    source: str = ""

    @property
    def known(self) -> bool:
        return bool(self.loads.size)


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The fullest rank's load over the mean: the mean over exchanges, and an interval of nine in ten for it."""

    value: float
    low: float
    high: float
    drawn: bool = False

    @property
    def rel_error(self) -> float:
        """One sigma, relative, of an interval of nine in ten."""
        return (self.high - self.low) / (2 * 1.645) / self.value


UNKNOWN = Routing(np.zeros((0, 0)))


def observed(job: Job, axis: str = "ep") -> Routing:
    """Loads of the ranks of the job's expert groups, from all its token exchanges."""
    table = job.collectives
    groups = {group.id: group for group in job.groups if group.axis == axis and group.size > 1}
    mine = np.isin(table.group, list(groups)) & (table.kind == KINDS.index("all_to_all"))
    size = np.maximum(table.bytes_in, table.bytes_out)
    by_bytes, by_split = [], []
    for number, group in groups.items():
        rows = np.flatnonzero(mine & (table.group == number))
        rows = rows[size[rows] >= TINY * size[rows].max(initial=0)]
        place = {rank: at for at, rank in enumerate(group.members)}
        for instance in np.unique(table.instance[rows]).tolist():
            of = rows[table.instance[rows] == instance]
            if len(of) == group.size and (table.bytes_out[of] >= 0).all():
                loads = np.zeros((2, group.size))
                at = [place[int(rank)] for rank in table.rank[of]]
                loads[0, at], loads[1, at] = table.bytes_in[of], table.bytes_out[of]
                # What is dispatched arrives unevenly, what is combined leaves unevenly.
                by_bytes.append(loads[int(np.argmax(loads.max(axis=1)))])
            else:
                by_split += [split for row in of.tolist() if len(split := _split(job, row)) == group.size]
    if by_bytes and len({len(row) for row in by_bytes}) == 1:
        return Routing(np.array(by_bytes), "bytes received")
    if by_split and len({len(row) for row in by_split}) == 1:
        return Routing(np.array(by_split), "split sizes")
    return UNKNOWN


def _split(job: Job, row: int) -> FloatArray:
    """The uneven one of the split sizes that one member's record names, empty where it has none (or a cut list)."""
    table = job.collectives
    events = job.rank(int(table.rank[row])).events
    best: FloatArray = np.zeros(0)
    for record in (int(table.host_event[row]), int(table.event[row])):
        for key in ("In split size", "Out split size"):
            text = events.text(key, record) if record >= 0 else None
            try:
                sizes = json.loads(text) if text else []
            except ValueError:
                continue  # a long list is cut short in the trace
            if isinstance(sizes, list) and sizes and all(isinstance(n, int) for n in sizes):
                found = np.array(sizes, float)
                if found.sum() > 0 and (not len(best) or found.std() > best.std()):
                    best = found
    return best


def imbalance(routing: Routing, degree: int, seed: int = SEED) -> Imbalance:
    """The imbalance over `degree` ranks; 1 with an interval up to UNKNOWN_CV where nothing was observed."""
    if degree == 1:
        return Imbalance(1.0, 1.0, 1.0)
    if not routing.known:
        return Imbalance(1.0, 1.0, 1.0 + UNKNOWN_CV, True)
    loads = routing.loads
    ranks = loads.shape[1]
    if ranks % degree == 0:
        each = loads.reshape(len(loads), degree, -1).sum(axis=2)
        ratio = each.max(axis=1) / each.mean(axis=1)
        return Imbalance(float(ratio.mean()), float(np.quantile(ratio, 0.05)), float(np.quantile(ratio, 0.95)))
    cv = float(np.mean(loads.std(axis=1) / loads.mean(axis=1))) * float(np.sqrt(degree / ranks))
    ratio = drawn(cv, degree, seed)
    return Imbalance(float(ratio.mean()), float(np.quantile(ratio, 0.05)), float(np.quantile(ratio, 0.95)), True)


def drawn(cv: float, degree: int, seed: int = SEED) -> FloatArray:
    """Imbalances of `degree` ranks whose loads vary by `cv` around one mean: float64[DRAWS], gamma loads."""
    if cv <= 0:
        return np.ones(DRAWS)
    shape = 1.0 / cv**2
    loads = np.random.default_rng(seed).gamma(shape, 1.0 / shape, (DRAWS, degree))
    loads = np.maximum(loads, np.finfo(float).tiny)
    return np.asarray(loads.max(axis=1) / loads.mean(axis=1), np.float64)


def of_experts(tokens_by_expert: FloatArray, degree: int) -> float:
    """Tokens of the fullest of `degree` ranks over their mean, experts placed in blocks; 1.0 = even.

    Raises UsageError where the experts do not divide or there are no tokens.
    """
    loads = np.asarray(tokens_by_expert, float)
    if not len(loads) or degree < 1 or len(loads) % degree or loads.sum() <= 0 or (loads < 0).any():
        raise UsageError(f"{len(loads)} experts with {loads.sum():g} tokens can't be spread over {degree} ranks")
    by_rank = loads.reshape(degree, -1).sum(axis=1)
    return float(by_rank.max() / by_rank.mean())
