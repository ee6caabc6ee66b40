"""`scaletrace replay` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrace.cli.replay import parse_ranks
from scaletrace.errors import UsageError


@pytest.fixture(scope="module")
def answer(run: Callable[..., Any], samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The JSON answer for the straggler sample."""
    folder = tmp_path_factory.mktemp("replay")
    done = run("replay", samples / "ddp_straggler_w4", "-o", folder / "step.pftrace", "--json")

    assert (0, "") == (done.returncode, done.stderr)
    assert (folder / "step.pftrace").stat().st_size > 10_000
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_json_has_the_documented_parts(answer: dict[str, object]) -> None:
    """The answer carries exactly the keys of docs/cli.md in its frame and its quality part."""
    frame = {"schema", "scaletrace_version", "input", "health"}
    parts = {
        "steps",
        "mean_abs_error",
        "step_time_ns",
        "quality",
        "breakdown",
        "collectives",
        "stragglers",
        "critical_path",
        "profiler_cost",
    }

    assert frame | parts == set(answer)
    assert "scaletrace.replay/1" == answer["schema"]


def test_breakdown_adds_up_to_wall_time(answer: dict[str, object]) -> None:
    """The parts of every rank's time sum to its wall time in integer nanoseconds; overlapped time is inside compute."""
    breakdown = answer["breakdown"]
    assert isinstance(breakdown, dict)
    kinds = ("compute_ns", "exposed_comm_ns", "memory_ns", "host_ns", "stall_ns", "idle_ns")
    sums = {rank: sum(part[kind] for kind in kinds) + part["overlapped_comm_ns"] for rank, part in breakdown.items()}

    assert {rank: part["wall_ns"] for rank, part in breakdown.items()} == sums


def test_the_slowed_rank_is_named(answer: dict[str, object]) -> None:
    """Rank 3 sleeps 50 ms a step in this sample; it must come first among the stragglers."""
    stragglers = answer["stragglers"]
    assert isinstance(stragglers, list)

    assert 3 == stragglers[0]["rank"]


@pytest.mark.parametrize(("text", "ranks"), [("0,3", [0, 3]), ("8-11", [8, 9, 10, 11]), ("0, 2-3", [0, 2, 3])])
def test_rank_lists(text: str, ranks: list[int]) -> None:
    """Ranks are numbers and inclusive ranges."""
    assert ranks == parse_ranks(text)


def test_rank_list_that_is_none() -> None:
    """Anything else is refused as wrong usage."""
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks("a-b")
