"""Stragglers are found by counterfactual: what the job would take without their delay."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.parse.graph import EdgeKind, NodeKind
from scaletrace.replay.align import pair
from scaletrace.replay.engine import replay
from scaletrace.replay.stragglers import Straggler, caused_waits, peers_pace, stragglers, waits, without_delay
from tests.replay.graphs import graph_of, two_ranks


def test_late_rank_is_named_with_its_cost() -> None:
    """Rank 1 is 50 ns late: it caused 50 ns of waiting, and the job would be 50 ns shorter without."""
    assert [Straggler(1, 50, 50), Straggler(0, 0, 0)] == stragglers(replay(two_ranks(late_ns=50)))


def test_waits_name_whom_they_await() -> None:
    """Only the early member waits, for rank 1."""
    waited, awaited = waits(replay(two_ranks(late_ns=50)))

    assert [50, 0] == waited[[6, 7]].tolist()
    assert [1, -1] == awaited[[6, 7]].tolist()


def test_pace_of_the_peers() -> None:
    """The slow kernel gets the median of its counterparts, the others keep their own."""
    assert [10, 10, 100, 100, 0, 0, 40, 40, 30, 30] == peers_pace(two_ranks(late_ns=50)).tolist()
    assert 187 == without_delay(two_ranks(late_ns=50), 1).makespan_ns


def test_one_rank_has_no_straggler() -> None:
    """Alone nobody can be late."""
    assert [] == stragglers(replay(graph_of([("a", NodeKind.HOST, 0, 0, 5)], [])))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], [0, 1, 2]),
        ([1, 2, 3], [1, 9, 2, 3], [0, 2, 3]),
        ([1, 9, 2, 3], [1, 2, 3], [0, -1, 1, 2]),
        ([1, 2, 3, 4], [3, 4], [-1, -1, 0, 1]),
        ([], [1], []),
        ([1], [], [-1]),
        ([5, 6], [7, 8], [-1, -1]),
    ],
)
def test_pairs_are_the_longest_common_subsequence(a: list[int], b: list[int], expected: list[int]) -> None:
    """Insertions and deletions leave the rest paired."""
    assert expected == pair(np.array(a, np.int64), np.array(b, np.int64)).tolist()


def test_waits_that_overlap_count_once() -> None:
    """Rank 0 waits for rank 1 with two collectives in flight, from 0 and from 10 on: 40 ns of wall time, not 70."""
    H, A, T = NodeKind.HOST, NodeKind.ARRIVE, NodeKind.TRANSFER
    nodes = [
        ("early", H, 0, 0, 10),
        ("late", H, 1, 1, 40),
        ("first", A, 0, 2, 0),
        ("first", A, 1, 3, 0),
        ("second", A, 0, 4, 0),
        ("second", A, 1, 5, 0),
        ("first", T, 0, 2, 5),
        ("first", T, 1, 3, 5),
        ("second", T, 0, 4, 5),
        ("second", T, 1, 5, 5),
    ]
    S, M = EdgeKind.STREAM, EdgeKind.RENDEZVOUS
    edges = [(0, 4, 0, EdgeKind.PROGRAM), (1, 3, 0, EdgeKind.PROGRAM), (1, 5, 0, EdgeKind.PROGRAM)]
    edges += [(2, 6, 0, S), (3, 7, 0, S), (4, 8, 0, S), (5, 9, 0, S)]
    edges += [(3, 6, 0, M), (2, 7, 0, M), (5, 8, 0, M), (4, 9, 0, M)]
    graph = graph_of(nodes, edges, instance={2: 0, 3: 0, 6: 0, 7: 0, 4: 1, 5: 1, 8: 1, 9: 1})

    assert {0: 0, 1: 40} == caused_waits(replay(graph), [0, 1])
