"""Noise and segments: what the measured ranks tell of jitter and slow ranks, in program order."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.noise import measure_noise
from scaletrace.extrapolate.segments import segments
from scaletrace.extrapolate.stragglers import PRIOR_NOISE
from scaletrace.parse.graph import EdgeKind, Graph, GraphGroup, NodeKind

RANKS, STEPS, SEGMENTS = 8, 12, 20


def _job(residual: float, static: float, slow_rank: float = 1.0, ranks: int = RANKS, steps: int = STEPS) -> Graph:
    """Ranks with lognormal noise in every segment, each with a factor of its own; the last by `slow_rank` besides."""
    rng = np.random.default_rng(7)
    own = np.exp(rng.normal(0, static, ranks)) if static else np.ones(ranks)
    own[-1] *= slow_rank
    draft = Draft(groups=[GraphGroup("dp", ranks, 1)])
    before: list[list[int]] = [[] for _ in range(ranks)]
    for step in range(steps):
        for _ in range(SEGMENTS):
            work = []
            for rank in range(ranks):
                dur_ns = int(1e6 * own[rank] * np.exp(rng.normal(0, residual)))
                work.append([draft.node(NodeKind.KERNEL, dur_ns, rank=rank, after=before[rank], step=step)])
            members = draft.collective("all_reduce", 0, 64, list(enumerate(work)), 1000)
            before = [[node] for node in members]
    graph = draft.graph()
    per_step = len(graph) // steps
    graph.step[:] = np.arange(len(graph)) // per_step
    return graph


@pytest.mark.parametrize(("residual", "static"), [(0.02, 0.0), (0.02, 0.02), (0.05, 0.01), (0.005, 0.03)])
def test_residual_and_static_spread_are_told_apart(residual: float, static: float) -> None:
    """Residual within 15 %; static within what eight ranks can show (a factor of 2)."""
    noise = measure_noise(_job(residual, static))

    assert residual == pytest.approx(noise.residual_cv, rel=0.15)
    assert static / 2 - 0.003 <= noise.static_cv <= static * 2 + 0.003
    assert noise.source.startswith(f"measured on {RANKS} ranks, {STEPS} steps")


def test_one_slow_rank_is_no_sign_of_a_wide_population() -> None:
    """A rank that takes twice as long is left out of the spread; it stays in the graph as what it is."""
    assert measure_noise(_job(0.02, 0.01, slow_rank=2.0)).static_cv < 0.03


def test_one_step_is_said_in_the_singular() -> None:
    """The source is read by people."""
    source = measure_noise(_job(0.02, 0.0, ranks=2, steps=1)).source

    assert source.startswith(f"measured on 2 ranks, 1 step, {SEGMENTS} segments")


def test_a_single_rank_leaves_the_published_prior() -> None:
    """Nothing can be said of other ranks from one."""
    assert PRIOR_NOISE == measure_noise(_job(0.02, 0.0, ranks=1))


def test_segments_follow_the_program_not_the_clock() -> None:
    """A kernel launched before a collective belongs before it, though it ran (and is numbered) after its arrival."""
    draft = Draft(groups=[GraphGroup("dp", 1, 1)])
    first = draft.node(NodeKind.LAUNCH, 1, lane="thread")
    issue = draft.node(NodeKind.LAUNCH, 1, lane="thread", after=[first])
    last = draft.node(NodeKind.LAUNCH, 1, lane="thread", after=[issue])
    (transfer,) = draft.collective("all_reduce", 0, 64, [(0, [])], 5)
    draft.edge(issue, transfer - 1, EdgeKind.LAUNCH)
    early = draft.node(NodeKind.KERNEL, 9)
    draft.edge(first, early, EdgeKind.LAUNCH)
    late = draft.node(NodeKind.KERNEL, 9, after=[early])
    draft.edge(last, late, EdgeKind.LAUNCH)

    assert {first: 0, early: 0, late: 1} == {node: int(segments(draft.graph())[node]) for node in (first, early, late)}
