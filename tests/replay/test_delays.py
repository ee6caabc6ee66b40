"""A delay is taken out of where it hides, in order, and the answer says how much there was to take."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.parse.graph import EdgeKind, Graph, GraphLane, NodeKind
from scaletrace.replay.delays import remove_delay
from scaletrace.replay.whatif import whatif
from tests.replay.graphs import graph_of, two_ranks


@pytest.mark.parametrize(
    ("asked_ns", "change_ns", "taken_ns"), [(30, -30, 30), (50, -50, 50), (80, -50, 50), (5000, -50, 50)]
)
def test_delay_is_taken_up_to_what_there_is(asked_ns: int, change_ns: int, taken_ns: int) -> None:
    """Rank 1 computes 50 ns longer than rank 0: no more than these can be taken out, and the answer says so."""
    found = whatif(two_ranks(late_ns=50), [f"rank1.delay=-{asked_ns}ns"])
    (removed,) = found.removed.values()

    assert change_ns == found.change_ns
    assert (asked_ns, taken_ns) == (removed.asked_ns, removed.total_ns)
    assert {"host": 0, "stall": 0, "kernels": taken_ns} == removed.taken_ns
    assert "could be taken out" in found.notes[0]


def test_punctual_rank_has_no_delay() -> None:
    """Rank 0 keeps its pace: nothing is taken, and that is said."""
    found = whatif(two_ranks(late_ns=50), ["rank0.delay=-20ns"])

    assert 0 == found.change_ns
    assert 0 == found.removed["rank0.delay=-20ns"].total_ns
    assert "there is no such delay" in found.notes[0]


def _three_delays() -> Graph:
    """Two ranks of host time, a stall and a kernel; on rank 1 each of them is 100, 30 and 20 ns longer."""
    nodes, edges = [], []
    for rank, (host, stall, kernel) in enumerate(((10, 0, 40), (110, 30, 60))):
        first = 3 * rank
        nodes += [
            ("between operators", NodeKind.HOST, rank, 2 * rank, host),
            ("stall", NodeKind.STALL, rank, 2 * rank + 1, stall),
            ("gemm", NodeKind.KERNEL, rank, 2 * rank + 1, kernel),
        ]
        edges += [(first, first + 1, 0, EdgeKind.LAUNCH), (first + 1, first + 2, 0, EdgeKind.STREAM)]
    lanes = [GraphLane(rank, name, name != "main") for rank in (0, 1) for name in ("main", "stream 7")]
    return graph_of(nodes, edges, release={0: 0, 3: 0}, step=[1] * 6, lanes=lanes)


@pytest.mark.parametrize(
    ("asked_ns", "taken_ns"),
    [
        (60, {"host": 60, "stall": 0, "kernels": 0}),
        (120, {"host": 100, "stall": 20, "kernels": 0}),
        (140, {"host": 100, "stall": 30, "kernels": 10}),
        (500, {"host": 100, "stall": 30, "kernels": 20}),
    ],
)
def test_sources_are_used_in_order(asked_ns: int, taken_ns: dict[str, int]) -> None:
    """Host time beyond the peers' pace first, then stalls, then slow kernels."""
    graph = _three_delays()
    dur, changed, removed = remove_delay(graph, graph.dur_ns, [1], asked_ns)

    assert taken_ns == removed.taken_ns
    assert sum(taken_ns.values()) == int((graph.dur_ns - dur).sum())
    assert int(changed.sum()) == sum(value > 0 for value in taken_ns.values())


def test_a_rank_alone_is_compared_with_its_other_steps() -> None:
    """Three steps of 10 ns of host time, one of them with 70 more: that step gives them up, the others nothing."""
    nodes = [("prepare", NodeKind.HOST, 0, 0, dur) for dur in (10, 80, 10)]
    edges = [(0, 1, 0, EdgeKind.PROGRAM), (1, 2, 0, EdgeKind.PROGRAM)]
    lanes = [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)]
    graph = graph_of(nodes, edges, release={0: 0}, step=[1, 2, 3], lanes=lanes)

    dur, _, removed = remove_delay(graph, graph.dur_ns, [0], 1_000)

    assert [10, 10, 10] == dur.tolist()
    assert (3_000, 70) == (removed.asked_ns, removed.total_ns)


def test_idle_host_time_without_a_counterpart_can_go_whole() -> None:
    """In one step of one rank the pause between operators is all that can be a delay; the operator is work."""
    nodes = [("aten::mm", NodeKind.HOST, 0, 0, 10), ("between operators", NodeKind.HOST, 0, 0, 50)]
    graph = graph_of(nodes, [(0, 1, 0, EdgeKind.PROGRAM)], release={0: 0})

    assert -50 == whatif(graph, ["rank0.delay=-90ns"]).change_ns


def test_delay_of_all_ranks_is_taken_from_each() -> None:
    """Without a rank the rule means every one; only what each exceeds its peers by can go."""
    found = whatif(_three_delays(), ["delay=-500ns"])

    assert {"host": 100, "stall": 30, "kernels": 20} == found.removed["delay=-500ns"].taken_ns


def test_more_can_not_be_taken_than_another_rule_left() -> None:
    """A rule before it has halved the kernels: the delay that is left is what still exceeds the pace."""
    graph = _three_delays()
    faster = np.where(graph.kind == NodeKind.KERNEL, graph.dur_ns // 2, graph.dur_ns)

    _, _, removed = remove_delay(graph, faster, [1], 500)

    assert {"host": 100, "stall": 30, "kernels": 0} == removed.taken_ns
