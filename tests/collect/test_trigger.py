"""A touched file becomes one step number for all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.collect import trigger
from scaletrace.collect.ranks import Place
from scaletrace.collect.trigger import Trigger, round_up


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (1, 10), (10, 10), (999, 1000), (1001, 1100)])
def test_rounding(step: int, expected: int) -> None:
    """Tens below a thousand, hundreds above."""
    assert expected == round_up(step)


def test_all_ranks_get_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first local rank plans; every other reads the plan, once."""
    monkeypatch.setattr(trigger, "POLL_S", 0.0)
    first, second = Trigger(str(tmp_path)), Trigger(str(tmp_path))
    leader, other = (lambda: Place(0, 2, 0, "t")), (lambda: Place(1, 2, 1, "t"))
    quiet = [first.poll(3, leader), second.poll(3, other)]
    (tmp_path / "record").touch()
    unplanned = second.poll(4, other)
    planned = [first.poll(4, leader), second.poll(5, other)]
    again = [first.poll(6, leader), second.poll(6, other)]
    assert ([None, None], None, [None, None]) == (quiet, unplanned, again)
    assert planned[0] == planned[1] is not None
    assert planned[0] >= 10
    assert not (tmp_path / "record").exists()


def test_a_plan_of_an_earlier_run_is_not_ours(tmp_path: Path) -> None:
    """A plan that was there before the job began starts nothing."""
    (tmp_path / "record.at").write_text("10")
    assert Trigger(str(tmp_path)).poll(3, lambda: Place(0, 1, 0, "t")) is None
