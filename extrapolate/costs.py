"""Turns a collective, its bytes and its group into seconds on a cluster, with where the number comes from.

The candidates of nccl.py or gloo.py are corrected by the calibration's multipliers and the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from scaletrace.extrapolate import gloo, nccl
from scaletrace.extrapolate.cluster import Cluster, Placement, place
from scaletrace.extrapolate.nccl import Term


class Provenance(IntEnum):
    """How well founded a cost is, from best to worst."""

    MEASURED = 0
    INTERPOLATED = 1
    EXTRAPOLATED_SIZE = 2
    EXTRAPOLATED_RANKS = 3
    PRIOR = 4


_Parts = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Multipliers on the three parts of a cost, and the evidence behind them.

    local, remote, wire  multiply latency inside a node, latency across, and bytes over bandwidth; 1 = the prior
                         (gloo: base of a call, hops, and bytes over bandwidth)
    residual             typical relative error of the fit on its own evidence
    sizes_bytes, ranks   (smallest, largest) seen; seen holds every (ranks, members a node, size) of the evidence
    parts_bytes          (smallest, largest) seen of bytes over ranks, which is what a ring moves in one step
    members              (fewest, most) members in one innermost domain: how many of a node's NICs a group owns
    top                  the outermost tier that any of the evidence crossed
    ends                 shares of the three parts in the evidence of the fewest and of the most bytes over ranks
    covariance           of the logarithms of the three multipliers, row by row
    """

    local: float = 1.0
    remote: float = 1.0
    wire: float = 1.0
    residual: float = 0.0
    count: int = 0
    sizes_bytes: tuple[float, float] = (0.0, 0.0)
    ranks: tuple[int, int] = (0, 0)
    seen: frozenset[tuple[int, int, int]] = frozenset()
    parts_bytes: tuple[float, float] = (0.0, 0.0)
    members: tuple[int, int] = (0, 0)
    top: int = 0
    ends: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0, 0.0, 1.0), (0.0, 0.0, 1.0))
    covariance: tuple[float, ...] = (0.0,) * 9

    def doubt(self, part_bytes: float, more_steps: float = 1.0) -> float:
        """Relative error that follows from not knowing the multipliers better, at other bytes over ranks than were seen.

        With each halving below the evidence latency weighs twice as much, with each doubling above it the bandwidth. What
        the evidence says nothing of (latency, where all of it were large messages) stays as unsure as its prior.
        more_steps  how often the steps of the evidence are made, where `local` is a base that is taken once (gloo)
        """
        smallest, largest = self.parts_bytes
        local, remote, wire = self.ends[1 if part_bytes > largest else 0]
        less, more = max(1.0, smallest / part_bytes), max(1.0, part_bytes / largest) if largest else 1.0
        doubt = 0.0
        for steps in (1.0, more_steps):
            latency, bandwidth = (local, remote * steps, 0.0), (0.0, 0.0, wire * steps)
            growing = (bandwidth, latency, less) if less > 1 else (latency, bandwidth, more)
            doubt = max(doubt, self._largest_spread(*growing))
        if self.ranks[0] < self.ranks[1]:
            return doubt
        # One size of group leaves open whether steps take longer than the prior's or the base does, for all steps alike.
        of_steps = remote * less * more_steps
        total = local * less + of_steps + wire * more * more_steps
        return math.hypot(doubt, of_steps * abs(1 - 1 / self.remote) * (1 - 1 / more_steps) / (total or 1.0))

    def _largest_spread(self, fixed: _Parts, growing: _Parts, factor: float) -> float:
        """The largest relative error of `fixed` + m × `growing` for m from 1 to `factor`, so that it never shrinks with
        distance where errors of the parts cancel; its slope in m has one zero at most."""
        first, last = sum(fixed), sum(growing)
        both = self._covariance(fixed, fixed), self._covariance(fixed, growing), self._covariance(growing, growing)
        places = [1.0, factor]
        slope = both[2] * first - both[1] * last
        if slope:
            turn = (both[0] * last - both[1] * first) / slope
            places += [turn] if 1.0 < turn < factor else []
        return max(
            math.sqrt(max(0.0, both[0] + 2 * m * both[1] + m * m * both[2])) / (first + m * last or 1.0) for m in places
        )

    def _covariance(self, one: _Parts, other: _Parts) -> float:
        """Of two sums of the three parts, whose multipliers vary together."""
        return sum(a * b * self.covariance[3 * i + j] for i, a in enumerate(one) for j, b in enumerate(other))

    def apply(self, term: Term) -> Term:
        return replace(
            term,
            local_s=term.local_s * self.local,
            remote_s=term.remote_s * self.remote,
            wire_s=term.wire_s * self.wire,
            last_s=term.last_s * self.wire,
        )


FitKey = tuple[str, str, bool]
"""(family, algorithm or "" for all, whether the group crosses the innermost tier)."""

ANY = "any"
"""Family of a fit that stands in where a family has no evidence: multipliers without a count, so still a prior."""

FAMILY = {
    "all_reduce": "all_reduce",
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "broadcast": "broadcast",
    "reduce": "broadcast",
    "all_to_all": "all_to_all",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "send": "p2p",
    "recv": "p2p",
    "barrier": "barrier",
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fits by family and reach; what has no fit keeps the prior."""

    fits: Mapping[FitKey, Fit] = field(default_factory=dict)
    algorithms: Mapping[tuple[str, bool], str] = field(default_factory=dict)

    def find(self, kind: str, term: Term, crosses: bool) -> Fit | None:
        family = FAMILY[kind]
        own = self.fits.get((family, term.algorithm, crosses)) or self.fits.get((family, "", crosses))
        return own or self.fits.get((ANY, "", crosses))


PRIOR_ERROR = 0.25
"""Relative error (one sigma) of the uncalibrated tuner form: 7 % mean on the all-gather table, 15 to 40 % on tree
all-reduces of 32 to 4,096 GPUs (benchmarks/collectives)."""
GLOO_PRIOR_ERROR = 0.5
"""gloo's rates depend on the host, which a catalog's Ethernet knows nothing of."""
FLOOR_ERROR = 0.03
PER_DOUBLING_SIZE = 0.02
PER_DOUBLING_RANKS = 0.02
PER_DOUBLING_PART = 0.03
"""What a doubling beyond the evidence adds: in bytes, in ranks, and in the bytes of one step of a ring, since protocols
and pipelining change with those. Chosen so that p5 to p95 holds nine in ten of the 13,600 predictions that
benchmarks/collectives makes from thin and rich evidence of three tables."""
UNSEEN_TIER_ERROR = 0.10
"""For every tier above those that the evidence crossed: its oversubscription is the description's word, not measured."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one collective, split into bytes and the latency beyond them, with algorithm, origin and relative error (1 sigma).

    last_s  what the last member takes beyond the others, a part of `seconds` (nccl.Term)
    busy    share of beta_s in which the links are busy (nccl.Term)
    """

    seconds: float
    alpha_s: float
    beta_s: float
    algorithm: str
    provenance: Provenance
    rel_error: float
    last_s: float = 0.0
    busy: float = 1.0

    @property
    def wire_share(self) -> float:
        """Share of its time in which its links are busy."""
        return self.busy * self.beta_s / self.seconds if self.seconds > 0 else 0.0


def collective_seconds(
    kind: str,
    size_bytes: float,
    ranks: int,
    cluster: Cluster,
    *,
    stride: int = 1,
    per_node: int | None = None,
    calibration: Calibration | None = None,
    nics: int | None = None,
) -> Cost:
    """Time of one collective (KINDS of the job) over `ranks` ranks, `stride` apart, once the last has arrived.

    size_bytes  the whole vector: output of an all-gather, input of a reduce-scatter, what one rank sends in an
                all-to-all, the message otherwise
    per_node    members in one node, where the stride doesn't tell
    nics        how many of its node's NICs the group drives at most; None = as many as it has members there
    Raises UsageError for an unknown kind or an impossible group.
    """
    placed = place(ranks, cluster, stride, per_node)
    return placed_seconds(kind, size_bytes, placed, cluster, calibration, nics)


def placed_seconds(
    kind: str,
    size_bytes: float,
    placed: Placement,
    cluster: Cluster,
    calibration: Calibration | None = None,
    nics: int | None = None,
) -> Cost:
    """As collective_seconds, for a group that is placed already."""
    if placed.size == 1:
        return Cost(0.0, 0.0, 0.0, "none", Provenance.MEASURED, 0.0)
    terms = (
        gloo.candidates(kind, size_bytes, placed, cluster)
        if cluster.backend == "gloo"
        else nccl.candidates(kind, size_bytes, placed, cluster, nics)
    )
    term, fit = _chosen(kind, terms, placed.top > 0, calibration)
    if fit is None and placed.top > 0 and calibration is not None:
        # Nothing was seen of this tier: the group can at least be no faster than its members in one domain.
        inside = replace(placed, size=placed.local, members=(placed.local,) * len(placed.members))
        floor = placed_seconds(kind, size_bytes, inside, cluster, calibration, nics)
        if floor.seconds > term.seconds:
            return replace(floor, provenance=Provenance.PRIOR, rel_error=max(floor.rel_error, _prior_error(cluster)))
    origin, error = _origin(fit, size_bytes, placed, cluster)
    seconds, wire_s = term.seconds + term.last_s, term.wire_s + term.last_s
    return Cost(seconds, seconds - wire_s, wire_s, term.algorithm, origin, error, term.last_s, term.busy)


NOT_TREE = "not tree"
"""What NCCL's kernels named RING_LL say: since 2.19 they run every algorithm but the tree."""
SEEN_STAYS = 2.0
"""An algorithm that the trace shows is kept until another is this many times as fast, and costs no more than that: rings
that were right for two nodes would cost 4,096 ranks fifty times what trees do."""


def is_as_seen(algorithm: str, seen: str) -> bool:
    """Whether an algorithm is what a trace shows: one by name, or any but the tree."""
    return algorithm != "tree" if seen == NOT_TREE else algorithm == seen


def _chosen(kind: str, terms: list[Term], crosses: bool, calibration: Calibration | None) -> tuple[Term, Fit | None]:
    """The fastest candidate after its corrections, among those that the trace shows where it shows any."""
    if calibration is None:
        return min(terms, key=lambda term: term.seconds), None
    corrected = []
    for term in terms:
        fit = calibration.find(kind, term, crosses)
        corrected.append((fit.apply(term) if fit else term, fit))
    best = min(corrected, key=lambda pair: pair[0].seconds)
    seen = calibration.algorithms.get((FAMILY[kind], crosses), "")
    kept = [pair for pair in corrected if seen and is_as_seen(pair[0].algorithm, seen)]
    if not kept:
        return best
    stays = min(kept, key=lambda pair: pair[0].seconds)
    if stays[0].seconds <= SEEN_STAYS * best[0].seconds:
        return stays
    term, fit = best
    return Fit(SEEN_STAYS, SEEN_STAYS, SEEN_STAYS).apply(term), fit


def _prior_error(cluster: Cluster) -> float:
    return GLOO_PRIOR_ERROR if cluster.backend == "gloo" else PRIOR_ERROR


def _origin(fit: Fit | None, size_bytes: float, placed: Placement, cluster: Cluster) -> tuple[Provenance, float]:
    """Where the number comes from, and the relative error that follows: it grows with each doubling beyond evidence."""
    if fit is None:
        return Provenance.PRIOR, _prior_error(cluster)
    if fit.count == 0:
        return Provenance.PRIOR, PRIOR_ERROR
    ranks = placed.size
    error = max(FLOOR_ERROR, fit.residual)
    if (ranks, placed.local, int(size_bytes)) in fit.seen:
        return Provenance.MEASURED, error
    sizes = _doublings(size_bytes, fit.sizes_bytes)
    span = math.hypot(_doublings(ranks, fit.ranks), _doublings(placed.local, fit.members))
    distance = math.hypot(
        PER_DOUBLING_SIZE * sizes,
        PER_DOUBLING_RANKS * span,
        PER_DOUBLING_PART * _doublings(size_bytes / ranks, fit.parts_bytes),
    )
    above = UNSEEN_TIER_ERROR * max(0, placed.top - fit.top)
    steps = max(1.0, (ranks - 1) / max(1, fit.ranks[1] - 1)) if cluster.backend == "gloo" else 1.0
    error = math.hypot(error, distance, above, fit.doubt(size_bytes / ranks, steps))
    error = max(fit.residual, min(error, _prior_error(cluster)))
    if span > 0:
        return Provenance.EXTRAPOLATED_RANKS, error
    return (Provenance.EXTRAPOLATED_SIZE if sizes > 0 else Provenance.INTERPOLATED), error


def _doublings(value: float, seen: tuple[float, float]) -> float:
    """How many doublings `value` lies outside the interval."""
    if value <= 0 or seen[0] <= 0:
        return 0.0
    return max(0.0, math.log2(seen[0] / value), math.log2(value / seen[1]))
