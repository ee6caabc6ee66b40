"""What a step is made of, what communication costs of it, and its largest part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaletrace.extrapolate.parts import parts_of
from scaletrace.extrapolate.steps import Shares

FOUND = Shares(0.5, 0.3, {"dp": 0.05, "fsdp": 0.25}, slowed=0.08, hidden_by_axis={"dp": 0.3, "fsdp": 0.1})


def test_parts_add_up_and_slowed_kernels_are_on_the_side_of_communication() -> None:
    """Of half a step of compute 8 % are lost beside collectives: with 30 % exposed communication costs 38 %; a tenth of
    the whole is lost to stragglers."""
    found = parts_of(FOUND, 0.9)
    expected = {"compute": 0.378, "slowed_compute": 0.072, "exposed_comm": 0.27, "host": 0.18, "stragglers": 0.1}

    assert expected == pytest.approx(found.to_json())
    assert 1.0 == pytest.approx(sum(found.to_json().values()))
    assert 0.38 * 0.9 == pytest.approx(found.communication)


def test_an_axis_answers_for_the_kernels_beside_it_by_how_long_it_is_hidden() -> None:
    """Three quarters of what is hidden are dp's, so 6 of 8 % slowed are; fsdp keeps its 25 % exposed and gets 2."""
    assert {"dp": 0.11, "fsdp": 0.27} == pytest.approx(dict(parts_of(FOUND, 1.0).by_axis))


def test_the_largest_part_counts_slowed_kernels_with_their_axis() -> None:
    """Compute takes 42 % alone; one axis that is exposed for 30 % and costs kernels 8 % is smaller, with 20 % it is larger."""
    one = Shares(0.5, 0.3, {"dp": 0.3}, slowed=0.08, hidden_by_axis={"dp": 0.4})

    assert "compute" == parts_of(one, 1.0).dominant
    assert "dp communication" == parts_of(replace(one, slowed=0.2), 1.0).dominant


@pytest.mark.parametrize(("host", "expected"), [(0.9, "host"), (0.4, "compute")])
def test_the_host_is_the_largest_part_where_most_of_the_critical_path_is_its_work(host: float, expected: str) -> None:
    """However busy the device is beside it: 42 % of the step compute and 20 % neither."""
    assert expected == parts_of(FOUND, 1.0, {"host": host, "compute": 1 - host}).dominant
