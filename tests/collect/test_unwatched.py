"""How long steps took that no profiler watched: from literal times of boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.collect import session
from scaletrace.collect.guards import ProfilerWatch
from scaletrace.collect.session import Recorder
from scaletrace.collect.settings import Settings
from scaletrace.collect.unwatched import KEPT, Boundaries, Watched, summary


def boundaries(*at_ns: int) -> Boundaries:
    """Boundaries 1, 2, … at these times."""
    made = Boundaries()
    for number, time_ns in enumerate(at_ns, 1):
        made.at_ns[number % KEPT] = time_ns
    return made


def test_the_first_step_does_not_count() -> None:
    """Of three boundaries, two steps are known: nobody saw step 0 begin."""
    assert [20, 30] == boundaries(1000, 1020, 1050).steps_ns(3, [])


def test_without_two_boundaries_nothing_is_known() -> None:
    """Neither no boundary nor a single one makes a step, and no steps make no fact."""
    assert ([], []) == (boundaries().steps_ns(0, []), boundaries(1000).steps_ns(1, []))
    assert summary([]) is None


def test_only_the_last_boundaries_are_kept() -> None:
    """Of 100 steps that get longer by 1 ns, the last 63 are known."""
    times = [sum(range(number)) for number in range(1, 101)]
    assert list(range(37, 100)) == boundaries(*times).steps_ns(100, [])


def test_steps_under_another_profiler_are_left_out() -> None:
    """A profiler that begins in the second step and ends in the third takes both out; touching ends take nothing."""
    made = boundaries(0, 10, 20, 30, 40)
    assert [10, 10] == made.steps_ns(5, [(15, 25)])
    assert [10, 10, 10] == made.steps_ns(5, [(10, 20)])


def test_steps_before_a_new_start_are_left_out() -> None:
    """After a window at boundary 2, the step that begins at boundary 3 is the first that counts."""
    made = boundaries(0, 10, 99, 130, 160)
    made.start_over(3)
    assert [31, 30] == made.steps_ns(5, [])


def test_summary_has_count_mean_median_and_spread() -> None:
    """Literal steps, one of them slow; a single step has no spread."""
    expected = {"count": 5, "mean_ns": 130, "median_ns": 110, "spread_ns": 10}
    assert expected == summary([100, 110, 110, 210, 120])
    assert {"count": 1, "mean_ns": 7, "median_ns": 7} == summary([7])


def test_spans_of_other_profilers() -> None:
    """Preparing and starting is one beginning, one that is still on has no end, and an end alone reaches back to 0."""
    watched = Watched()
    watched.end(5)
    watched.begin(10)
    watched.begin(12)
    watched.end(20)
    watched.begin(30)
    assert [(0, 5), (10, 20), (30, 1 << 62)] == watched.spans()


def test_forgotten_spans_reach_back_to_the_start() -> None:
    """Of more spans than are kept, the oldest become one from the beginning, so that no watched step passes for another."""
    watched = Watched()
    for number in range(KEPT + 1):
        watched.begin(10 * number)
        watched.end(10 * number + 5)
    expected = [(0, 15), (20, 25)]
    assert (KEPT, expected) == (len(watched.spans()), watched.spans()[:2])


def recorder(folder: Path, monkeypatch: pytest.MonkeyPatch, at_ns: list[int], **options: int) -> Recorder:
    """A recorder that passed boundaries at these times and saw no profiler."""
    pytest.importorskip("torch")
    monkeypatch.setattr(session, "_now_ns", iter(at_ns).__next__)
    made = Recorder(Settings(folder=str(folder), start_step=10**9, launched=True, **options))
    made.watch = ProfilerWatch()
    return made


def test_the_recorder_keeps_its_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three boundaries of a recorder are two steps."""
    made = recorder(tmp_path, monkeypatch, [1000, 1020, 1050])
    for _ in range(3):
        made.step()
    assert {"count": 2, "mean_ns": 25, "median_ns": 25, "spread_ns": 5} == made.unwatched()


def test_marked_steps_start_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step between an optimizer's boundary and the first marked one is of neither kind, and does not count."""
    made = recorder(tmp_path, monkeypatch, [0, 10, 17, 47, 77])
    for drive in (made.step, made.step, made.mark, made.mark, made.mark):
        drive()
    assert {"count": 2, "mean_ns": 30, "median_ns": 30, "spread_ns": 0} == made.unwatched()


def test_a_fake_world_has_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without a network says nothing of its steps."""
    made = recorder(tmp_path, monkeypatch, [0, 10, 20], fake_world=8)
    for _ in range(3):
        made.step()
    assert made.unwatched() is None


def test_the_watch_tells_ours_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls into a profiler count as another's unless they are ours."""
    watch = ProfilerWatch()
    monkeypatch.setattr("scaletrace.collect.guards.time.perf_counter_ns", iter([10, 20]).__next__)
    begin, end = watch._wrapped(int, begins=True), watch._wrapped(int, begins=False)
    watch.ours = True
    begin()
    end()
    watch.ours = False
    begin()
    end()
    assert [(10, 20)] == watch.watched.spans()
