"""The public cases about ranks, jobs, groups, collectives, clocks and steps, with the answers of expected.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.job import KINDS, Job
from scaletrace.parse.load import load
from scaletrace.parse.stragglers import straggler_summary
from scaletrace.parse.waits import instances_of


@pytest.fixture(scope="module")
def expected(shared_data: Path) -> dict[str, Any]:
    """What each case must give."""
    answers: dict[str, Any] = json.loads((shared_data / "cases" / "expected.json").read_text())
    return answers


def case(shared_data: Path, number: str) -> Job:
    """The job of one case."""
    return load(shared_data / "cases" / number)


def ranks(job: Job) -> list[int]:
    """Rank numbers of a job."""
    return [trace.rank for trace in job.ranks]


def test_14_a_file_without_a_rank_is_rank_0_of_1_and_says_so(shared_data: Path, expected: dict[str, Any]) -> None:
    """The default is used for a lone file without a rank, and the rule is stated."""
    job = case(shared_data, "14")

    assert (expected["14"]["rank"], expected["14"]["world_size"]) == (job.ranks[0].rank, job.world_size)
    assert "default, no rank in the file" == job.ranks[0].rank_rule
    assert job.health.guessed["ranks not stated in the header"] == 1


def test_15_on_demand_files_take_the_rank_of_their_collectives(shared_data: Path, expected: dict[str, Any]) -> None:
    """Files named by host and process id get their rank from a collective without a root; two of four are missing."""
    job = case(shared_data, "15")

    assert expected["15"]["ranks"] == ranks(job)
    assert expected["15"]["world_size"] == job.world_size
    assert (2, 3) == job.missing_ranks
    assert any("2 of 4 ranks present" in note for note in job.health.notes)


def test_16_other_json_files_are_listed_not_loaded(shared_data: Path, expected: dict[str, Any]) -> None:
    """Execution traces, notes and dumps in the folder are skipped with a reason each."""
    job = case(shared_data, "16")

    assert ["a/rank0.json"] == expected["16"]["loaded"]
    assert ["rank0.json"] == [Path(trace.source).name for trace in job.ranks]
    assert expected["16"]["skipped"] == job.health.dropped["files that are no Kineto traces"]
    assert expected["16"]["skipped"] == sum("skipped, " in note for note in job.health.notes)


def test_17_the_number_that_stands_alone_is_the_rank(
    shared_data: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """The last number counts, the host's does not; two numbers that qualify are refused with the remedy."""
    assert expected["17"]["ranks"] == ranks(case(shared_data, "17"))

    for path in (shared_data / "cases" / "17").iterdir():
        number = path.stem.rsplit("_", 1)[-1]
        shutil.copy(path, tmp_path / f"job_{number}_{int(number) + 7}.json")
    with pytest.raises(UsageError, match="--rank-regex"):
        load(tmp_path)
    assert [5, 40] == ranks(load(tmp_path, rank_regex=r"job_(\d+)_"))


def test_19_the_newest_complete_capture_is_loaded(shared_data: Path, expected: dict[str, Any]) -> None:
    """Nested captures stay apart, and another one can be asked for by its last folder."""
    job = case(shared_data, "19")

    assert expected["19"]["captures"] == {name.rsplit("/", 1)[-1]: list(r) for name, r in job.captures.items()}
    assert "profiling/traces/iteration_20" == job.capture
    assert "profiling/traces/iteration_10" == load(shared_data / "cases" / "19", capture="iteration_10").capture
    with pytest.raises(UsageError, match="iteration_20"):
        load(shared_data / "cases" / "19", capture="iteration_30")


def test_20_ids_of_two_ranks_never_mix(shared_data: Path) -> None:
    """Equal pids and correlations in two ranks stay in two tables."""
    job = case(shared_data, "20")

    assert [[11, 11], [11, 11]] == [sorted(t.events.correlation[t.events.correlation >= 0].tolist()) for t in job.ranks]
    assert [1, 1] == [int(np.sum(trace.events.in_cats("kernel"))) for trace in job.ranks]


def test_27_bases_of_two_quarters_give_one_time(shared_data: Path, expected: dict[str, Any]) -> None:
    """The base may stand behind the events and differ between ranks."""
    job = case(shared_data, "27")

    assert {expected["27"]["first_event_ns"]} == {int(trace.events.ts_ns.min()) for trace in job.ranks}


def test_28_the_interval_holds_the_true_offset(shared_data: Path, expected: dict[str, Any]) -> None:
    """Three matched all-reduces bound the offset of rank 1 as tightly as they can, up to what a clock may drift."""
    clock = case(shared_data, "28").clocks[1]
    low, high = (round(us * 1000) for us in expected["28"]["offset_of_rank1_us_interval"])

    assert clock.low_ns <= expected["28"]["truth"] * 1000 <= clock.high_ns
    assert abs(clock.low_ns - low) <= 3_000
    assert abs(clock.high_ns - high) <= 3_000


def test_29_ranks_without_a_common_collective_stay_unaligned(shared_data: Path) -> None:
    """Nothing ties the clocks, so no wait is claimed."""
    job = case(shared_data, "29")

    assert "unaligned" == job.clocks[1].source
    assert [0, 0] == [share.delay_ns for share in straggler_summary(job)]


def test_46_group_and_sequence_match_not_external_ids(shared_data: Path, expected: dict[str, Any]) -> None:
    """One all-gather on two ranks with other External ids; the wait is that of the earlier rank."""
    c = case(shared_data, "46").collectives

    assert (expected["46"]["matched"], "seq") == (len(np.unique(c.instance[c.matched])), c.rung)
    assert list(expected["46"]["wait_us"].values()) == (c.wait_ns / 1000).tolist()
    assert [expected["46"]["transfer_us"]] * 2 == (c.transfer_ns / 1000).tolist()


def test_54_names_of_all_generations_are_communication(shared_data: Path, expected: dict[str, Any]) -> None:
    """Three spellings of NCCL kernels give three collectives of the right kind."""
    c = case(shared_data, "54").collectives

    assert ["all_reduce", "all_reduce", "all_gather"] == [KINDS[k] for k in c.kind]
    assert expected["54"]["comm_us"] == int((c.end_ns - c.start_ns).sum()) / 1000


def test_55_the_record_beats_the_kernel_name(shared_data: Path, expected: dict[str, Any]) -> None:
    """A generic and a SendRecv kernel are what their records say."""
    c = case(shared_data, "55").collectives

    assert [kind.replace("allreduce", "all_reduce") for kind in expected["55"]["kinds"]] == [KINDS[k] for k in c.kind]


def test_56_a_coalesced_kernel_carries_the_sum_of_its_records(shared_data: Path, expected: dict[str, Any]) -> None:
    """Two all-gathers launched as one move the bytes of both."""
    c = case(shared_data, "56").collectives

    assert [expected["56"]["kernel_bytes_out"]] == c.bytes_out.tolist()
    assert ["all_gather"] == [KINDS[k] for k in c.kind]
    assert [5] == c.seq.tolist()


def test_58_the_group_may_stand_on_the_host_record_only(shared_data: Path, expected: dict[str, Any]) -> None:
    """The kernel takes its group from its record."""
    job = case(shared_data, "58")

    assert [expected["58"]["kernel_group"]] == [job.groups[g].name for g in job.collectives.group]


@pytest.mark.parametrize("name", ["rank0.json", "old.json"])
def test_59_cut_lists_of_ranks_are_completed(shared_data: Path, name: str) -> None:
    """A list of thirty members and dots stands for 128, with and without the last one."""
    job = load(shared_data / "cases" / "59" / name)

    assert [tuple(range(128))] == [group.members for group in job.groups]


def test_60_without_seq_order_decides_and_the_doubt_is_stated(shared_data: Path, expected: dict[str, Any]) -> None:
    """Two of three all-reduces match; the third has no partner."""
    job = case(shared_data, "60")
    c = job.collectives

    assert expected["60"]["matched"] == len(np.unique(c.instance[c.matched]))
    assert [0] == c.rank[~c.matched].tolist()
    assert "order" == c.rung
    assert job.health.guessed["alignments for which a second shift was as good"] == 1


def test_61_a_broadcast_keeps_its_root(shared_data: Path, expected: dict[str, Any]) -> None:
    """The broadcast is counted once, with kind and payload."""
    c = case(shared_data, "61").collectives

    assert expected["61"]["collectives"] == [KINDS[k] for k in c.kind]
    assert [512] == c.bytes_in.tolist()


def test_64_most_of_a_collective_is_waiting(shared_data: Path, expected: dict[str, Any]) -> None:
    """Wait and transfer of both ranks, the late one, and the bandwidth of the transfer alone."""
    job = case(shared_data, "64")
    c, each = job.collectives, instances_of(job)

    assert [expected["64"]["rank0"]["wait_us"], expected["64"]["rank1"]["wait_us"]] == (c.wait_ns / 1000).tolist()
    assert [expected["64"]["rank0"]["transfer_us"]] * 2 == (c.transfer_ns / 1000).tolist()
    assert [expected["64"]["late_rank"]] == each.late_rank.tolist()
    assert [expected["64"]["algbw_GBps"]] == (each.algbw_Bps / 1e9).tolist()
    assert (1, "computes longer") == (straggler_summary(job)[0].rank, straggler_summary(job)[0].cause)


def test_67_gloo_reduce_scatter_is_no_all_reduce(shared_data: Path, expected: dict[str, Any]) -> None:
    """Kind and bytes come from the c10d op though gloo ran an all-reduce."""
    c = case(shared_data, "67").collectives

    assert [expected["67"]["kind"]] == [KINDS[k] for k in c.kind]
    assert [(expected["67"]["bytes_in"], expected["67"]["bytes_out"])] == list(
        zip(c.bytes_in.tolist(), c.bytes_out.tolist(), strict=True)
    )


def test_77_an_empty_last_step_is_dropped(shared_data: Path, expected: dict[str, Any]) -> None:
    """What stop() leaves behind is no step, and the note says how long it was."""
    job = case(shared_data, "77")

    assert expected["77"]["steps_used"] == [step.number for step in job.ranks[0].steps]
    assert any("ProfilerStep#4: 25.6 us, no work" in note for note in job.health.notes)


def test_09_a_cut_file_is_flagged_and_its_last_step_is_incomplete(shared_data: Path) -> None:
    """A step that ends after the last readable event is not complete."""
    job = load(shared_data / "cases" / "09" / "rank0.json")

    assert any("truncated" in note for note in job.health.notes)
    assert [False] == [step.complete for step in job.ranks[0].steps[-1:]]


def test_a_folder_without_traces_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The error names the folder and how to get a trace."""
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(InputError, match="no Kineto trace"):
        load(tmp_path)
