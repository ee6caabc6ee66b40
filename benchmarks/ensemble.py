"""Compares the folded ensemble with full Monte Carlo over 512 to 32,768 ranks, and times both.

    python -P benchmarks/ensemble.py

The Monte Carlo is written down here on its own, in plain numpy, one array of all ranks, so that it shares no code with
what it checks. Each case is repeated until the mean is known to about 0.2 %, or 60 times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.extrapolate.columns import BOTH, INNER, NONE, OUTER
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.stragglers import CELLS, Folded, Noise, Population, expected_step_ns, fold, reduced
from scaletrace.parse.graph import NodeKind

Floats = npt.NDArray[np.float64]
STEP_NS = 10**9
MOST_REPEATS, WANTED = 60, 0.002


@dataclass(frozen=True, slots=True)
class Case:
    """A dependency pattern: as a graph of classes, and as a simulation of all ranks in seconds of a one-second step."""

    name: str
    graph: Callable[[], Folded]
    simulate: Callable[[np.random.Generator, Population, Noise], float]
    classes: int = 1


def chain(intervals: int, lookahead: int) -> Case:
    """Compute, gather over all ranks, wait for the gather of `lookahead` intervals ago."""

    def graph() -> Folded:
        draft, gathers, before = Draft(), [], None
        for k in range(intervals):
            after = [node for node in (before, gathers[k - lookahead] if k >= lookahead else None) if node is not None]
            before = draft.node(NodeKind.KERNEL, STEP_NS // intervals, after=after)
            gathers.append(draft.collective("all_gather", 0, 1, [(0, [before])])[0])
        return fold(draft.graph(), np.full(intervals, BOTH, np.uint8))

    def simulate(rng: np.random.Generator, population: Population, noise: Noise) -> float:
        ranks = population.ranks
        own = rng.normal(0, noise.static_cv, ranks)
        done, gathers = np.zeros(ranks), []
        for k in range(intervals):
            start = np.maximum(done, gathers[k - lookahead]) if k >= lookahead else done
            done = start + (1 + noise.draw(rng, (1, ranks))[0] + own) / intervals
            gathers.append(done.max())
        return float(gathers[-1])

    return Case("blocking" if lookahead == 1 else f"prefetched by {lookahead}", graph, simulate)


def nested(intervals: int, lookahead: int) -> Case:
    """A blocking collective in every inner group, and a prefetched one across them, in each interval."""

    def graph() -> Folded:
        draft, reach, outer, before = Draft(), [], [], None
        for k in range(intervals):
            after = [node for node in (before, outer[k - lookahead] if k >= lookahead else None) if node is not None]
            before = draft.node(NodeKind.KERNEL, STEP_NS // intervals, after=after)
            before = draft.collective("all_reduce", 0, 1, [(0, [before])])[0]
            outer.append(draft.collective("all_reduce", 0, 1, [(0, [before])])[0])
            reach += [INNER, OUTER]
        return fold(draft.graph(), np.array(reach, np.uint8))

    def simulate(rng: np.random.Generator, population: Population, noise: Noise) -> float:
        shape = (population.outer, population.inner)
        own = rng.normal(0, noise.static_cv, shape)
        done, outer = np.zeros(shape), []
        for k in range(intervals):
            start = np.maximum(done, outer[k - lookahead]) if k >= lookahead else done
            work = start + (1 + noise.draw(rng, shape) + own) / intervals
            done = np.broadcast_to(work.max(axis=1, keepdims=True), shape)
            outer.append(done.max(axis=0, keepdims=True))
        return float(outer[-1].max())

    return Case("inner groups and across", graph, simulate)


def pipeline(stages: int, batches: int, steps: int) -> Case:
    """GPipe: micro batches forward and back through stages, then a reduction of each stage over all pipelines."""
    part = 1 / (steps * (batches + stages))

    def graph() -> Folded:
        draft, reach = Draft(), []
        last: list[int | None] = [None] * stages

        def work(stage: int, dur_ns: int, arrived: int | None) -> int:
            before = arrived if arrived is not None else last[stage]
            last[stage] = draft.node(NodeKind.KERNEL, dur_ns, rank=stage, after=[] if before is None else [before])
            return last[stage] or 0

        def send(source: int, target: int, node: int) -> int:
            reach.append(NONE)
            waiting = last[target]
            return draft.collective("send", 0, 1, [(source, [node]), (target, [] if waiting is None else [waiting])])[1]

        for _ in range(steps):
            for _ in range(batches):
                node = work(0, int(STEP_NS * part / 3), None)
                for stage in range(1, stages):
                    node = work(stage, int(STEP_NS * part / 3), send(stage - 1, stage, node))
            for _ in range(batches):
                node = work(stages - 1, int(2 * STEP_NS * part / 3), None)
                for stage in reversed(range(stages - 1)):
                    node = work(stage, int(2 * STEP_NS * part / 3), send(stage + 1, stage, node))
            for stage in range(stages):
                reach.append(BOTH)
                last[stage] = draft.collective("all_reduce", 0, 1, [(stage, [last[stage] or 0])])[0]
        return fold(draft.graph(), np.array(reach, np.uint8))

    def simulate(rng: np.random.Generator, population: Population, noise: Noise) -> float:
        ranks = population.ranks
        own = rng.normal(0, noise.static_cv, (stages, ranks))
        done = np.zeros((stages, ranks))
        for _ in range(steps):
            # A rank's noise is drawn once between two collectives that it issues, as in the graph: every message is one.
            for order, share in ((range(stages), 1 / 3), (range(stages - 1, -1, -1), 2 / 3)):
                for _ in range(batches):
                    arrived: Floats | None = None
                    for stage in order:
                        start = done[stage] if arrived is None else np.maximum(done[stage], arrived)
                        done[stage] = start + part * share * (1 + noise.draw(rng, (1, ranks))[0] + own[stage])
                        arrived = done[stage]
            done[:] = done.max(axis=1, keepdims=True)
        return float(done.max())

    return Case(f"pipeline of {stages}", graph, simulate, stages)


NORMAL, SKEWED, LOGNORMAL = Noise(0.05, 0.0), Noise(0.02, 0.02), Noise(0.2, 0.0, "lognormal")
PARETO, BOTH_KINDS = Noise(0.05, 0.01, "pareto", 6.0), Noise(0.05, 0.01)
CASES: list[tuple[Case, Noise, str]] = [
    *[(chain(96, lookahead), noise, label) for lookahead in (1, 2, 8) for noise, label in (
        (NORMAL, "normal 5 %"), (SKEWED, "normal 2 %, static 2 %"), (LOGNORMAL, "lognormal 20 %"), (PARETO, "Pareto 5 %, static 1 %"),
    )],
    *[(nested(48, 2), noise, label) for noise, label in ((BOTH_KINDS, "normal 5 %, static 1 %"), (PARETO, "Pareto 5 %, static 1 %"))],
    *[(pipeline(stages, 8, 3), noise, label) for stages in (4, 8) for noise, label in (
        (BOTH_KINDS, "normal 5 %, static 1 %"), (PARETO, "Pareto 5 %, static 1 %"))],
]  # fmt: skip


THIN = 8
"""Beyond the cells that a sweep may take only a part of a heavy-tailed population is simulated; here one in so many."""


def compare(case: Case, noise: Noise, label: str, ranks: int, thin: int = 1) -> tuple[list[str], float]:
    """A row, and the relative error of the ensemble; thin > 1: with room for one rank in so many."""
    inner = 8 if case.name.startswith("inner") else 1
    population = Population(ranks // case.classes // inner, inner)
    began = time.process_time()
    values: list[float] = []
    rng = np.random.default_rng(1)
    while len(values) < MOST_REPEATS:
        values.append(case.simulate(rng, population, noise))
        if len(values) >= 8 and np.std(values) / np.sqrt(len(values)) < WANTED / 2 * np.mean(values):
            break
    truth, unsure = float(np.mean(values)), float(np.std(values) / np.sqrt(len(values)))
    full = (time.process_time() - began) / len(values)
    folded = case.graph()
    graph = reduced(folded)
    cells = CELLS if thin == 1 else (len(graph.dur_ns) + graph.rows) * population.ranks // thin
    repeats = 1 if noise.tail == "normal" else 6
    expected_step_ns(graph, Population(8), noise)
    began = time.process_time()
    answers = [
        expected_step_ns(graph, population, noise, seed=seed, cells=cells) / STEP_NS
        for seed in range(0, 10 * repeats, 10)
    ]
    quick = (time.process_time() - began) / repeats
    error = float(np.mean(answers)) / truth - 1
    row = [
        case.name, label, f"{ranks:,}" + (f", 1 in {thin}" if thin > 1 else ""), f"{truth:.4f} ± {unsure / truth:.2%}", f"{np.mean(answers):.4f}", f"{error:+.2%}",
        f"{1e3 * full:.0f}", f"{1e3 * quick:.0f}", "holds" if abs(error) <= 0.01 else "MISSED",
    ]  # fmt: skip
    return row, error


def main() -> None:
    """Write benchmarks/results/ensemble.md."""
    results = [compare(case, noise, label, ranks) for case, noise, label in CASES for ranks in (512, 4096, 32768)]
    results += [compare(case, noise, label, 32768, THIN) for case, noise, label in CASES if noise.tail != "normal"]
    columns = ["pattern", "noise", "ranks", "Monte Carlo, steps", "folded", "error", "full ms", "folded ms", "1 %"]
    errors = np.abs([error for _, error in results])
    body = table(columns, [row for row, _ in results])
    body += f"\n\nMean error {errors.mean():.2%}, worst {errors.max():.2%}; {int((errors > 0.01).sum())} of {len(errors)} above 1 %.\n"
    body += "Normal noise is folded into 64 columns whatever the ranks; heavy tails are swept rank by rank up to 2^25 cells. "
    body += (
        f"Beyond them a part of the ranks stands for all; the rows with 1 in {THIN} are given no more room than that."
    )
    sys.stdout.write(write_result("ensemble", "Folded ensemble against full Monte Carlo", body, "numpy", "numba"))


if __name__ == "__main__":
    main()
