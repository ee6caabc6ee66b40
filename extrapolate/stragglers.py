"""Turns the noise of a few ranks into what waiting for the slowest of many costs a step.

Noise has two parts, both relative to compute time: residual (new in every segment between collectives, so it averages
where collectives are prefetched) and static (a rank that is always slow is waited for once, and never averaged away).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate.columns import ARRIVE, BOTH, MEET, PLAIN, finish_time, sweep_columns
from scaletrace.extrapolate.normal import expected_max, normal_scores, variance_of_max
from scaletrace.extrapolate.segments import segments
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array
from scaletrace.parse.graph import Graph, NodeKind

Floats = npt.NDArray[np.float64]
SAMPLES, HEAVY_SAMPLES = 64, 512
INNER_SAMPLES, OUTER_SAMPLES = 8, 32
NOISE_ROWS = 1024
TAIL_SHARE = 0.005
"""Share of the standardised arrivals that the tail is fitted to; below it the sample itself is used."""


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
            raise UsageError(f"noise needs spreads in [0, 1) and a tail index above 2, got {self}")
        if self.tail not in ("normal", "lognormal", "pareto"):
            raise UsageError(f"noise has a normal, lognormal or pareto tail, not {self.tail!r}")

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        """Relative residual noise of mean 0 and spread residual_cv."""
        if self.tail == "lognormal":
            sigma = np.sqrt(np.log1p(self.residual_cv**2))
            return np.asarray(rng.lognormal(-(sigma**2) / 2, sigma, shape) - 1.0)
        if self.tail == "pareto":
            index = self.tail_index
            raw = rng.pareto(index, shape)
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
    """A graph of classes, ready for the sweep over columns; reach says for each collective how far it goes."""

    graph: Graph
    classes: Int32Array
    segment: Int32Array
    role: ByteArray
    noisy: BoolArray
    reach: ByteArray

    @property
    def class_count(self) -> int:
        return int(self.classes.max()) + 1 if len(self.classes) else 0


COMPUTE = (NodeKind.HOST, NodeKind.KERNEL, NodeKind.COPY)


def fold(graph: Graph, reach: ByteArray | None = None) -> Folded:
    """Prepare a graph whose ranks are classes; `reach` uint8 a collective (columns.NONE … BOTH), default BOTH."""
    kinds = graph.kind
    role = np.full(len(graph), PLAIN, np.uint8)
    role[kinds == NodeKind.ARRIVE] = ARRIVE
    role[(kinds == NodeKind.TRANSFER) | (kinds == NodeKind.RENDEZVOUS)] = MEET
    ranks = np.unique(graph.rank[graph.rank >= 0])
    classes = np.searchsorted(ranks, np.maximum(graph.rank, ranks[0] if len(ranks) else 0)).astype(np.int32)
    if reach is None:
        reach = np.full(max(1, len(graph.collectives)), BOTH, np.uint8)
    return Folded(graph, classes, segments(graph), role, graph.nodes(*COMPUTE), reach)


def expected_step_ns(
    folded: Folded, population: Population, noise: Noise, dur_ns: npt.ArrayLike | None = None, seed: int = 1
) -> float:
    """Expected time until the last of the population has finished the graph, by the folded ensemble."""
    heavy = noise.tail != "normal"
    shape = _shape(folded, population, heavy)
    rng = np.random.default_rng(seed)
    rows = min(NOISE_ROWS, max(1, (int(folded.segment.max(initial=0)) + 1) * folded.class_count))
    table = _noise_table(noise, rng, rows, shape)
    static = _static_table(noise, rng, folded.class_count, shape, population)
    luck = np.stack([rng.permutation(normal_scores(shape[0])) for _ in range(64)])
    gain = (expected_max(population.inner), expected_max(population.outer), variance_of_max(population.inner) ** 0.5)
    n = (float(population.inner), float(population.outer))
    shapes = np.zeros((512 if heavy else 0, shape[0]))
    for _ in range(2 if heavy else 1):
        finish, filled = _sweep(folded, dur_ns, table, static, shape, n, gain, luck, heavy, False, shapes)
        if heavy and filled:
            gain = (gain[0], _tail_gain(shapes[:filled].ravel(), population.outer), gain[2])
    return finish_time(finish, shape, n, gain, heavy)


def simulate_step_ns(
    folded: Folded, population: Population, noise: Noise, dur_ns: npt.ArrayLike | None = None, seed: int = 1
) -> float:
    """The same by brute force: one column for every rank of the population, the largest wherever they meet."""
    shape = (population.outer, population.inner, 0)
    rng = np.random.default_rng(seed)
    columns = population.ranks
    rows = min(NOISE_ROWS, max(1, (int(folded.segment.max(initial=0)) + 1) * folded.class_count))
    table = noise.draw(rng, (rows, columns))
    static = (
        rng.normal(0.0, noise.static_cv, (folded.class_count, columns))
        if noise.static_cv
        else np.zeros((folded.class_count, columns))
    )
    n = (float(population.inner), float(population.outer))
    finish, _ = _sweep(
        folded, dur_ns, table, static, shape, n, (0.0, 0.0, 0.0), np.zeros((1, shape[0])), False, True, np.zeros((0, 1))
    )
    return float(finish.max())


def _shape(folded: Folded, population: Population, heavy: bool) -> tuple[int, int, int]:
    extra = min(folded.class_count, 16)
    if population.inner == 1:
        return (HEAVY_SAMPLES if heavy else SAMPLES), 1, extra
    return OUTER_SAMPLES, min(INNER_SAMPLES, population.inner), extra


def _noise_table(noise: Noise, rng: np.random.Generator, rows: int, shape: tuple[int, int, int]) -> Floats:
    """Noise of every column; stratified where it is normal, so that mean and spread are exact in every segment."""
    a_count, b_count, extra = shape
    sampled = a_count * b_count
    if noise.tail != "normal":
        return noise.draw(rng, (rows, sampled + extra))
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
    folded: Folded,
    dur_ns: npt.ArrayLike | None,
    table: Floats,
    static: Floats,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
    robust: bool,
    exact: bool,
    shapes: Floats,
) -> tuple[Floats, int]:
    graph = folded.graph
    durations = np.asarray(graph.dur_ns if dur_ns is None else dur_ns, np.float64)
    return sweep_columns(
        durations, folded.noisy, folded.segment, folded.classes, folded.role, graph.instance, graph.pred_ptr, graph.pred,
        graph.lag_ns.astype(np.float64), folded.reach, table, static, shape, n, gain, luck, robust, exact, shapes,
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
