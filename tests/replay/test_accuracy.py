"""Errors per step, and prediction of a step from the others, which no measured start can leak into."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.parse.graph import EdgeKind, Graph, GraphLane, Measured, NodeKind
from scaletrace.replay.accuracy import across_steps, mean_error, step_errors, without_stalls
from scaletrace.replay.engine import replay
from tests.replay.graphs import graph_of


def _steps(durations: list[int], stall: int = 0) -> tuple[Graph, Measured]:
    """A chain of one host and one kernel node a step; the second kernel waits `stall` longer than explained."""
    nodes, edges, step = [], [], []
    for at, dur in enumerate(durations):
        nodes += [
            ("launch", NodeKind.HOST, 0, 0, 10),
            ("stall", NodeKind.STALL, 0, 1, stall if at == 1 else 0),
            ("gemm", NodeKind.KERNEL, 0, 1, dur),
        ]
        first = 3 * at
        edges += [(first, first + 1, 0, EdgeKind.LAUNCH), (first + 1, first + 2, 0, EdgeKind.STREAM)]
        if at:
            edges += [(first - 3, first, 0, EdgeKind.PROGRAM), (first - 1, first + 1, 0, EdgeKind.STREAM)]
        step += [at] * 3
    lanes = [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)]
    graph = graph_of(nodes, edges, release={0: 0}, step=step, lanes=lanes)
    timeline = replay(graph)
    bounds = {at: (int(timeline.start_ns[3 * at]), int(timeline.end_ns[3 * at + 2])) for at in range(len(durations))}
    return graph, Measured(timeline.start_ns, timeline.end_ns, np.ones(len(graph), np.bool_), bounds)


def test_steps_are_measured_from_end_to_end() -> None:
    """The first from its own start, the others from the end of the last."""
    graph, measured = _steps([100, 200, 300])

    found = step_errors(graph, measured, replay(graph))

    assert [(0, 110), (1, 200), (2, 300)] == [(e.step, e.measured_ns) for e in found]
    assert 0.0 == mean_error(found)


def test_a_step_that_ends_before_the_last_one_has_no_length() -> None:
    """A first step whose work runs past the second one's end: the second counts 0, the third from the first's end."""
    nodes = [("gemm", NodeKind.KERNEL, 0, lane, dur) for lane, dur in ((0, 300), (1, 50), (1, 400))]
    graph = graph_of(nodes, [(1, 2, 0, EdgeKind.STREAM)], release={0: 0, 1: 10}, step=[0, 1, 2])
    timeline = replay(graph)
    measured = Measured(timeline.start_ns, timeline.end_ns, np.ones(3, np.bool_))

    found = step_errors(graph, measured, timeline)

    assert [(300, 300), (0, 0), (160, 160)] == [(e.measured_ns, e.replayed_ns) for e in found]
    assert 0.0 == mean_error(found)


def test_strict_replay_forgives_no_stall() -> None:
    """Without the stall of 50 the second step is 50 too short, and says so."""
    graph, measured = _steps([100, 200, 300], stall=50)

    found = step_errors(graph, measured, replay(graph, without_stalls(graph)))

    assert [0, -50, 0] == [e.replayed_ns - e.measured_ns for e in found]


def test_a_step_is_predicted_from_the_others() -> None:
    """Kernels of 100, 200 and 300: each is predicted by the mean of the other two."""
    graph, measured = _steps([100, 200, 300])

    found = across_steps(graph, measured)

    assert [260, 200, 150] == [a.predicted_ns for a in found]
    assert [1.0, 1.0, 1.0] == [a.mapped for a in found]


def _two_threads(first: list[int], second: list[int]) -> tuple[Graph, Measured]:
    """Two ranks whose kernels meet at the end of every step; a step is as long as the slower of the two."""
    nodes, edges, step = [], [], []
    for at, pair in enumerate(zip(first, second, strict=True)):
        for rank, dur in enumerate(pair):
            nodes.append(("gemm", NodeKind.KERNEL, rank, rank, dur))
            if at:
                edges += [
                    (2 * at - 2, 2 * at + rank, 0, EdgeKind.STREAM),
                    (2 * at - 1, 2 * at + rank, 0, EdgeKind.STREAM),
                ]
            step.append(at)
    graph = graph_of(nodes, edges, step=step, lanes=[GraphLane(0, "stream 7", True), GraphLane(1, "stream 7", True)])
    timeline = replay(graph)
    return graph, Measured(timeline.start_ns, timeline.end_ns, np.ones(len(graph), np.bool_))


def test_what_happened_together_is_donated_together() -> None:
    """Either rank is slow by turns: steps of 200 each; a mean of durations would say 150, the donors say 200."""
    graph, measured = _two_threads([100, 200, 100, 200], [200, 100, 200, 100])

    found = across_steps(graph, measured)

    assert [200, 200, 200, 200] == [a.predicted_ns for a in found]
    assert [(200, 200)] * 4 == [(a.low_ns, a.high_ns) for a in found]


def test_a_step_of_no_length_is_left_out() -> None:
    """Marks without time between them can't be predicted, and divide nothing."""
    graph, measured = _steps([100, 0, 200])
    graph = replace(graph, dur_ns=np.where(graph.step == 1, 0, graph.dur_ns))
    timeline = replay(graph)
    measured = replace(measured, start_ns=timeline.start_ns, end_ns=timeline.end_ns)

    assert [0, 2] == [a.step for a in across_steps(graph, measured)]


def test_window_without_steps_is_one_step() -> None:
    """A trace without ProfilerStep is scored over its window."""
    graph = graph_of([("a", NodeKind.KERNEL, 0, 0, 5)], [], release={0: 3})
    timeline = replay(graph)
    measured = Measured(timeline.start_ns, timeline.end_ns, np.ones(1, np.bool_))

    assert [(-1, 5, 5)] == [(e.step, e.measured_ns, e.replayed_ns) for e in step_errors(graph, measured, timeline)]
