"""The graph of ranks whose clocks run at different rates stands on one clock over the whole window."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import NodeKind
from scaletrace.replay.accuracy import step_errors, without_stalls
from scaletrace.replay.engine import replay
from tests.parse.jobs import Event, host, kernel, launch, loaded, nccl, step

DRIFT = 1e-4
SHIFT_US = 3000.0


def _rank(slow: bool) -> list[Event]:
    """Forty all-reduces in two seconds; the clock of the slow rank is 3 ms off and gains 100 us every second."""
    events: list[Event] = [step(1, 0, 1_000_000), step(2, 1_000_000, 1_000_000)]
    for turn in range(40):
        at = 50_000.0 * turn
        events += [host("aten::mm", at + 1, 20), launch(at + 2, 100 + turn)]
        events += [kernel("gemm", at + 10, 40_000 if slow else 30_000, 100 + turn, 7)]
        events += nccl("AllReduce", at + 30, at + (40_012 if slow else 30_012), at + 45_000, 200 + turn, Seq=turn)
    if slow:
        for event in events:
            ts, end = event["ts"], event["ts"] + event["dur"]
            event["ts"] = ts * (1 + DRIFT) + SHIFT_US
            event["dur"] = end * (1 + DRIFT) + SHIFT_US - event["ts"]
    return sorted(events, key=lambda event: event["ts"])


def _built(folder: Path) -> Built:
    return build(loaded(folder, {0: _rank(False), 1: _rank(True)}))


def test_members_end_together_at_both_ends_of_the_window(tmp_path: Path) -> None:
    """200 us of drift over the window are gone everywhere, not only in its middle."""
    built = _built(tmp_path / "job")
    ends = [built.measured.end_ns[built.graph.nodes(NodeKind.TRANSFER) & (built.graph.rank == rank)] for rank in (0, 1)]

    assert abs(built.job.clocks[1].drift_ppm) > 50
    assert int(np.abs(ends[0] - ends[1]).max()) <= 2_000


def test_durations_are_on_the_clock_of_the_job(tmp_path: Path) -> None:
    """A kernel of 40 ms reads 4 us longer on the fast clock; in the graph it is as long as it was."""
    graph = _built(tmp_path / "job").graph
    gemm = graph.nodes(NodeKind.KERNEL) & (graph.rank == 1)

    assert int(np.abs(graph.dur_ns[gemm] - 40_000_000).max()) <= 500


def test_replay_of_drifting_ranks_is_strict(tmp_path: Path) -> None:
    """Both steps come back within 0.02 % without a stall."""
    built = _built(tmp_path / "job")
    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))

    assert max(abs(e.error) for e in errors) < 2e-4
