"""The critical path has no hole: nodes and labelled gaps sum to the makespan to the nanosecond."""

from __future__ import annotations

from hypothesis import given, settings

from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.critical_path import critical_path, next_paths, slack
from scaletrace.replay.engine import replay
from tests.replay.graphs import graph_of, two_ranks
from tests.replay.test_engine import graphs


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_length_is_the_makespan(graph: Graph) -> None:
    """Whatever the lags, own times and gaps are not negative and sum to the makespan, as do the segments."""
    timeline = replay(graph)
    path = critical_path(timeline)

    assert timeline.makespan_ns == path.length_ns
    assert timeline.makespan_ns == sum(int(str(s["dur_ns"])) for s in path.segments())
    assert (path.own_ns >= 0).all()


def test_path_crosses_to_the_late_rank() -> None:
    """The path ends on one rank and comes from the rank that was late."""
    path = critical_path(replay(two_ranks(late_ns=50)))

    assert [1, 3, 5, 6, 8] == path.nodes.tolist()
    assert ["launch", "gemm", "nccl", "nccl", "add"] == path.to_frame()["name"].tolist()
    assert [0, 5, 1, 0, 1] == path.gap_ns.tolist()
    assert ["launch latency", "event wait", "event wait"] == [path.gap_reason(at) for at in (1, 2, 4)]


def test_shares_sum_to_one() -> None:
    """Shares by kind are of the whole length, gaps included."""
    shares = critical_path(replay(two_ranks(late_ns=50))).shares()

    assert 1.0 == sum(shares.values())
    assert 180 / 237 == shares["compute"]
    assert 40 / 237 == shares["communication"]
    assert 10 / 237 == shares["host"]


def test_time_by_rank_and_axis() -> None:
    """The length splits by rank and by axis of the collective."""
    path = critical_path(replay(two_ranks(late_ns=50)))

    assert {"1": 166, "0": 71} == path.time_by("rank")
    assert {"": 196, "dp": 41} == path.time_by("axis")


def test_slack_is_what_a_node_may_still_lose() -> None:
    """Rank 0's first kernel could take as much longer as rank 1 is late; on the path slack is zero."""
    timeline = replay(two_ranks(late_ns=50))

    found = slack(timeline)

    assert 50 == found[2]
    assert [0] * 5 == found[critical_path(timeline).nodes].tolist()


def test_next_paths_differ_and_shrink() -> None:
    """After the critical path comes the longest chain that is mostly new."""
    graph = graph_of(
        [
            ("start", NodeKind.HOST, 0, 0, 10),
            ("long", NodeKind.KERNEL, 0, 1, 100),
            ("short", NodeKind.KERNEL, 0, 2, 60),
        ],
        [(0, 1, 0, EdgeKind.LAUNCH), (0, 2, 5, EdgeKind.LAUNCH)],
        release={0: 0},
    )

    found = [(length, nodes.tolist()) for length, nodes in next_paths(replay(graph))]

    assert [(110, [0, 1]), (75, [0, 2])] == found


def test_late_release_is_a_labelled_gap() -> None:
    """Time before a node that only its release holds back counts as started before the window."""
    graph = graph_of([("a", NodeKind.HOST, 0, 0, 5), ("b", NodeKind.KERNEL, 0, 1, 7)], [], release={0: 0, 1: 100})
    path = critical_path(replay(graph))

    assert ["started before the window", "b"] == [s["name"] for s in path.segments()]
    assert 107 == path.length_ns
