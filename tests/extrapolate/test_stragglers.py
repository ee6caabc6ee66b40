"""Waiting for the slowest: the folded ensemble against one column for every rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.columns import BOTH, INNER, NONE, OUTER
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.normal import expected_max, normal_scores, variance_of_max
from scaletrace.extrapolate.stragglers import (
    Folded,
    Noise,
    Population,
    expected_step_ns,
    fold,
    reduced,
    simulate_step_ns,
)
from scaletrace.parse.graph import NodeKind

SECOND = 10**9


def chain(intervals: int, lookahead: int, inner: bool = False) -> Folded:
    """One class that computes and gathers in turn; it waits for the gather of `lookahead` intervals ago."""
    draft, reach, gathers, before = Draft(), [], [], None
    for k in range(intervals):
        after = [node for node in (before, gathers[k - lookahead] if k >= lookahead else None) if node is not None]
        before = draft.node(NodeKind.KERNEL, SECOND // intervals, after=after)
        if inner:
            before = draft.collective("all_reduce", 0, 1, [(0, [before])])[0]
            reach.append(INNER)
        gathers.append(draft.collective("all_gather", 0, 1, [(0, [before])])[0])
        reach.append(OUTER if inner else BOTH)
    return fold(draft.graph(), np.array(reach, np.uint8))


def pipeline(stages: int, batches: int, steps: int) -> Folded:
    """Stages that pass micro batches forward and back (GPipe), then reduce over all pipelines, step after step."""
    draft, reach, part = Draft(), [], SECOND // (steps * (batches + stages))
    last: list[int | None] = [None] * stages

    def send(source: int, target: int, node: int) -> int:
        reach.append(NONE)
        waiting = last[target]
        return draft.collective("send", 0, 1, [(source, [node]), (target, [] if waiting is None else [waiting])])[1]

    def work(stage: int, dur_ns: int, arrived: int | None) -> int:
        before = arrived if arrived is not None else last[stage]
        node = draft.node(NodeKind.KERNEL, dur_ns, rank=stage, after=[] if before is None else [before])
        last[stage] = node
        return node

    for _ in range(steps):
        for _ in range(batches):
            node = work(0, part // 3, None)
            for stage in range(1, stages):
                node = work(stage, part // 3, send(stage - 1, stage, node))
        for _ in range(batches):
            node = work(stages - 1, 2 * part // 3, None)
            for stage in reversed(range(stages - 1)):
                node = work(stage, 2 * part // 3, send(stage + 1, stage, node))
        for stage in range(stages):
            reach.append(BOTH)
            last[stage] = draft.collective("all_reduce", 0, 1, [(stage, [last[stage] or 0])])[0]
    return fold(draft.graph(), np.array(reach, np.uint8))


def test_expected_max_is_the_exact_integral() -> None:
    """1.42, 2.34, 3.04, 3.63, 4.13, 4.44 deviations at 8 to 131,072, and the known variance for two."""
    sizes = (1, 2, 8, 64, 512, 4096, 32768, 131072)
    expected = [0.0, 0.564, 1.424, 2.344, 3.044, 3.626, 4.134, 4.443]

    assert expected == [pytest.approx(expected_max(n), abs=0.0011) for n in sizes]
    assert 1 - 1 / np.pi == pytest.approx(variance_of_max(2), abs=1e-5)


def test_scores_are_standard() -> None:
    """Stratified scores have mean 0 and variance 1 whatever their number."""
    for count in (2, 8, 64):
        scores = normal_scores(count)
        assert (0.0, 1.0) == (pytest.approx(scores.mean(), abs=1e-12), pytest.approx(scores.std(ddof=1)))


Case = Callable[[], Folded]
CASES: list[tuple[str, Case, Population, Noise]] = [
    ("blocking", lambda: chain(48, 1), Population(512), Noise(0.05, 0.0)),
    ("prefetched by two", lambda: chain(48, 2), Population(512), Noise(0.05, 0.0)),
    ("prefetched by eight", lambda: chain(48, 8), Population(512), Noise(0.05, 0.0)),
    ("skewed", lambda: chain(48, 2), Population(512), Noise(0.02, 0.02)),
    ("skewed, many ranks", lambda: chain(48, 2), Population(4096), Noise(0.02, 0.02)),
    ("two axes", lambda: chain(24, 2, inner=True), Population(64, 8), Noise(0.05, 0.01)),
    ("pipeline", lambda: pipeline(4, 6, 2), Population(128), Noise(0.05, 0.01)),
]


@pytest.mark.parametrize(("name", "make", "population", "noise"), CASES, ids=[case[0] for case in CASES])
def test_the_folded_ensemble_meets_full_simulation(name: str, make: Case, population: Population, noise: Noise) -> None:
    """Within 1 % of the mean of many full simulations."""
    folded = make()
    simulated = np.mean([simulate_step_ns(folded, population, noise, seed=seed) for seed in range(40)])
    expected = np.mean([expected_step_ns(folded, population, noise, seed=seed) for seed in range(10)])

    assert simulated == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize(
    "noise", [Noise(0.05, 0.01, "pareto", 6.0), Noise(0.2, 0.0, "lognormal")], ids=["pareto", "lognormal"]
)
@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_part_of_a_heavy_tailed_population_stands_for_all(noise: Noise, lookahead: int) -> None:
    """With room for one rank in eight of 4,096 the step is that of all of them, within 1.5 %."""
    folded = chain(24, lookahead)
    graph = reduced(folded)
    cells = (len(graph.dur_ns) + graph.rows) * 4096 // 8
    whole = np.mean([simulate_step_ns(graph, Population(4096), noise, seed=seed) for seed in range(30)])
    part = np.mean([expected_step_ns(graph, Population(4096), noise, seed=seed, cells=cells) for seed in range(12)])

    assert whole == pytest.approx(part, rel=0.015)


def test_the_largest_of_all_ranks_is_among_those_that_stand_for_them() -> None:
    """Rows of 64 columns for 100,000 ranks hold one delay of the size that the largest of 100,000 has, others below it."""
    noise = Noise(0.05, 0.0, "pareto", 4.0)
    part, whole = (noise.draw(np.random.default_rng(1), (2000, 64), ranks) for ranks in (100_000, 0))

    assert ((part == part.max(axis=1, keepdims=True)).sum(axis=1) == 1).mean() > 0.99
    assert np.median(part.max(axis=1)) > 4 * np.median(whole.max(axis=1))
    assert np.median(part) == pytest.approx(np.median(whole), rel=0.05)


def test_without_noise_nothing_is_added() -> None:
    """The expected step of a noiseless population is the plain replay, whatever its size."""
    folded = chain(10, 1)
    assert [pytest.approx(SECOND)] * 2 == [
        expected_step_ns(folded, Population(n), Noise(0.0, 0.0)) for n in (8, 100_000)
    ]


def test_more_ranks_wait_longer() -> None:
    """The expected step never falls with the number of ranks."""
    folded = chain(24, 2)
    steps = [expected_step_ns(folded, Population(2**k), Noise(0.03, 0.01)) for k in range(0, 18, 2)]

    assert steps == sorted(steps)


@pytest.mark.parametrize("wrong", [{"residual_cv": -0.1}, {"static_cv": 1.5}, {"tail": "fat"}, {"tail_index": 1.0}])
def test_impossible_noise_is_refused(wrong: dict[str, float]) -> None:
    """Spreads are shares, and a tail needs a variance."""
    with pytest.raises(UsageError):
        Noise(**({"residual_cv": 0.01, "static_cv": 0.01} | wrong))  # type: ignore[arg-type]
