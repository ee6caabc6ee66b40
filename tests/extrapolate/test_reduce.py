"""The reduced graph has the same longest paths: its noiseless sweep ends when the plain replay does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.stragglers import Noise, Population, expected_step_ns, fold, reduced
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.engine import replay


def _random_graph(seed: int, ranks: int, length: int) -> Graph:
    """Kernels, host calls and collectives with random durations, lags and dependencies on what came before."""
    rng = np.random.default_rng(seed)
    draft = Draft()
    own: list[list[int]] = [[] for _ in range(ranks)]

    def some(rank: int) -> list[int]:
        return [own[rank][i] for i in rng.integers(0, len(own[rank]), min(2, len(own[rank])))] if own[rank] else []

    for _ in range(length):
        choice = rng.random()
        if choice < 0.25:
            members = draft.collective(
                "all_reduce", 0, 1, [(r, some(r)) for r in range(ranks)], int(rng.integers(0, 50))
            )
            for rank, node in enumerate(members):
                own[rank].append(node)
        else:
            rank = int(rng.integers(ranks))
            kind, lane = (NodeKind.KERNEL, "stream") if choice < 0.7 else (NodeKind.HOST, "thread")
            node = draft.node(kind, int(rng.integers(0, 100)), rank=rank, lane=lane)
            for before in some(rank):
                draft.edge(before, node, EdgeKind.EVENT_WAIT, int(rng.integers(-5, 20)))
            own[rank].append(node)
    return draft.graph()


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 4), length=st.integers(1, 60))
def test_longest_paths_are_kept(seed: int, ranks: int, length: int) -> None:
    """Without noise the last class ends exactly when the engine says, for one rank of each class or many."""
    graph = _random_graph(seed, ranks, length)
    folded = fold(graph)
    small = reduced(folded)
    makespan = float(replay(graph).end_ns.max())

    assert len(small.dur_ns) <= len(graph) + folded.class_count + 1
    for population in (Population(1), Population(1000)):
        assert makespan == expected_step_ns(small, population, Noise(0.0, 0.0))


def test_a_long_stretch_between_collectives_is_one_path() -> None:
    """A thousand kernels before a collective leave a handful of nodes."""
    draft = Draft()
    before: list[int] = []
    for _ in range(1000):
        before = [draft.node(NodeKind.KERNEL, 10, after=before)]
    draft.collective("all_reduce", 0, 1, [(0, before)], 7)
    small = reduced(fold(draft.graph()))

    assert len(small.dur_ns) < 10
    assert 10_007.0 == expected_step_ns(small, Population(8), Noise(0.0, 0.0))
