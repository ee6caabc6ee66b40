"""The public face of the library."""

from __future__ import annotations

from pathlib import Path

import pytest

import scaletrace
from scaletrace.errors import InputError


def test_all_is_sorted_and_importable() -> None:
    """What `__all__` promises exists."""
    assert sorted(scaletrace.__all__) == list(scaletrace.__all__)
    assert all(hasattr(scaletrace, name) for name in scaletrace.__all__)


def test_trace_answers_what_the_commands_answer(samples: Path) -> None:
    """load, replay, critical_path and extrapolate agree with one another on one job."""
    trace = scaletrace.load(samples / "ddp_w2")
    steps = trace.replay().to_frame()

    assert [4, 5, 6] == steps["step"].tolist()
    assert trace.replay().timeline.makespan_ns == trace.critical_path().length_ns
    assert [8, 32] == [point.gpus for point in trace.extrapolate([8, 32]).points]


def test_unusable_source_is_our_error(tmp_path: Path) -> None:
    """A folder without traces raises InputError, not a bare OSError."""
    with pytest.raises(InputError, match=tmp_path.name):
        scaletrace.load(tmp_path)
