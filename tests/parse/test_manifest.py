"""What a manifest says, which may be damaged or made to harm."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrace.errors import InputError
from scaletrace.parse.manifest import bounds_in, expected_ranks, groups_in


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [({"ranks": {"expected": 2}}, (0, 1)), ({"world_size": [3, 5]}, (3, 5)), ({"ranks": 7}, ()), ({}, ())],
)
def test_expected_ranks_are_a_count_or_a_list(manifest: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Where it says nothing, nothing is expected."""
    assert expected == expected_ranks(manifest)


@pytest.mark.parametrize("value", [10**12, -1, [0, 10**12], [-1]])
def test_ranks_that_no_job_has_are_refused(value: Any) -> None:
    """A number would otherwise cost memory by the rank."""
    with pytest.raises(InputError, match=r"manifest\.json: it expects ranks that no job has"):
        expected_ranks({"ranks": {"expected": value}})


def test_a_group_larger_than_any_job_is_no_group() -> None:
    """Its members are not counted out."""
    groups = [{"name": "0", "start": 0, "stride": 1, "size": size} for size in (10**12, 2)]

    assert [(0, 1)] == [group.members for group in groups_in({"groups": groups})]


def test_a_key_that_is_no_number_names_no_rank() -> None:
    """A digit like ² is none, and 5,000 digits are no rank."""
    probe = {"low_ns": 1, "high_ns": 2}
    manifest = {"clocks": {"²": probe, "9" * 5000: probe, "1": probe}}

    assert [(1, 0, 1, 2)] == [(one.rank, one.to, one.low_ns, one.high_ns) for one in bounds_in(manifest, [0, 1])]
