"""What a window holds beyond its marked steps counts by the steps that it holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from scaletrace.parse.load import load
from scaletrace.parse.stragglers import steps_held
from scaletrace.replay.result import replay_job


def unmarked(source: Path, target: Path, lost: tuple[str, ...]) -> Path:
    """A copy of a capture without the marks of some steps."""
    target.mkdir()
    for path in source.glob("rank*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
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
