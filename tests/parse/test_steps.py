"""Steps of one rank: from ProfilerStep ranges or another annotation, without empty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.parse.load import load
from tests.parse.jobs import Event, host, kernel, launch, loaded, step, write


def numbers(folder: Path, events: list[Event], annotation: str | None = None) -> list[tuple[int, bool]]:
    """(number, complete) of the steps of these events."""
    job = load(write(folder, {0: events}), step_annotation=annotation)
    return [(one.number, one.complete) for one in job.ranks[0].steps]


def test_steps_are_numbered_as_the_profiler_did(tmp_path: Path) -> None:
    """Numbers come from the names, order from the starts, whatever the order in the file."""
    events = [step(8, 200, 90), host("aten::mm", 210, 5), step(7, 100, 90), host("aten::mm", 110, 5)]

    assert [(7, True), (8, True)] == numbers(tmp_path, events)


def test_an_empty_step_goes_only_where_others_are_full(tmp_path: Path) -> None:
    """A trace of annotations alone keeps its steps."""
    assert [(7, True), (8, True)] == numbers(tmp_path / "a", [step(7, 100, 90), step(8, 200, 90)])
    assert [(7, True)] == numbers(tmp_path / "b", [step(7, 100, 90), host("aten::mm", 110, 5), step(8, 200, 25)])


def test_a_step_that_never_finished_is_incomplete(tmp_path: Path) -> None:
    """Kineto marks what was open when it stopped."""
    open_ = {**step(8, 200, 90), "args": {"finished": False}}
    events = [step(7, 100, 90), host("aten::mm", 110, 5), open_, host("aten::mm", 210, 5)]

    assert [(7, True), (8, False)] == numbers(tmp_path, events)


def test_another_annotation_can_mark_steps(tmp_path: Path) -> None:
    """Numbers come from its group, or count from 0 without one; the step on the device is not used."""
    events = [
        host("train 4", 100, 90, cat="user_annotation"),
        host("aten::mm", 110, 5),
        host("train 5", 200, 90, cat="user_annotation"),
        host("aten::mm", 210, 5),
        {**kernel("train 5", 260, 90), "cat": "gpu_user_annotation"},
    ]

    assert [] == numbers(tmp_path / "a", events)
    assert [(4, True), (5, True)] == numbers(tmp_path / "b", events, r"train (\d+)")
    assert [(0, True), (1, True)] == numbers(tmp_path / "c", events, r"train \d+")


def test_without_steps_the_window_counts_and_says_so(tmp_path: Path) -> None:
    """No ProfilerStep is no error."""
    job = loaded(tmp_path, {0: [host("aten::mm", 110, 5)]})

    assert () == job.ranks[0].steps
    assert any("no ProfilerStep" in note for note in job.health.notes)


def test_a_step_whose_kernels_were_dropped_is_left_out(tmp_path: Path) -> None:
    """Ten launches of step 0 have no kernel while those of step 1 have theirs: step 0 is not a fast step."""
    events: list[Event] = []
    for k in range(2):
        events += [step(k, 1_000 * k, 900), host("aten::mm", 1_000 * k + 1, 800)]
        for i in range(10):
            events.append({**launch(1_000 * k + 10 * i + 5, 10 * k + i + 1), "name": "cudaLaunchKernel"})
            if k == 1:
                events.append(kernel("gemm", 1_000 * k + 10 * i + 9, 5, 10 * k + i + 1, 7))
    job = loaded(tmp_path, {0: events})

    assert [(0, False), (1, True)] == [(one.number, one.complete) for one in job.ranks[0].steps]
    assert job.health.dropped["steps whose kernels were not recorded"] == 1


@pytest.mark.parametrize("gone", ["compute", "communication"])
def test_a_rank_that_lost_its_kernels_is_named(tmp_path: Path, gone: str) -> None:
    """Missing is not zero: the rank without compute or communication kernels stands in the notes."""
    ranks = {}
    for r in range(3):
        both = [kernel("gemm", 10, 5, stream=7), kernel("ncclDevKernel_AllReduce", 20, 5)]
        ranks[r] = both if r else [both[gone == "compute"]]
    job = loaded(tmp_path, ranks)

    assert any(f"ranks [0] have no {gone} kernels" in note for note in job.health.notes)


def test_ranks_with_other_steps_are_told(tmp_path: Path) -> None:
    """Steps that only some ranks recorded are counted."""
    work = [host("aten::mm", 110, 5), host("aten::mm", 210, 5)]
    ranks = {0: [step(1, 100, 90), step(2, 200, 90), *work], 1: [step(2, 200, 90), work[1]]}
    job = loaded(tmp_path, ranks)

    assert job.health.unmatched["steps that not every rank recorded"] == 1
    assert any("all have [2] in common" in note for note in job.health.notes)


def test_a_step_that_is_marked_twice_counts_once(tmp_path: Path) -> None:
    """Equal marks, or several of one number that overlap, are one step, and that is counted."""
    twice = [step(7, 100, 90), step(7, 100, 90), step(7, 110, 70), host("aten::mm", 120, 5)]
    job = load(write(tmp_path, {0: twice}))

    assert [(7, 90_000)] == [(one.number, one.end_ns - one.start_ns) for one in job.ranks[0].steps]
    assert 2 == job.health.repaired["steps that were marked more than once"]


def test_a_file_without_events_is_a_missing_rank(tmp_path: Path) -> None:
    """Its rank takes part in no collective, so the others are matched without it; a job of empty files stays."""
    full = [step(7, 100, 90), host("aten::mm", 110, 5)]
    job = load(write(tmp_path / "a", {0: full, 1: [], 2: full}))

    assert [0, 2] == [trace.rank for trace in job.ranks]
    assert 1 == job.health.dropped["files without events"]
    assert any("its rank is missing" in note for note in job.health.notes)
