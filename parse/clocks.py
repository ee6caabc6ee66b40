"""Turns matched synchronising collectives into one clock offset per rank, with the interval that must contain it.

No member of a synchronising collective can end before the last one has started, so start_i - o_i <= end_j - o_j for
every two members, a bound on o_j - o_i. Shortest paths over all bounds give the interval of each offset. Kernels of one
collective also end together within microseconds, which places the offset inside its interval and shows drift.
Bounds that contradict each other even with drift are refused: those ranks stay unaligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from scaletrace.errors import AlignmentError
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.job import Clock

FloatArray = npt.NDArray[np.float64]

UNBOUNDED = 2**60
"""Half width of an interval about which the trace says nothing."""
MAX_DRIFT_PPM = 200.0
"""Quartz of servers stays within 100 ppm, so two differ by 200 at most."""
_SLACK_NS = 2_000.0
"""Traces before torch 2.4 hold whole microseconds, so two times can be off by one each."""
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Instances:
    """Members of synchronising instances: rank index, instance, start and end on each rank's own clock.

    tight: bool, whether the end is that of a kernel, which all members share within microseconds.
    """

    rank: IntArray
    instance: IntArray
    start_ns: IntArray
    end_ns: IntArray
    tight: BoolArray

    def moved(self, offset: FloatArray) -> Instances:
        """The same with `offset` (one per member) subtracted from the times."""
        shift = np.rint(offset).astype(np.int64)
        return replace(self, start_ns=self.start_ns - shift, end_ns=self.end_ns - shift)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound beside those of synchronising collectives, from a probe or a message.

    The offset of rank index `rank` minus that of rank index `to` lies in [low, high]; UNBOUNDED where a side is open.
    """

    rank: int
    to: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """Clocks by rank number; `residual_ns` is the spread of kernel ends left in each instance, int64."""

    clocks: Mapping[int, Clock]
    residual_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    refused: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        """Whether some rank's interval has no bounds, though its bounds do not contradict each other."""
        known = [clock.high_ns < UNBOUNDED for clock in self.clocks.values()]
        return not self.refused and not all(known)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Per rank index: drift (ns per ns), its standard error, and the jitter of ends in ns; inf where nothing tells."""

    drift: FloatArray
    error: FloatArray
    jitter: FloatArray


def bounds(found: Instances, n: int) -> FloatArray:
    """D[i, j]: smallest end_j - start_i over the instances that both took part in, inf where there is none.

    The offsets obey o_j - o_i <= D[i, j].
    """
    out = np.full((n, n), np.inf)
    order = np.lexsort((found.rank, found.instance))
    instance = found.instance[order]
    first = np.flatnonzero(np.r_[True, instance[1:] != instance[:-1]]) if len(order) else np.zeros(0, np.int64)
    size = np.diff(np.r_[first, len(order)])
    for members in np.unique(size[size > 1]).tolist():
        block = order[first[size == members][:, None] + np.arange(members)]
        teams, team = np.unique(found.rank[block], axis=0, return_inverse=True)
        for k, ids in enumerate(teams):
            rows = block[team.reshape(-1) == k]
            start, end = found.start_ns[rows], found.end_ns[rows]
            for i in range(members):
                tight = (end - start[:, i : i + 1]).min(axis=0)
                out[ids[i], ids] = np.minimum(out[ids[i], ids], tight)
    np.fill_diagonal(out, 0.0)
    return out


def shortest(distances: FloatArray) -> FloatArray:
    """All-pairs shortest paths; a negative diagonal means that the bounds contradict each other."""
    out = distances.copy()
    for k in range(len(out)):
        np.minimum(out, out[:, k : k + 1] + out[k], out=out)
    return out


def align(
    found: Instances,
    ranks: Sequence[int],
    hosts: Sequence[str],
    measured: Sequence[Bound] = (),
    strict: bool = False,
    window_ns: int = 0,
) -> Alignment:
    """Offsets of all ranks relative to the lowest one that can be aligned.

    `window_ns` is how long the traces last, where that is longer than their collectives do.

    Raises AlignmentError if `strict` and the bounds contradict each other; otherwise as few ranks as possible are
    left unaligned and named in `refused`.
    """
    n = len(ranks)
    origin = (int(found.start_ns.min()) + int(found.end_ns.max())) // 2 if len(found.start_ns) else 0
    ends = _Ends.of(found, n, origin)
    fit = _slopes(ends, n, _level(ends, n, _middle(shortest(bounds(found, n)))))
    drift, closed = _close(found, n, origin, fit, measured)
    refused: list[int] = []
    kept = np.arange(n)
    while np.any(np.diag(closed) < -_SLACK_NS):
        worst = int(np.argmin(np.where(np.arange(len(kept)) == 0, np.inf, np.diag(closed)))) if len(kept) > 1 else 0
        if strict:
            raise AlignmentError(
                f"rank {ranks[int(kept[worst])]}: its collectives contradict every offset and drift by "
                f"{-np.diag(closed).min() / 1e6:.3f} ms; the files may not be of one run"
            )
        refused.append(int(kept[worst]))
        kept = np.delete(kept, worst)
        _, whole = _bounded(found, n, origin, drift, measured)
        closed = shortest(whole[np.ix_(kept, kept)])
    seen_ns = int(found.end_ns.max() - found.start_ns.min()) if len(found.start_ns) else 0
    half = max(window_ns - seen_ns / 2, seen_ns / 2, 0.0)
    offset = np.full(n, np.nan)
    if found.tight.any():
        offset = _level(ends.without(drift), n, _middle(closed) if len(kept) == n else np.zeros(n))
    clocks = _clocks(half, kept, closed, ranks, hosts, fit, offset, drift, origin)
    for i in refused:
        clocks[ranks[i]] = _unaligned(origin)
    sentences = tuple(
        f"rank {ranks[i]} contradicts every offset; its times can't be compared with those of other ranks"
        for i in refused
    )
    clocks = dict(sorted(clocks.items()))
    return Alignment(clocks, _residual(found, clocks, ranks), sentences)


def _unaligned(origin: int) -> Clock:
    return Clock(0, -UNBOUNDED, UNBOUNDED, source="unaligned", origin_ns=origin)


def _bounded(
    found: Instances, n: int, origin: int, drift: FloatArray, measured: Sequence[Bound]
) -> tuple[Instances, FloatArray]:
    """The instances without drift, and all bounds on their offsets."""
    level = found.moved(drift[found.rank] * (found.start_ns - origin)) if drift.any() else found
    out = bounds(level, n)
    for one in measured:
        if one.high_ns < UNBOUNDED:
            out[one.to, one.rank] = min(out[one.to, one.rank], float(one.high_ns))
        if one.low_ns > -UNBOUNDED:
            out[one.rank, one.to] = min(out[one.rank, one.to], float(-one.low_ns))
    return level, out


def _close(
    found: Instances, n: int, origin: int, fit: _Fit, measured: Sequence[Bound]
) -> tuple[FloatArray, FloatArray]:
    """(drift per rank, closed bounds): without drift if that explains the data, else with the drift of the ends."""
    span = float(found.end_ns.max() - found.start_ns.min()) if len(found.start_ns) else 0.0
    seen = fit.drift
    clear = (np.abs(seen) > 4 * fit.error) & (np.abs(seen) * span > 2 * fit.jitter)
    clear &= np.abs(seen) <= MAX_DRIFT_PPM / 1e6
    drift = np.where(clear, seen, 0.0)
    closed = shortest(_bounded(found, n, origin, drift, measured)[1])
    if np.all(np.diag(closed) >= -_SLACK_NS):
        return drift, closed
    tried = np.clip(seen, -MAX_DRIFT_PPM / 1e6, MAX_DRIFT_PPM / 1e6)
    other = shortest(_bounded(found, n, origin, tried, measured)[1])
    return (tried, other) if np.diag(other).min() > np.diag(closed).min() else (drift, closed)


def _middle(closed: FloatArray) -> FloatArray:
    """Middle of each offset's interval relative to the first rank of its component, 0 where there is none."""
    out = np.zeros(len(closed))
    linked = np.isfinite(closed) & np.isfinite(closed.T)
    for i in range(len(closed)):
        base = int(np.argmax(linked[i]))
        if base != i:
            out[i] = (closed[base, i] - closed[i, base]) / 2
    return out


@dataclass(frozen=True, slots=True)
class _Ends:
    """Ends of members relative to the origin, with rank index and instance 0 … k-1; only instances of several members.

    Kernels' ends only where there are any, since gloo spans end milliseconds apart.
    """

    rank: IntArray
    instance: IntArray
    end: FloatArray

    @staticmethod
    def of(found: Instances, n: int, origin: int) -> _Ends:
        use = found.tight if found.tight.any() else np.ones(len(found.rank), np.bool_)
        _, code = np.unique(found.instance[use], return_inverse=True)
        code = code.reshape(-1)
        several = np.bincount(code)[code] > 1 if len(code) else np.zeros(0, np.bool_)
        _, again = np.unique(code[several], return_inverse=True)
        end = (found.end_ns[use] - origin).astype(np.float64)
        return _Ends(found.rank[use][several], again.reshape(-1), end[several])

    def without(self, drift: FloatArray) -> _Ends:
        return _Ends(self.rank, self.instance, self.end - drift[self.rank] * self.end)


def _level(ends: _Ends, n: int, start: FloatArray) -> FloatArray:
    """Offset of each rank index at which the ends of each instance meet; nan for ranks without any.

    Begins at `start` and alternates between the common end of each instance and the offset of each rank.
    """
    offset = start.copy()
    own = [np.flatnonzero(ends.rank == r) for r in range(n)]
    seen = np.array([len(rows) > 0 for rows in own], np.bool_)
    if not seen.any():
        return np.full(n, np.nan)
    total = np.bincount(ends.instance)
    for turn in range(_ROUNDS):
        flat = ends.end - offset[ends.rank]
        # means first, since medians of ranks that are still apart stay where they are
        common = np.bincount(ends.instance, flat) / total if turn < _ROUNDS - 4 else _medians(flat, ends.instance)
        gap = ends.end - common[ends.instance]
        for r in np.flatnonzero(seen).tolist():
            offset[r] = np.median(gap[own[r]])
    return np.where(seen, offset - offset[np.argmax(seen)], np.nan)


def _slopes(ends: _Ends, n: int, offset: FloatArray) -> _Fit:
    """Drift of each rank index against the common ends, from a least-squares line without the outliers."""
    drift, error, jitter = np.zeros(n), np.full(n, np.inf), np.full(n, np.inf)
    if not len(ends.end):
        return _Fit(drift, error, jitter)
    flat = ends.end - np.nan_to_num(offset)[ends.rank]
    gap = flat - _medians(flat, ends.instance)[ends.instance]
    for r in np.unique(ends.rank).tolist():
        mine = ends.rank == r
        rest = gap[mine] - np.median(gap[mine])
        jitter[r] = 1.4826 * float(np.median(np.abs(rest)))
        near = np.abs(rest) <= max(4 * jitter[r], 1.0)
        t, g = ends.end[mine][near], rest[near]
        t, g = t - t.mean(), g - g.mean()
        spread = float(t @ t)
        if len(t) >= 8 and spread > 0:
            drift[r] = float(t @ g) / spread
            left = g - drift[r] * t
            error[r] = float(np.sqrt(left @ left / (len(t) - 2) / spread))
    base = int(ends.rank.min())
    return _Fit(drift - drift[base], np.hypot(error, error[base]), jitter)


def _medians(value: FloatArray, code: IntArray) -> FloatArray:
    """Median of the values of each code 0 … k-1, each of which occurs."""
    ordered = value[np.lexsort((value, code))]
    first = np.r_[0, np.cumsum(np.bincount(code))]
    size = np.diff(first)
    low, high = first[:-1] + (size - 1) // 2, first[:-1] + size // 2
    return np.asarray((ordered[low] + ordered[high]) / 2, np.float64)


def _clocks(
    half: float,
    kept: IntArray,
    closed: FloatArray,
    ranks: Sequence[int],
    hosts: Sequence[str],
    fit: _Fit,
    offset: FloatArray,
    drift: FloatArray,
    origin: int,
) -> dict[int, Clock]:
    out: dict[int, Clock] = {}
    for k, i in enumerate(kept.tolist()):
        low, high = -closed[k, 0], closed[0, k]
        same_host = hosts[i] != "" and hosts[i] == hosts[int(kept[0])]
        if not (np.isfinite(low) and np.isfinite(high)):
            source = "same host" if same_host else "reference" if k == 0 else "unaligned"
            out[ranks[i]] = Clock(0, -UNBOUNDED, UNBOUNDED, source=source, origin_ns=origin)
            continue
        if k == 0:
            out[ranks[i]] = Clock(0, 0, 0, source="reference", origin_ns=origin)
            continue
        ends = offset[i] - offset[int(kept[0])]
        if np.isfinite(ends):
            guess, source = float(ends), "ends of kernels"
        elif same_host and low <= 0 <= high:
            guess, source = 0.0, "same host"
        else:
            guess, source = (low + high) / 2, "middle of the bounds"
        guess = float(np.clip(guess, min(low, high), max(low, high)))
        seen = abs(float(fit.drift[i]) - float(drift[i]))
        unseen = min(seen + 3 * float(fit.error[i]), MAX_DRIFT_PPM / 1e6) + abs(float(drift[i]))
        # the interval holds for the whole window, so what the clock moves in it is part of it
        wide = unseen * half + _SLACK_NS / 2
        out[ranks[i]] = Clock(
            round(guess), int(np.floor(low - wide)), int(np.ceil(high + wide)), float(drift[i]) * 1e6, source, origin
        )
    return out


def apply(clocks: Mapping[int, Clock], rank: Int32Array | IntArray, time_ns: IntArray) -> IntArray:
    """Times of members (rank number and time on that rank's clock) on the job's clock, int64."""
    out = time_ns.copy()
    for number, clock in clocks.items():
        mine = rank == number
        out[mine] = clock.to_job_ns(time_ns[mine])
    return out


def comparable(clocks: Mapping[int, Clock], rank: Int32Array | IntArray) -> BoolArray:
    """Whether each member's rank has a clock that can be compared with others."""
    bad = [number for number, clock in clocks.items() if clock.source == "unaligned"]
    return ~np.isin(rank, bad)


def _residual(found: Instances, clocks: Mapping[int, Clock], ranks: Sequence[int]) -> IntArray:
    """Spread (latest minus earliest) of the kernel ends of each instance after alignment, int64 per instance."""
    number = np.asarray(ranks, np.int64)[found.rank] if len(found.rank) else np.zeros(0, np.int64)
    use = found.tight & comparable(clocks, number)
    if not use.any():
        return np.zeros(0, np.int64)
    end = apply(clocks, number[use], found.end_ns[use])
    _, instance = np.unique(found.instance[use], return_inverse=True)
    order = np.argsort(instance.reshape(-1), kind="stable")
    code = instance.reshape(-1)[order]
    first = np.flatnonzero(np.r_[True, code[1:] != code[:-1]])
    several = np.diff(np.r_[first, len(code)]) > 1
    spread = np.maximum.reduceat(end[order], first) - np.minimum.reduceat(end[order], first)
    return np.asarray(spread[several], np.int64)
