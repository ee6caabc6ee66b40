"""Where a curve bends: on a fixed grid, with the range that the size lies in."""

from __future__ import annotations

import pytest

from scaletrace.extrapolate.bends import LARGEST, Bend, Level, dominates, grid, knee, rising
from scaletrace.extrapolate.cluster import Cluster


def _levels(*steps: float) -> list[Level]:
    return [Level(64 << k, step, 0.0) for k, step in enumerate(steps)]


def test_the_grid_doubles_from_the_base_to_the_largest() -> None:
    """From 2 to 131,072 whatever was asked for, and beyond it where more was asked for."""
    assert [2, 4, 8] == grid(2, 8)[:3] and LARGEST == grid(2, 8)[-1]
    assert grid(2, 100) == grid(2, 100_000)
    assert LARGEST * 2 == grid(2, LARGEST + 1)[-1]
    assert [200_000] == grid(200_000, 8)
    assert 196_608 == grid(3, 8)[-1]


def test_the_knee_is_where_doubling_stops_paying() -> None:
    """At 64 a doubling still gives 1 / 1.2 of double, at 128 only 1 / 1.5: the knee lies above 64 and up to 128."""
    assert Bend(128, 64, 128) == knee(_levels(1.0, 1.2, 1.8), 0.8, True)
    assert Bend() == knee(_levels(1.0, 1.0, 1.0), 0.8, True)


def test_a_knee_at_the_smallest_size_says_so() -> None:
    """Where the first doubling does not pay the range is that one size."""
    assert Bend(64, 64, 64) == knee(_levels(1.0, 2.0, 4.0), 0.8, True)


def test_sizes_that_do_not_fit_hide_no_knee() -> None:
    """From 64 to 256 is no doubling, so nothing is said of it; the next doubling counts."""
    levels = [Level(64, 1.0, 0.0), Level(256, 3.0, 0.0), Level(512, 4.5, 0.0)]

    assert Bend(256, 64, 256) == knee(levels, 0.8, True)


def test_under_strong_scaling_a_doubling_should_halve_the_step() -> None:
    """1 to 0.55 gives 0.91 of double; 0.55 to 0.4 only 0.69."""
    assert Bend(128, 64, 128) == knee(_levels(1.0, 0.55, 0.4), 0.8, False)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.3, 0.7), Bend(91, 64, 128)), ((0.3, 0.4), Bend()), ((0.6, 0.7), Bend(64, 64, 64)), ((), Bend())],
)
def test_communication_dominates_between_sizes(shares: tuple[float, ...], expected: Bend) -> None:
    """Exposed 30 % at 64 and 70 % at 128: half of the step at their geometric mean, and the range is both."""
    assert expected == dominates([Level(64 << k, 1.0, share) for k, share in enumerate(shares)])


def test_levels_that_fall_are_lifted() -> None:
    """Under weak scaling a step never gets shorter, but where a node that was partly filled is filled."""
    assert [1.0, 1.2, 1.2] == [level.step_s for level in rising(_levels(1.0, 1.2, 1.1), Cluster.load("dgx_h100"))]
    partly = [Level(gpus, step, 0.0) for gpus, step in ((8, 1.0), (12, 1.5), (24, 1.1), (48, 1.0))]
    assert [1.0, 1.5, 1.1, 1.1] == [level.step_s for level in rising(partly, Cluster.load("dgx_h100"))]
    assert expected_range() == knee(_levels(1.0, 1.2, 1.8), 0.8, True).range


def expected_range() -> list[int]:
    """Of the bend above."""
    return [64, 128]
