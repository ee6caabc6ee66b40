"""What the profiler cost the recorded steps, from literal facts of a manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from scaletrace.parse.manifest import cpus_in
from scaletrace.parse.profiler_cost import profiler_cost, tell_profiler_cost
from tests.parse.jobs import host, step, write

MS = 1_000_000


def member(rank: int, median_ms: int, recorded_ms: int, spread_ms: int | None = 1, count: int = 40) -> dict[str, Any]:
    """A member of which three boundaries are known, so two recorded steps."""
    before: dict[str, Any] = {"count": count, "mean_ns": median_ms * MS, "median_ns": median_ms * MS}
    if spread_ms is not None:
        before["spread_ns"] = spread_ms * MS
    ends = [10**18 + recorded_ms * MS * number for number in range(3)]
    return {"rank": rank, "trace": f"rank{rank}.json", "unwatched": before, "boundaries_ns": ends}


def job(folder: Path, *members: Any) -> Job:
    """Two ranks with this in their manifest."""
    write(folder, {rank: [step(5, 0, 100), host("aten::mm", 1, 1)] for rank in (0, 1)})
    (folder / "manifest.json").write_text(json.dumps({"schema": "scaletrace.capture/1", "members": members}))
    return load(folder)


def said(folder: Path, *members: Any) -> str:
    cost = profiler_cost(job(folder, *members))
    return cost.sentence() if cost else ""


def test_a_cost_beyond_the_noise_is_told(tmp_path: Path) -> None:
    """325 ms without and 333 ms with the profiler, at a spread of 1 ms, are 2.5 %."""
    expected = (
        "Without the profiler a step took 325 ms (median of 40 steps before the window), recorded 333 ms: the profiler "
        "cost 2.5%."
    )
    assert expected == said(tmp_path, member(0, 325, 333), member(1, 325, 333))


def test_a_difference_below_the_spread_is_noise(tmp_path: Path) -> None:
    """The same 8 ms are noise where steps spread over 9 ms."""
    assert "recorded 333 ms: a difference of +2.5%, within the noise of 9 ms." in said(tmp_path, member(0, 325, 333, 9))


def test_ranks_that_disagree_are_noise(tmp_path: Path) -> None:
    """One rank 20 ms slower and one 10 ms faster say nothing together."""
    assert "within the noise of 30 ms" in said(tmp_path, member(0, 300, 320), member(1, 300, 290))


def test_a_large_cost_is_a_warning(tmp_path: Path) -> None:
    """More than 10 % is marked, and says that projections carry it."""
    cost = profiler_cost(job(tmp_path, member(0, 100, 150)))
    assert cost is not None
    assert (True, False, 0.5) == (cost.large, cost.within_noise, cost.share)
    assert cost.sentence().endswith("the profiler cost 50.0%. Projections carry this: no time is corrected for it.")


def test_faster_recorded_steps_tell_no_cost(tmp_path: Path) -> None:
    """Steps before the window that were slower had something else to do; no negative cost is claimed."""
    assert said(tmp_path, member(0, 200, 100)).endswith(
        "the steps before the window were the slower ones, so what the profiler cost is not known."
    )


def test_one_step_tells_no_noise(tmp_path: Path) -> None:
    """Without a spread the noise is unknown, which is not none."""
    cost = profiler_cost(job(tmp_path, member(0, 100, 105, None, 1)))
    assert cost is not None
    assert (None, None) == (cost.noise_ns, cost.within_noise)
    assert "(1 step before the window), recorded 105 ms: the profiler cost 5.0% (too few steps" in cost.sentence()


@pytest.mark.parametrize(
    "spoiled",
    [
        {"unwatched": None},
        {"unwatched": {"count": 3, "mean_ns": 1, "median_ns": 0}},
        {"unwatched": {"count": 3, "mean_ns": 1, "median_ns": "1"}},
        {"unwatched": {"count": 3, "mean_ns": 1, "median_ns": 10**400}},
        {"boundaries_ns": [5]},
        {"boundaries_ns": [5, 5]},
        {"boundaries_ns": [5, 10**400]},
        {"trace": ""},
        {"rank": 7},
    ],
)
def test_what_does_not_tell_says_nothing(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    """A missing or damaged fact, one recorded step, a rank without a trace or of another job: no cost, not zero."""
    assert profiler_cost(job(tmp_path, {**member(0, 100, 105), **spoiled}, 3)) is None


def test_a_projection_is_told_the_same(tmp_path: Path) -> None:
    """The health report gets the sentence, and nothing from a capture without the fact."""
    health = Health()
    tell_profiler_cost(job(tmp_path / "silent"), health)
    assert health.clean
    found = job(tmp_path / "told", member(0, 325, 333))
    tell_profiler_cost(found, health)
    cost = profiler_cost(found)
    assert cost is not None
    assert [cost.sentence()] == health.notes


def test_a_saved_job_keeps_its_manifest(tmp_path: Path) -> None:
    """What members and hosts tell is the same after saving, which holds lists as tuples."""
    found = job(tmp_path / "traces", member(0, 325, 333))
    found = replace(found, manifest={**found.manifest, "hosts": [{"cpus": 4, "ranks": [0, 1]}]})
    again = load(found.save(tmp_path / "saved"))
    assert profiler_cost(again) is not None
    assert profiler_cost(found) == profiler_cost(again)
    assert {0: 4, 1: 4} == cpus_in(again.manifest)
