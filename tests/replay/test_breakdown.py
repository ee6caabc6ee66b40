"""Breakdown parts exclude each other and sum to the wall time exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from scaletrace.parse.graph import EdgeKind, Graph, GraphLane, NodeKind
from scaletrace.replay.breakdown import PARTS, breakdown, step_breakdown, to_frame
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_window
from tests.replay.graphs import graph_of, two_ranks
from tests.replay.test_engine import graphs


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_parts_sum_to_the_wall(graph: Graph) -> None:
    """For any graph, to the nanosecond."""
    timeline = replay(graph)

    for part in breakdown(timeline):
        assert timeline.makespan_ns == part.wall_ns
        assert part.wall_ns == sum(getattr(part, f"{name}_ns") for name in PARTS)
        assert 0 <= part.loader_ns <= part.host_ns


@given(graphs())
@settings(max_examples=30, deadline=None)
def test_parts_of_a_step_sum_to_the_step_time(graph: Graph) -> None:
    """What the mean rank does in the mean step adds up to the step time that every answer shows."""
    timeline = replay(graph)
    found = step_breakdown(timeline)
    step_ns = step_window(graph, timeline.start_ns, timeline.end_ns).mean_ns

    assert pytest.approx(step_ns) == found["wall_ns"]
    assert pytest.approx(step_ns) == sum(found[f"{part}_ns"] for part in PARTS)


def test_waiting_for_a_late_rank_is_exposed_communication() -> None:
    """The early rank waits 50 ns and moves 40 ns; the late one only moves."""
    early, late = breakdown(replay(two_ranks(late_ns=50)))

    assert (130, 90, {"dp": 90}) == (early.compute_ns, early.exposed_comm_ns, early.exposed_by_axis_ns)
    assert (180, 40, {"dp": 40}) == (late.compute_ns, late.exposed_comm_ns, late.exposed_by_axis_ns)
    assert [10, 10] == [early.host_ns, late.host_ns]
    assert [7, 7] == [early.idle_ns, late.idle_ns]


def test_communication_under_computation_is_overlapped() -> None:
    """Of a transfer of 100 under a kernel of 60, 60 are overlapped and 40 exposed."""
    nodes = [
        ("nccl", NodeKind.ARRIVE, 0, 0, 0),
        ("nccl", NodeKind.TRANSFER, 0, 0, 100),
        ("gemm", NodeKind.KERNEL, 0, 1, 60),
    ]
    lanes = [GraphLane(0, "stream 20", True), GraphLane(0, "stream 7", True)]
    graph = graph_of(nodes, [(0, 1, 0, EdgeKind.STREAM)], release={0: 0, 2: 0}, lanes=lanes)

    (part,) = breakdown(replay(graph))

    assert (0, 60, 40) == (part.compute_ns, part.overlapped_comm_ns, part.exposed_comm_ns)
    assert [100] == to_frame([part])["wall_ns"].tolist()


def test_stall_is_shown_as_such() -> None:
    """An unexplained delay is neither idle nor host."""
    nodes = [("host", NodeKind.HOST, 0, 0, 10), ("stall", NodeKind.STALL, 0, 1, 25), ("k", NodeKind.KERNEL, 0, 1, 5)]
    lanes = [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)]
    edges = [(0, 1, 0, EdgeKind.LAUNCH), (1, 2, 0, EdgeKind.STREAM)]

    (part,) = breakdown(replay(graph_of(nodes, edges, release={0: 0}, lanes=lanes)))

    assert (10, 25, 5, 0) == (part.host_ns, part.stall_ns, part.compute_ns, part.idle_ns)
