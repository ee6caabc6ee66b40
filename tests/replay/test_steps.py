"""The one definition of a step's time: from end to end on each rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.draft import Draft
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from scaletrace.replay.result import replay_job
from scaletrace.replay.steps import step_time_s, step_window


def _chain(*durations: int, ranks: int = 1, late_ns: int = 0) -> Graph:
    """Kernels of these lengths, one a step, on each rank; rank r begins r · late_ns later."""
    draft = Draft()
    steps = []
    for rank in range(ranks):
        before: list[int] = []
        for step, dur_ns in enumerate(durations):
            before = [draft.node(NodeKind.KERNEL, dur_ns, rank=rank, after=before, lane="stream 7")]
            steps.append(step)
    graph = draft.graph()
    graph.step[:] = steps
    for rank in range(ranks):
        graph.release_ns[rank * len(durations)] = rank * late_ns
    return graph


def _times(graph: Graph) -> list[int]:
    done = replay(graph)
    return step_window(graph, done.start_ns, done.end_ns).times_ns.tolist()


def test_a_step_lasts_from_end_to_end_on_its_rank() -> None:
    """The first of several opens the window; their mean is the step time."""
    graph = _chain(100, 200, 300)
    done = replay(graph)

    assert [200, 300] == _times(graph)
    assert 250e-9 == pytest.approx(step_time_s(graph, done.start_ns, done.end_ns))


def test_a_single_step_counts_from_its_own_start() -> None:
    """Of the mean rank, however far apart the ranks began."""
    assert [100] == _times(_chain(100))
    assert [100] == _times(_chain(100, ranks=3, late_ns=70))


def test_ranks_that_began_apart_do_not_lengthen_the_step() -> None:
    """A window that a late rank stretches by 70 ns a rank has the same steps."""
    assert [200, 300] == _times(_chain(100, 200, 300, ranks=4, late_ns=70))


def test_a_step_that_one_rank_lost_the_mark_of_counts_there_too() -> None:
    """500 ns from the first mark to the third are two steps where another rank marked the one between."""
    graph = _chain(100, 200, 300, ranks=2)
    graph.step[4] = -1

    assert [250] == _times(graph)


def test_without_steps_the_window_of_each_rank_is_one() -> None:
    """Everything from its first start to its last end."""
    graph = _chain(100, 200, 300)
    graph.step[:] = -1

    assert [600] == _times(graph)


def test_ranks_with_different_steps_are_weighted_by_them() -> None:
    """One rank has three steps, the other two: two intervals of 200 and 300, one of 400."""
    draft = Draft()
    first = [draft.node(NodeKind.KERNEL, 100, rank=rank, lane="stream 7") for rank in (0, 1)]
    second = [
        draft.node(NodeKind.KERNEL, dur, rank=rank, after=[first[rank]], lane="stream 7")
        for rank, dur in ((0, 200), (1, 400))
    ]
    draft.node(NodeKind.KERNEL, 300, rank=0, after=[second[0]], lane="stream 7")
    graph = draft.graph()
    graph.step[:] = [0, 0, 1, 1, 2]
    done = replay(graph)

    assert 300e-9 == pytest.approx(step_time_s(graph, done.start_ns, done.end_ns))


def test_an_empty_graph_takes_no_time() -> None:
    """Nothing to time, no error."""
    graph = Draft().graph()
    none = np.zeros(0, np.int64)

    assert 0.0 == step_window(graph, none, none).mean_ns


@pytest.mark.parametrize("name", ["ddp_w2", "ddp_w4", "ddp_straggler_w4", "fsdp2_w2", "fsdp2_w4"])
def test_the_step_of_a_capture_is_its_mean_profiler_step(samples: Path, name: str) -> None:
    """Within 2 % of the mean ProfilerStep after the first, over all ranks."""
    built = build(load(samples / name))
    measured = built.measured
    marked = [step.end_ns - step.start_ns for trace in built.job.ranks for step in trace.steps[1:]]

    assert float(np.mean(marked)) * 1e-9 == pytest.approx(
        step_time_s(built.graph, measured.start_ns, measured.end_ns), rel=0.02
    )


def test_replay_says_the_step_time_measured_and_replayed(samples: Path) -> None:
    """The JSON answer has both by this definition, and they agree within the replay's error."""
    built = build(load(samples / "ddp_w4"))
    said = replay_job(built).to_json_parts()["step_time_ns"]
    measured = step_window(built.graph, built.measured.start_ns, built.measured.end_ns)

    assert round(measured.mean_ns) == said["measured"] == pytest.approx(said["replayed"], rel=0.01)
