"""Whom a step's durations may come from: the rank's own other steps, and peers where ranks only seem to differ."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.parse.graph import EdgeKind, Graph, GraphLane, NodeKind
from scaletrace.replay.align import sequences, tokens
from scaletrace.replay.donors import Donated, from_other_steps, from_peers, peers_weight
from tests.replay.graphs import graph_of

OPERATIONS = 8


def _job(times: np.ndarray) -> Graph:
    """Host operations of [rank, step, operation] durations, one chain a rank, each with its own device lane."""
    ranks, steps, _ = times.shape
    nodes, edges, step = [], [], []
    for rank in range(ranks):
        for at in range(steps):
            for op in range(OPERATIONS):
                if at or op:
                    edges.append((len(nodes) - 1, len(nodes), 0, EdgeKind.PROGRAM))
                nodes.append((f"aten::op{op}", NodeKind.HOST, rank, rank, int(times[rank, at, op])))
                step.append(at)
    lanes = [GraphLane(rank, "main", False) for rank in range(ranks)]
    return graph_of(nodes, edges, step=step, lanes=lanes)


def _own(graph: Graph, step: int, others: list[int]) -> tuple[Donated, dict[tuple[int, int, int], np.ndarray]]:
    parts = sequences(graph)
    mine = {key: nodes for key, nodes in parts.items() if key[1] == step}
    return from_other_steps(graph, tokens(graph), parts, mine, others, graph.dur_ns), parts


def _noise(seed: int, spread: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, spread, shape))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_are_slow_by_themselves_keep_their_own_pace(seed: int) -> None:
    """Eight ranks of 1,000 to 1,700 ns an operation, in every phase of every step: the peers hardly count."""
    pace = 1000.0 + 100 * np.arange(8)
    graph = _job(pace[:, None, None] * _noise(seed, 0.01, (8, 3, OPERATIONS)))

    assert peers_weight(graph, _own(graph, 2, [0, 1])[0]) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_were_disturbed_take_the_pace_of_all(seed: int) -> None:
    """Each rank is half as fast again in one phase of each step, always another: their differences mean little."""
    rng = np.random.default_rng(seed)
    times = 1000 * _noise(seed, 0.01, (8, 3, OPERATIONS))
    for rank in range(8):
        for step in range(3):
            at = 2 * int(rng.integers(4))
            times[rank, step, at : at + 2] *= 1.5
    graph = _job(times)

    assert peers_weight(graph, _own(graph, 2, [0, 1])[0]) > 0.2


def test_disturbances_that_repeat_in_one_phase_are_disturbances() -> None:
    """Rank 1 is slow in the first quarter of both donor steps and nowhere else: sums would call it a slow rank."""
    times = 1000 * _noise(3, 0.01, (8, 3, OPERATIONS))
    times[1, :2, :2] *= 1.5
    times[5, :2, 4:6] *= 1.5
    graph = _job(times)

    assert peers_weight(graph, _own(graph, 2, [0, 1])[0]) > 0.2


@pytest.mark.parametrize(("ranks", "others"), [(3, [0, 1]), (1, [0, 1]), (8, [0, 1, 2, 3, 4])])
def test_few_ranks_or_many_steps_need_no_peers(ranks: int, others: list[int]) -> None:
    """Of three ranks nobody can tell what is usual, and five steps of its own tell a rank's pace."""
    graph = _job(1000 * _noise(1, 0.2, (ranks, len(others) + 1, OPERATIONS)))

    assert 0.0 == peers_weight(graph, _own(graph, len(others), others)[0])


def test_peers_donate_whole_steps_to_another_rank() -> None:
    """In every column each rank has the times of one other rank in one step, and no two have the same."""
    graph = _job(np.arange(1, 6 * 3 * OPERATIONS + 1, dtype=np.float64).reshape(6, 3, OPERATIONS))
    own, parts = _own(graph, 2, [0, 1])
    mine = {key: nodes for key, nodes in parts.items() if key[1] == 2}
    columns = from_peers(graph, tokens(graph), parts, mine, [0, 1], own, 0.5)
    first = [[int(columns[mine[rank, 2, rank][0], c]) for rank in range(6)] for c in range(columns.shape[1])]

    assert 8 == columns.shape[1]
    assert [sorted(1 + OPERATIONS * (3 * rank + step) for rank in range(6)) for step in (1, 1, 1, 1, 0, 0, 0, 0)] == [
        sorted(column) for column in first
    ]
    assert all(
        column[rank] != 1 + OPERATIONS * (3 * rank + step) for column in first for rank in range(6) for step in (0, 1)
    )


def test_nothing_is_donated_without_weight() -> None:
    """No column where the peers do not count."""
    graph = _job(1000 * _noise(1, 0.1, (6, 3, OPERATIONS)))
    own, parts = _own(graph, 2, [0, 1])
    mine = {key: nodes for key, nodes in parts.items() if key[1] == 2}

    assert (len(graph), 0) == from_peers(graph, tokens(graph), parts, mine, [0, 1], own, 0.0).shape
