"""What a window holds beyond its marked steps counts by the steps that it holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from scaletrace.parse.load import load
from scaletrace.parse.stragglers import steps_held
from scaletrace.replay.result import replay_job


def unmarked(source: Path, target: Path, lost: tuple[str, ...], only: str = "") -> Path:
    """A copy of a capture without the marks of some steps, on all ranks or in one file only."""
    target.mkdir()
    for path in source.glob("rank*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        if only in path.name:
            trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("name") not in lost]
        (target / path.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    return target


def test_lost_marks_change_no_wait_a_step(samples: Path, tmp_path: Path) -> None:
    """With one mark of three left the others still wait as long a step for the slow rank, and it costs as much."""
    source = samples / "ddp_straggler_w4"
    names = {f"ProfilerStep#{step.number}" for step in load(source).ranks[0].steps}
    kept, lost = load(source), load(unmarked(source, tmp_path / "one", tuple(sorted(names)[1:])))
    assert (3, 1, 3) == (len(kept.ranks[0].steps), len(lost.ranks[0].steps), steps_held(lost))
    whole, part = (replay_job(job).to_json_parts()["stragglers"][0] for job in (kept, lost))

    assert whole["rank"] == part["rank"]
    assert abs(whole["each_waited_ns"] - part["each_waited_ns"]) <= 0.01 * whole["each_waited_ns"]
    assert abs(whole["each_shorter_ns"] - part["each_shorter_ns"]) <= 0.01 * whole["each_shorter_ns"]


def test_a_mark_that_one_rank_lost_is_told_beside_the_step_time(samples: Path, tmp_path: Path) -> None:
    """The rank and the step are named once, and the step time stays what it was."""
    source = samples / "ddp_straggler_w4"
    number = load(source).ranks[0].steps[1].number
    whole = replay_job(load(source))
    part = replay_job(load(unmarked(source, tmp_path / "one", (f"ProfilerStep#{number}",), "rank2")))
    said = [note for note in part.health.notes if "has no mark" in note]

    assert [
        (
            f"rank 2 has no mark for step {number} of other ranks: the step time is the mean of the steps that each rank "
            "marked, with those between them"
        )
    ] == said
    assert (1, 0) == tuple(r.health.unmatched["marks of steps that other ranks have"] for r in (part, whole))
    before, after = (r.step_time_ns()["measured"] for r in (whole, part))
    assert abs(before - after) <= 0.02 * before
