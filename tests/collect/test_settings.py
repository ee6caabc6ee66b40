"""What the user asked for survives the way through the environment, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrace.collect.settings import VARIABLE, Settings
from scaletrace.errors import UsageError


def test_settings_survive_the_environment() -> None:
    """What the launcher writes is what a worker reads."""
    expected = Settings(
        folder="/c", start_step=None, on_demand=True, command=("torchrun", "train.py"), flops_per_step=1e15
    )
    assert expected == Settings.from_environment({VARIABLE: expected.to_json()})


def test_no_variable_means_no_recording() -> None:
    """A process outside of a recording has no settings."""
    assert Settings.from_environment({}) is None


def test_unknown_keys_are_left_out() -> None:
    """A worker with an older scaletrace understands a newer launcher."""
    expected = Settings(folder="c")
    assert expected == Settings.from_json('{"folder":"c","later":1}')


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"steps": 0}, "0 steps"),
        ({"start_step": 0}, "start step 0"),
        ({"every": 3, "steps": 3}, "every 3"),
        ({"compression": "lz4"}, "lz4"),
        ({"fake_world": 8, "fake_rank": 8}, "rank 8"),
        ({"fake_world": 8, "start_step": 3}, "step 4"),
        ({"after_s": 1.0}, "length above zero"),
        ({"steps": 10**9}, "100,000"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], part: str) -> None:
    """The message names the offending value."""
    with pytest.raises(UsageError, match=part):
        Settings(folder="c", **options)
