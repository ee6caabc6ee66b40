"""Turns matched synchronising collectives into one clock offset per rank, with the interval that must contain it.

No member of a synchronising collective can end before the last one has started, so start_i - o_i <= end_j - o_j for
every two members, a bound on o_j - o_i. Shortest paths over all bounds give the interval of each offset. Kernels of one
collective also end together within microseconds, which places the offset inside its interval and shows drift.
Bounds that contradict each other even with drift are refused: those ranks stay unaligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
_ROUNDS = 6
_EXACT_NS = 1_000.0
_FEWEST_FOR_SLOPE = 8


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
    for ids, rows in _blocks(found.rank, found.instance):
        start, end = found.start_ns[rows], found.end_ns[rows]
        for i in range(len(ids)):
            tight = (end - start[:, i : i + 1]).min(axis=0)
            out[ids[i], ids] = np.minimum(out[ids[i], ids], tight)
    np.fill_diagonal(out, 0.0)
    return out


def _blocks(rank: IntArray, instance: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """(ranks of a team ascending, rows int[instances, ranks]) for every set of ranks that meets in several-member instances."""
    order = np.lexsort((rank, instance))
    code = instance[order]
    first = np.flatnonzero(np.r_[True, code[1:] != code[:-1]]) if len(order) else np.zeros(0, np.int64)
    size = np.diff(np.r_[first, len(order)])
    for members in np.unique(size[size > 1]).tolist():
        block = order[first[size == members][:, None] + np.arange(members)]
        teams, team = np.unique(rank[block], axis=0, return_inverse=True)
        for k, ids in enumerate(teams):
            yield ids, block[team.reshape(-1) == k]


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
    teams = _teams(found, origin)
    fit = _slopes(teams, n)
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
    offset = _level(teams, n, drift) if found.tight.any() else np.full(n, np.nan)
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


@dataclass(frozen=True, slots=True)
class _Team:
    """The instances that exactly these rank indices took part in: ends relative to the origin, float[instances, ranks]."""

    ids: IntArray
    end: FloatArray


def _teams(found: Instances, origin: int) -> list[_Team]:
    """Ends by team; of kernels only where there are any, since gloo spans end milliseconds apart."""
    use = found.tight if found.tight.any() else np.ones(len(found.rank), np.bool_)
    rows = np.flatnonzero(use)
    return [
        _Team(ids, (found.end_ns[rows[block]] - origin).astype(np.float64))
        for ids, block in _blocks(found.rank[rows], found.instance[rows])
    ]


def _level(teams: Sequence[_Team], n: int, drift: FloatArray) -> FloatArray:
    """Offset of each rank index at which the ends of all instances meet best; nan for ranks without any.

    Each team yields the offsets between its own members; least squares over the teams ties them together, so that a
    few collectives of all ranks count beside thousands of small groups.
    """
    parts = []
    for team in teams:
        end = team.end - drift[team.ids] * team.end
        offset, jitter = _meet(end)
        parts.append((team.ids, offset, np.full(len(offset), len(end) / (jitter**2 + _EXACT_NS**2))))
    return _tie(parts, n)[0]


def _meet(end: FloatArray) -> tuple[FloatArray, float]:
    """(offsets of the columns at which the rows meet, spread that is left).

    The common end of a row is the mean of its members, the offset of a column the median of its gaps to it.
    """
    offset = np.median(end - end[:, :1], axis=0)
    for _ in range(_ROUNDS):
        common = np.mean(end - offset, axis=1)
        offset = np.median(end - common[:, None], axis=0)
    rest = end - offset - np.median(end - offset, axis=1)[:, None]
    return offset, 1.4826 * float(np.median(np.abs(rest)))


def _tie(parts: Sequence[tuple[IntArray, FloatArray, FloatArray]], n: int) -> tuple[FloatArray, FloatArray]:
    """(one value a rank, its standard error) from values of teams, each known up to a constant; nan where none is.

    parts: (rank indices, values, weights) of each team.
    """
    matrix, right = np.zeros((n, n)), np.zeros(n)
    seen = np.zeros(n, np.bool_)
    for ids, value, weight in parts:
        share = weight / weight.sum()
        within = np.diag(weight) - np.outer(weight, share)
        matrix[np.ix_(ids, ids)] += within
        right[ids] += within @ value
        seen[ids] = True
    if not seen.any():
        return np.full(n, np.nan), np.full(n, np.inf)
    scale = float(np.max(np.diag(matrix)))
    inverse = np.linalg.pinv(matrix / scale, hermitian=True) / scale
    base = int(np.argmax(seen))
    value = inverse @ right
    variance = np.diag(inverse) + inverse[base, base] - 2 * inverse[base]
    return np.where(seen, value - value[base], np.nan), np.where(seen, np.sqrt(np.maximum(variance, 0)), np.inf)


def _slopes(teams: Sequence[_Team], n: int) -> _Fit:
    """Drift of each rank index against the common ends of its teams, from lines without the outliers."""
    jitter = np.full(n, np.inf)
    parts = []
    for team in teams:
        offset, spread = _meet(team.end)
        jitter[team.ids] = np.minimum(jitter[team.ids], spread)
        if len(team.end) < _FEWEST_FOR_SLOPE:
            continue
        gap = team.end - offset
        gap = gap - np.median(gap, axis=1)[:, None]
        near = np.abs(gap) <= max(4 * spread, 1.0)
        lines = [_line(team.end[near[:, k], k], gap[near[:, k], k]) for k in range(len(team.ids))]
        if all(np.isfinite(error) for _, error in lines):
            slope, error = np.array(lines).T
            parts.append((team.ids, slope, 1 / np.maximum(error, 1e-12) ** 2))
    drift, error = _tie(parts, n)
    return _Fit(np.nan_to_num(drift), error, jitter)


def _line(time: FloatArray, gap: FloatArray) -> tuple[float, float]:
    """(slope, its standard error) of a least-squares line, error inf where there are too few points."""
    if len(time) < _FEWEST_FOR_SLOPE:
        return 0.0, np.inf
    t, g = time - time.mean(), gap - gap.mean()
    spread = float(t @ t)
    if spread <= 0:
        return 0.0, np.inf
    slope = float(t @ g) / spread
    left = g - slope * t
    return slope, float(np.sqrt(left @ left / (len(t) - 2) / spread))


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
        ppm = 0.0 if source == "same host" else float(drift[i]) * 1e6  # one clock has no drift against itself
        out[ranks[i]] = Clock(round(guess), int(np.floor(low - wide)), int(np.ceil(high + wide)), ppm, source, origin)
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
