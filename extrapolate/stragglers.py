"""Turns the noise of a few ranks into what waiting for the slowest of many costs a step.

Noise has two parts, both relative to compute time: residual (new in every segment between collectives, so it averages
where collectives are prefetched) and static (a rank that is always slow is waited for once, and never averaged away).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate.columns import BOTH, everyone, sweep_columns
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.normal import expected_max, normal_scores, variance_of_max
from scaletrace.extrapolate.reduce import ARRIVE, MEET, PLAIN, keep_mask, longest_paths
from scaletrace.extrapolate.segments import segments
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind

Floats = npt.NDArray[np.float64]
SAMPLES = 64
INNER_SAMPLES, OUTER_SAMPLES = 8, 32
NOISE_ROWS = 1024
CELLS = 1 << 25
"""Most (node, column) pairs of a sweep over ranks one by one: 256 MiB."""
LEAST_COLUMNS, LEAST_REPEATS = 1 << 13, 4
"""Ranks that the repetitions of a heavy-tailed population simulate at least in all, and how many there are at least."""
TAIL_SHARE = 0.005
"""Share of the standardised arrivals that a tail is fitted to; below it the sample itself is used."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative spread of compute: residual and static, with the residual's shape and where the numbers come from.

    tail "normal", "lognormal" (its skew follows from residual_cv) or "pareto" (mostly quiet, rare delays with tail
    exponent `tail_index`); the coefficient of variation is residual_cv for each.
    """

    residual_cv: float
    static_cv: float
    tail: str = "normal"
    tail_index: float = 4.0
    source: str = "given"

    def __post_init__(self) -> None:
        if not (0 <= self.residual_cv < 1 and 0 <= self.static_cv < 1) or self.tail_index <= 2:
            raise UsageError(
                "noise needs spreads in [0, 1) and a tail index above 2, "
                f"got residual {self.residual_cv:g}, static {self.static_cv:g}, tail index {self.tail_index:g}"
            )
        if self.tail not in ("normal", "lognormal", "pareto"):
            raise UsageError(f"noise has a normal, lognormal or pareto tail, not {self.tail!r}")

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], ranks: int = 0) -> Floats:
        """Relative residual noise of mean 0 and spread residual_cv; a row for each segment, a column for each rank.

        ranks > columns: the columns stand for so many ranks. Of a Pareto tail every row then holds the largest of all of
        them in one random column (stratified over rows), since one such delay outweighs any sum of the others.
        """
        if self.tail == "lognormal":
            sigma = np.sqrt(np.log1p(self.residual_cv**2))
            return np.asarray(rng.lognormal(-(sigma**2) / 2, sigma, shape) - 1.0)
        if self.tail == "pareto":
            index = self.tail_index
            raw = rng.pareto(index, shape)
            if ranks > shape[1]:
                levels = (rng.permutation(shape[0]) + rng.random(shape[0])) / shape[0]
                largest = (-np.log1p(-levels) / ranks) ** (-1 / index) - 1
                row, column = np.arange(shape[0]), rng.integers(0, shape[1], shape[0])
                raw = np.minimum(raw, largest[:, None])
                raw[row, column] = largest
            mean, variance = 1 / (index - 1), index / ((index - 1) ** 2 * (index - 2))
            return np.asarray((raw - mean) / np.sqrt(variance) * self.residual_cv)
        return np.asarray(rng.normal(0.0, self.residual_cv, shape))


PRIOR_NOISE = Noise(0.011, 0.011, source="prior: spread of kernels over 8 H100 ranks (1.1 %), taken as static too")


@dataclass(frozen=True, slots=True)
class Population:
    """How many ranks a class stands for: `inner` neighbours (1 = no such axis) in each of `outer` groups."""

    outer: int
    inner: int = 1

    @property
    def ranks(self) -> int:
        return self.inner * self.outer


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph of classes, ready to be reduced; reach says for each collective how far it goes."""

    graph: Graph
    classes: Int32Array
    segment: Int32Array
    role: ByteArray
    noisy: BoolArray
    reach: ByteArray
    keep: BoolArray
    succ_ptr: IntArray
    succ: Int32Array
    succ_lag_ns: Floats

    @property
    def class_count(self) -> int:
        return int(self.classes.max()) + 1 if len(self.classes) else 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a sweep over columns needs: kept nodes, one end node a class, and the longest paths between them."""

    dur_ns: Floats
    segment: Int32Array
    classes: Int32Array
    role: ByteArray
    instance: Int32Array
    pred_ptr: IntArray
    pred: Int32Array
    fixed_ns: Floats
    noisy_ns: Floats
    reach: ByteArray
    class_count: int

    @property
    def rows(self) -> int:
        """Rows of noise worth having: one a segment and class, up to a limit."""
        return min(NOISE_ROWS, max(1, (int(self.segment.max(initial=0)) + 1) * self.class_count))


def fold(graph: Graph, reach: ByteArray | None = None) -> Folded:
    """Prepare a graph whose ranks are classes; `reach` uint8 a collective (columns.NONE … BOTH), default BOTH."""
    role = np.full(len(graph), PLAIN, np.uint8)
    role[graph.kind == NodeKind.ARRIVE] = ARRIVE
    role[(graph.kind == NodeKind.TRANSFER) | (graph.kind == NodeKind.RENDEZVOUS)] = MEET
    ranks = np.unique(graph.rank[(graph.rank >= 0) & (graph.kind != NodeKind.RENDEZVOUS)])
    first = ranks[0] if len(ranks) else 0
    owner = np.where(np.isin(graph.rank, ranks), graph.rank, first)
    order = np.argsort(graph.pred, kind="stable")
    ptr = np.zeros(len(graph) + 1, np.int64)
    np.cumsum(np.bincount(graph.pred, minlength=len(graph)), out=ptr[1:])
    return Folded(
        graph=graph,
        classes=np.searchsorted(ranks, owner).astype(np.int32),
        segment=segments(graph),
        role=role,
        noisy=(compute_nodes(graph) | graph.nodes(NodeKind.HOST, NodeKind.LAUNCH)) & (role == PLAIN),
        reach=np.full(max(1, len(graph.collectives)), BOTH, np.uint8) if reach is None else reach,
        keep=keep_mask(role, graph.pred_ptr, graph.pred),
        succ_ptr=ptr,
        succ=graph.edge_dst[order],
        succ_lag_ns=graph.lag_ns[order].astype(np.float64),
    )


def reduced(folded: Folded, dur_ns: npt.ArrayLike | None = None) -> Reduced:
    """The longest paths of a folded graph, with other durations if given (int64[n]).

    A kept node that noise stretches gives its duration to the paths that lead to it, so that only paths are noisy.
    """
    graph, count = folded.graph, folded.class_count
    durations = np.asarray(graph.dur_ns if dur_ns is None else dur_ns, np.float64)
    src, dst, fixed, noisy = longest_paths(
        durations, folded.noisy, folded.classes, folded.keep, folded.succ_ptr, folded.succ, folded.succ_lag_ns, count
    )
    kept = np.flatnonzero(folded.keep)
    moved = folded.keep & folded.noisy
    extra = np.concatenate((np.where(moved, durations, 0.0), np.zeros(count)))
    # One origin before all (position 0), so that noisy roots have a path that gives them their duration.
    position = np.concatenate((np.zeros(len(graph), np.int64), 1 + len(kept) + np.arange(count)))
    position[kept] = 1 + np.arange(len(kept))
    roots = kept[moved[kept] & (np.diff(graph.pred_ptr)[kept] == 0)]
    to = np.concatenate((position[dst], position[roots]))
    source = np.concatenate((position[src], np.zeros(len(roots), np.int64)))
    fixed_ns = np.concatenate((fixed, np.zeros(len(roots))))
    noisy_ns = np.concatenate((noisy + extra[dst], durations[roots]))
    order = np.argsort(to, kind="stable")
    total = 1 + len(kept) + count
    ptr = np.zeros(total + 1, np.int64)
    np.cumsum(np.bincount(to, minlength=total), out=ptr[1:])
    last = np.array([folded.segment[folded.classes == c].max(initial=0) for c in range(count)], np.int32)
    zero, none = np.zeros(1, np.int32), np.full(count, -1, np.int32)
    return Reduced(
        dur_ns=np.concatenate((np.zeros(1), np.where(moved, 0.0, durations)[kept], np.zeros(count))),
        segment=np.concatenate((zero, folded.segment[kept], last)),
        classes=np.concatenate((zero, folded.classes[kept], np.arange(count, dtype=np.int32))),
        role=np.concatenate((zero, folded.role[kept], np.full(count, PLAIN))).astype(np.uint8),
        instance=np.concatenate((zero - 1, graph.instance[kept], none)),
        pred_ptr=ptr,
        pred=source[order].astype(np.int32),
        fixed_ns=fixed_ns[order],
        noisy_ns=noisy_ns[order],
        reach=folded.reach,
        class_count=count,
    )


def expected_step_ns(
    folded: Folded | Reduced,
    population: Population,
    noise: Noise,
    dur_ns: npt.ArrayLike | None = None,
    seed: int = 1,
    cells: int = CELLS,
) -> float:
    """Expected time until the last of the population has finished the graph, by the folded ensemble.

    cells: most (node, rank) pairs that a heavy-tailed population is simulated with
    """
    graph = folded if isinstance(folded, Reduced) else reduced(folded, dur_ns)
    if noise.tail != "normal":
        return _heavy_step_ns(graph, population, noise, seed, cells)
    shape = _shape(graph, population)
    rng = np.random.default_rng(seed)
    table = _noise_table(noise, rng, graph.rows, shape)
    static = _static_table(noise, rng, graph.class_count, shape, population)
    luck = np.stack([rng.permutation(normal_scores(shape[0])) for _ in range(64)])
    gain = (expected_max(population.inner), expected_max(population.outer), variance_of_max(population.inner) ** 0.5)
    n = (float(population.inner), float(population.outer))
    end, _ = _sweep(graph, table, static, shape, n, gain, luck, 0.0, np.zeros((0, 1)))
    return everyone(end[-graph.class_count :], shape, n, gain, 0.0)


def simulate_step_ns(
    folded: Folded | Reduced, population: Population, noise: Noise, dur_ns: npt.ArrayLike | None = None, seed: int = 1
) -> float:
    """The same by brute force: one column for every rank of the population, the largest wherever they meet."""
    graph = folded if isinstance(folded, Reduced) else reduced(folded, dur_ns)
    return _one_by_one(graph, population, noise, seed, 1.0, np.zeros((0, 1)))[0]


def _one_by_one(
    graph: Reduced, population: Population, noise: Noise, seed: int, boost: float, shapes: Floats, ranks: int = 0
) -> tuple[float, int]:
    """Finish of the last rank with a column for each, and how many rows of `shapes` were filled; see Noise.draw."""
    shape = (population.outer, population.inner, 0)
    rng = np.random.default_rng(seed)
    table = noise.draw(rng, (graph.rows, population.ranks), ranks)
    static = np.zeros((graph.class_count, population.ranks))
    if noise.static_cv:
        static = rng.normal(0.0, noise.static_cv, static.shape)
        if ranks > population.ranks:
            row, worst = np.arange(len(static)), static.argmax(axis=1)
            static[row, worst] = np.maximum(static[row, worst], noise.static_cv * expected_max(ranks))
    n = (float(population.inner), float(population.outer))
    end, filled = _sweep(graph, table, static, shape, n, (0.0, 0.0, 0.0), np.zeros((1, 1)), boost, shapes)
    return everyone(end[-graph.class_count :], shape, n, (0.0, 0.0, 0.0), boost), filled


def _heavy_step_ns(graph: Reduced, population: Population, noise: Noise, seed: int, cells: int = CELLS) -> float:
    """A population with heavy tails: as many ranks one by one as fit, and beyond them what the tail's shape adds.

    Of a Pareto tail the largest delay of all n ranks is put among the S that are simulated (Noise.draw). A lognormal one
    is light enough for sums of several delays to count: there the largest of S ranks lies at some distance from their
    mean, and that of n ranks lies further by the ratio of the expected maxima of the standardised arrivals, pooled over
    meetings. With a sixth of the ranks simulated both are within 1 % (benchmarks/ensemble.py).
    """
    most = max(64, cells // max(1, len(graph.dur_ns) + graph.rows) // population.inner)
    shown = Population(min(population.outer, most), population.inner)
    boost = 1.0
    whole = population.ranks if noise.tail == "pareto" else 0
    if shown.outer < population.outer and noise.tail != "pareto":
        shapes = np.zeros((64, shown.ranks))
        _, filled = _one_by_one(graph, shown, noise, seed, 1.0, shapes)
        scores = shapes[:filled].ravel()
        if filled:
            boost = max(1.0, _tail_gain(scores, population.outer) / _tail_gain(scores, shown.outer))
    repeats = max(LEAST_REPEATS, LEAST_COLUMNS // shown.ranks)
    return float(
        np.mean([_one_by_one(graph, shown, noise, seed + i, boost, np.zeros((0, 1)), whole)[0] for i in range(repeats)])
    )


def _shape(graph: Reduced, population: Population) -> tuple[int, int, int]:
    extra = min(graph.class_count, 16)
    if population.inner == 1:
        return SAMPLES, 1, extra
    return OUTER_SAMPLES, min(INNER_SAMPLES, population.inner), extra


def _noise_table(noise: Noise, rng: np.random.Generator, rows: int, shape: tuple[int, int, int]) -> Floats:
    """Normal noise of every column, stratified so that mean and spread are exact in every segment."""
    a_count, b_count, extra = shape
    sampled = a_count * b_count
    scores = normal_scores(sampled)
    table = np.empty((rows, sampled + extra))
    for row in table:
        row[:sampled] = rng.permutation(scores)
    table[:, sampled:] = rng.normal(size=(rows, extra))
    return table * noise.residual_cv


def _static_table(
    noise: Noise, rng: np.random.Generator, classes: int, shape: tuple[int, int, int], population: Population
) -> Floats:
    """Static offset of every class in every column; the extra column e holds the worst of class e mod classes."""
    a_count, b_count, extra = shape
    sampled = a_count * b_count
    table = np.zeros((classes, sampled + extra))
    if noise.static_cv == 0:
        return table
    scores = normal_scores(sampled)
    worst = expected_max(population.ranks)
    for c in range(classes):
        table[c, :sampled] = rng.permutation(scores)
    for e in range(extra):
        table[e * classes // extra, sampled + e] = worst
    return table * noise.static_cv


def _sweep(
    graph: Reduced,
    table: Floats,
    static: Floats,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
    boost: float,
    shapes: Floats,
) -> tuple[Floats, int]:
    return sweep_columns(
        graph.dur_ns, graph.segment, graph.classes, graph.role, graph.instance, graph.pred_ptr, graph.pred,
        graph.fixed_ns, graph.noisy_ns, graph.reach, table, static, shape, n, gain, luck, boost, shapes,
    )  # fmt: skip


def _tail_gain(scores: Floats, n: int) -> float:
    """E[max of n] of a standardised sample: its own quantiles, and beyond them a generalised Pareto tail."""
    order = np.sort(scores)
    count = len(order)
    cut = max(20, int(count * TAIL_SHARE))
    threshold = order[count - cut - 1]
    excess = order[count - cut :] - threshold
    xi, scale = _pareto_fit(excess)
    levels = (np.arange(4000) + 0.5) / 4000
    p = -np.expm1(np.log(levels) / n)
    share = cut / count
    body = np.interp(1 - p, (np.arange(count) + 0.5) / count, order)
    ratio = np.minimum(p / share, 1.0)
    tail = threshold + (scale * -np.log(ratio) if abs(xi) < 1e-6 else scale / xi * (ratio**-xi - 1))
    return float(np.where(p < share, tail, body).mean())


def _pareto_fit(excess: Floats) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto by probability-weighted moments (Hosking and Wallis 1987)."""
    order = np.sort(excess)
    count = len(order)
    weight = (count - 1 - np.arange(count)) / (count - 1)
    first, second = float(order.mean()), float((weight * order).mean())
    if first <= 2 * second or first <= 0:
        return 0.0, max(first, 1e-12)
    xi = 2 - first / (first - 2 * second)
    return min(max(xi, -0.5), 0.49), 2 * first * second / (first - 2 * second)
