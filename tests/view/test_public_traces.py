"""Real GPU jobs and gloo jobs, drawn and read back by Perfetto's trace processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.view.perfetto import write_timeline
from tests.view.conftest import Ask

JOBS = (
    "gloo/ddp_straggler_w4",
    "gloo/fsdp2_w2",
    "gloo/pp_1f1b_w4",
    "traces/nanogpt8_h100",
    "traces/dlrm8_v100",
    "traces/torchrec2_v100",
    "traces/lightllm8_h200-logs-run1",
    "traces/megatron_tp2_v100",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_real_job_is_read_back_as_it_was_written(
    shared_data: Path, tmp_path: Path, oracle: Callable[[Path], Ask], name: str
) -> None:
    """No import error, no lost slice or arrow, the path as long as the run, at most 80 bytes a slice."""
    if not (shared_data / name).is_dir():
        pytest.skip(f"{name} is not among the public traces here")
    built = build(load(shared_data / name))
    timeline = replay(built.graph)
    report = write_timeline(
        tmp_path / "t.pftrace", timeline, measured=built.measured, critical_path=critical_path(timeline)
    )
    ask = oracle(report.path)

    expected = (report.slices, report.flows, report.processes, report.counter_steps)
    assert expected == tuple(
        ask(f"select count(*) from {what}")[0][0] for what in ("slice", "flow", "process where pid > 0", "counter")
    )
    path = "slice s join track t on s.track_id = t.id where t.name = 'Critical path'"
    assert ask(f"select sum(s.dur) from {path}") == [(timeline.makespan_ns,)]
    assert ask("select count(*) from slice where dur < 0") == [(0,)]
    assert report.size_bytes / report.slices <= 80
