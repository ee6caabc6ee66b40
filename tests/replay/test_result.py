"""The answers of `replay`: everything docs/cli.md promises, from one call, and the difference of two runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletrace.cli import inspect as cli_inspect
from scaletrace.parse.load import load
from scaletrace.replay.diff import Change, Diff, diff
from scaletrace.replay.result import ReplayResult, replay_job
from scaletrace.replay.stragglers import SHARED
from tests.parse.traces import call, job_of, kernel, op


def _result(folder: Path, late_us: float = 0) -> ReplayResult:
    """Two ranks with one step: a gemm, an all-reduce of 1000 floats that takes 40 us, an add; rank 1 is late."""
    ranks = []
    for late in (0, late_us):
        meta = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
        meta |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1}
        end = 250.5 + late_us
        ranks.append(
            [
                op("ProfilerStep#1", 0, 400 + late_us, cat="user_annotation"),
                call("cudaLaunchKernel", 2, 4, 1),
                kernel("gemm", 8.5, 150 + late, 1),
                op("record_param_comms", 10, 10, **meta),
                call("cudaLaunchKernelExC", 12, 4, 2),
                kernel("ncclDevKernel_AllReduce_Sum_f32", 160 + late, end - 160 - late, 2, 20, **meta),
                op("record_param_comms", 24, 4),
                call("cudaStreamWaitEvent", 25, 1, 3),
                call("cudaLaunchKernel", 30, 4, 4),
                kernel("add", end + 1, 20, 4),
                call("cudaDeviceSynchronize", 40, end + 21 - 30, 5),
            ]
        )
    return replay_job(job_of(folder, *ranks))


def test_json_holds_what_is_promised(tmp_path: Path) -> None:
    """All parts of docs/cli.md, and JSON can carry them."""
    parts = json.loads(json.dumps(_result(tmp_path, 50).to_json_parts(), allow_nan=False))

    assert {"steps", "mean_abs_error", "quality", "breakdown", "collectives", "stragglers", "critical_path"} <= set(
        parts
    )
    assert {"strict_error", "across_steps_error", "unexplained_stall_fraction", "contradicted"} <= set(parts["quality"])
    assert {"compute", "communication", "host", "stall", "gap"} <= set(parts["critical_path"]["share"])
    assert 1.0 == pytest.approx(sum(parts["critical_path"]["share"].values()))
    assert ["0", "1"] == sorted(parts["breakdown"])


def test_step_is_replayed(tmp_path: Path) -> None:
    """The one step comes back within a microsecond or two."""
    (step,) = _result(tmp_path, 50).steps

    assert 1 == step.step
    assert step.measured_ns == pytest.approx(step.replayed_ns, abs=2_000)


def test_collectives_are_summed_by_kind(tmp_path: Path) -> None:
    """One all-reduce of 4000 bytes over two ranks: its wait is the late rank's, its bus bandwidth that of the transfer."""
    (one,) = _result(tmp_path, 50).collectives

    assert ("all_reduce", 2, 4000, 1) == (one.kind, one.group_size, one.bytes, one.count)
    assert 50_000 == pytest.approx(one.wait_ns, abs=1_000)
    assert one.busbw_Bps == pytest.approx(4000 * 2 / (one.transfer_ns / 1e9))


def test_speed_of_a_collective_is_the_one_that_inspect_shows(tmp_path: Path) -> None:
    """One definition: the median over complete instances, not a sum that incomplete ones or waits take part in."""
    result = _result(tmp_path, 50)
    (shown,) = cli_inspect._collectives(result.built.job)["by_kind"]
    (one,) = result.collectives

    assert (shown["busbw_Bps"], shown["bytes"], shown["group_size"]) == (one.busbw_Bps, one.bytes, one.group_size)


def test_late_rank_is_the_first_straggler(tmp_path: Path) -> None:
    """Rank 1's gemm is 50 us longer than rank 0's, and so is the step."""
    first = _result(tmp_path, 50).stragglers[0]

    assert (1, 50_000) == (first.rank, pytest.approx(first.shorter_by_ns, abs=1_000))


def test_segments_of_the_path_sum_to_its_length(tmp_path: Path) -> None:
    """Shown and left out together."""
    path = _result(tmp_path).to_json_parts()["critical_path"]

    assert path["length_ns"] == sum(s["dur_ns"] for s in path["segments"]) + path["segments_left_out_ns"]


def test_frame_has_a_row_a_step(tmp_path: Path) -> None:
    """Measured, replayed and strict, side by side."""
    frame = _result(tmp_path).to_frame()

    assert ["step", "measured_ns", "replayed_ns", "error", "strict_ns", "strict_error"] == list(frame)
    assert [1] == frame["step"].tolist()


def test_difference_is_explained_by_the_path(tmp_path: Path) -> None:
    """The late run differs by the gemm; the lines sum to the difference of the windows, steps are those of `replay`."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    runs = [_result(folders[0]), _result(folders[1], 50)]
    found = diff(*runs)

    assert [found.a_ns, found.b_ns] == [run.step_time_ns()["measured"] for run in runs]
    assert [found.a_window_ns, found.b_window_ns] == [run.path.length_ns for run in runs]
    assert found.window_delta_ns == pytest.approx(sum(c.delta_ns for c in found.path))
    assert ("gemm", "compute") == (found.path[0].what, found.path[0].kind)
    assert {"path", "parts", "operations", "collectives"} == set(found.to_frame()["table"])


def test_a_rank_nobody_waits_for_may_cost_most(shared_data: Path) -> None:
    """Others wait for rank 3, rank 2 ends the window with its own optimizer; without either the other one leads."""
    two, three, *_ = replay_job(load(shared_data / "gloo" / "fsdp2_w4")).stragglers

    assert (2, 0, "", True, 3) == (two.rank, two.each_waited_ns, two.cause, two.ends_last, two.then_rank)
    assert (3, "computes longer", False, 2) == (three.rank, three.cause, three.ends_last, three.then_rank)
    assert two.shorter_by_ns > three.shorter_by_ns > 0
    assert three.each_waited_ns == three.caused_wait_ns > 0


def test_runs_of_one_job_share_their_operations() -> None:
    """The share counts the time of operations that both runs have: 30 of 40 here."""
    found = Diff(
        a_ns=20,
        b_ns=20,
        a_window_ns=20,
        b_window_ns=20,
        path=[],
        parts=[],
        operations=[Change("gemm", "kernel", 10, 20), Change("norm", "kernel", 10, 0)],
        collectives=[],
    )

    assert 0.75 == found.common


def test_a_rank_whose_device_another_process_shares_is_not_called_a_late_host(shared_data: Path) -> None:
    """Two thirds of what the other waits for are stalls of a time-sliced device, which the path shows apart from gaps."""
    found = replay_job(load(shared_data / "traces" / "megatron_tp2_v100"))
    verdict = {one.rank: one.cause for one in found.stragglers}
    share = found.to_json_parts()["critical_path"]["share"]

    assert {0: SHARED, 1: ""} == verdict
    assert 0.2 < share["stall"] < 0.4 and share["gap"] < 0.2
