"""The synthesizer: times of programs, and files that the project's own parser, matcher and graph builder read as real."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import step_errors, without_stalls
from scaletrace.replay.engine import replay
from scaletrace.traces.synth import (
    Annotation,
    Collective,
    Fault,
    HostOp,
    Instruction,
    Kernel,
    ProcessGroup,
    Sync,
    SynthJob,
    Wait,
    plan,
    write_capture,
)

GROUPS = (ProcessGroup("0", "default_pg", (0, 1)), ProcessGroup("1", "mesh_dp_shard", (0, 1)))
MS = 1_000_000


def sharded_program(layers: int = 2) -> tuple[Instruction, ...]:
    """Gather, product, product back, scatter; optimizer at the end."""
    forward: list[Instruction] = []
    backward: list[Instruction] = []
    for _ in range(layers):
        forward += [Collective("all_gather", "1", MS, 100, 200), Wait(20), Kernel("gemm_bf16", 2 * MS, "aten::mm")]
        backward += [
            Kernel("gemm_bf16", 4 * MS, "aten::mm"),
            Collective("reduce_scatter", "1", MS, 200, 100, "Float", stream=24),
        ]
    end: list[Instruction] = [Wait(24), Kernel("multi_tensor_apply_kernel<Adam>", MS, "aten::_fused_adamw_"), Sync()]
    return (Annotation("Forward", tuple(forward)), HostOp("aten::view"), *backward, *end)


def sharded_job(steps: int = 2, world: int = 2) -> SynthJob:
    """Two ranks that do the same."""
    return SynthJob(world, GROUPS, {rank: sharded_program() for rank in range(world)}, steps=steps)


def test_a_collective_ends_for_all_after_the_last_has_started() -> None:
    """A slow rank arrives late; both ranks leave together, the transfer later."""
    timing = plan(sharded_job(1), [Fault("slow", 1, 2.0)])
    scatters = [
        next(call for call in timing.plans[rank].calls if getattr(call.what, "kind", "") == "reduce_scatter")
        for rank in (0, 1)
    ]

    starts = [timing.start_ns[call.device] for call in scatters]
    ends = [timing.end_ns[call.end] for call in scatters]

    # The second gather joined them again, so only the second product and the backward one are behind.
    assert starts[1] - starts[0] == 2 * MS + 4 * MS
    assert ends[0] == ends[1] == starts[1] + MS


def test_the_host_runs_ahead_and_a_sync_waits_for_every_stream() -> None:
    """Calls of the host pass in microseconds; the step ends with the device."""
    timing = plan(sharded_job(1))
    calls = timing.plans[0].calls

    assert timing.end_ns[calls[-2].host] < MS
    assert timing.end_ns[calls[-1].end] == timing.makespan_ns
    assert timing.makespan_ns == pytest.approx(2 * (MS + 2 * MS) + 2 * 4 * MS + MS + MS, rel=0.02)


def test_ranks_that_call_collectives_in_another_order_are_refused() -> None:
    """Two ranks on one stream in opposite order would wait for ever."""
    one = Collective("all_reduce", "0", MS, 1, 1)
    other = Collective("all_reduce", "1", MS, 1, 1)
    job = SynthJob(2, GROUPS, {0: (one, other), 1: (other, one)}, steps=1)

    with pytest.raises(UsageError, match="call their collectives in another order"):
        plan(job)


def test_the_parser_reads_what_was_written_without_a_complaint(tmp_path: Path) -> None:
    """World, groups with axes, sequence numbers, payloads and steps come back; health is clean."""
    write_capture(sharded_job(), tmp_path)
    job = load(tmp_path, workers=1)

    assert 2 == job.world_size
    assert [("0", "world"), ("1", "fsdp")] == [(group.name, group.axis) for group in job.groups]
    assert job.health.clean
    assert "seq" == job.collectives.rung
    assert 16 == len(job.collectives)
    assert job.collectives.matched.all()
    assert {MS} == set(job.collectives.transfer_ns.tolist())
    assert {200, 400, 800} == set(job.collectives.bytes_in.tolist()) | set(job.collectives.bytes_out.tolist())
    assert [0, 1] == [step.number for step in job.rank(0).steps]


def test_the_graph_of_a_synthetic_trace_replays_it(tmp_path: Path) -> None:
    """Strict replay, without start times and stalls, is within 0.3 % of the planned step."""
    job = sharded_job(3)
    write_capture(job, tmp_path)
    built = build(load(tmp_path, workers=1))

    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))

    assert built.health.clean
    assert [0, 1, 2] == [error.step for error in errors]
    assert 0.003 > max(abs(error.error) for error in errors)
    assert plan(job).step_ns(1) == pytest.approx(errors[1].measured_ns, rel=0.02)


def test_a_known_straggler_is_found_with_its_wait(tmp_path: Path) -> None:
    """20 ms of host time on rank 1 make rank 0 wait that long a step."""
    write_capture(sharded_job(), tmp_path, [Fault("delay", 1, 20 * MS)])
    waits = load(tmp_path, workers=1).collectives

    caused = int(waits.wait_ns[(waits.rank == 0)].max())

    assert caused == pytest.approx(20 * MS, rel=0.02)
    assert 0 == int(waits.wait_ns[waits.rank == 1].max())


def test_a_shifted_clock_is_found(tmp_path: Path) -> None:
    """Ranks on two nodes, one 5 ms ahead: the offset is found within its own bounds."""
    job = SynthJob(2, GROUPS, {0: sharded_program(), 1: sharded_program()}, gpus_per_node=1)
    write_capture(job, tmp_path, [Fault("clock", 1, 5 * MS)])
    clock = load(tmp_path, workers=1).clocks[1]

    assert clock.low_ns <= 5 * MS <= clock.high_ns
    assert clock.offset_ns == pytest.approx(5 * MS, abs=0.5 * MS)


FAULTS = {
    "lost-kernels:0:0.5": ("unmatched", "launches without GPU records"),
    "lost-launches:0:0.5": ("unmatched", "GPU records without a launch"),
    "crossing:0:1": ("unmatched", "host spans that cross instead of nesting"),
    "truncated:1:0.8": ("dropped", "events cut off by the end of the file"),
    "not-a-number:0": ("repaired", "values that are not JSON (N/A, nan, inf)"),
    "bare-quote:0": ("repaired", "event names with unescaped quotes"),
    "trailing-comma:1": ("repaired", "missing or spare commas"),
    "old-torch": ("guessed", "groups assumed to hold all ranks"),
    "late-start:1:1": ("unmatched", "members of collectives outside the common window of the ranks"),
}


@pytest.mark.parametrize("text", FAULTS)
def test_every_fault_is_what_it_says(text: str, tmp_path: Path) -> None:
    """The reader names exactly the damage that was done."""
    kind, reason = FAULTS[text]
    write_capture(sharded_job(), tmp_path, [Fault.parse(text)])

    job = load(tmp_path, workers=1)
    health = job.health
    health.add(build(job).health)

    assert getattr(health, kind)[reason] > 0


def test_harmless_oddities_change_nothing(tmp_path: Path) -> None:
    """Shuffled events and missing shapes, sequence numbers or sync records give the same matches and step."""
    write_capture(sharded_job(), tmp_path / "plain")
    plain = load(tmp_path / "plain", workers=1).collectives
    for fault in ("shuffled", "no-shapes", "no-sequence", "no-sync-events"):
        write_capture(sharded_job(), tmp_path / fault, [Fault.parse(fault)])
        job = load(tmp_path / fault, workers=1)

        assert np.array_equal(plain.transfer_ns, job.collectives.transfer_ns), fault
        assert not job.health.dropped, fault


def test_missing_and_doubled_ranks_are_files(tmp_path: Path) -> None:
    """A missing rank has no file and is named by the reader; a doubled one has two."""
    gone = write_capture(sharded_job(), tmp_path / "gone", [Fault.parse("missing:1")])
    twice = write_capture(sharded_job(), tmp_path / "twice", [Fault.parse("twice:1")])

    assert ["rank0.json.gz"] == [path.name for path in gone]
    assert (1,) == load(tmp_path / "gone", workers=1).missing_ranks
    assert ["rank0.json.gz", "rank1.json.gz", "again-rank1.json.gz"] == [path.name for path in twice]


def test_unknown_faults_and_ranks_are_refused(tmp_path: Path) -> None:
    """The message lists what there is."""
    with pytest.raises(UsageError, match="no fault 'gremlin'; known: slow, jitter, delay"):
        Fault.parse("gremlin")
    with pytest.raises(UsageError, match="write slow:RANK:AMOUNT with numbers"):
        Fault.parse("slow:one")
    with pytest.raises(UsageError, match=r"rank 7 is not written; there are \[0, 1\]"):
        write_capture(sharded_job(), tmp_path, [Fault("slow", 7, 2.0)])


def test_files_are_the_same_bytes_each_time_and_carry_exact_nanoseconds(tmp_path: Path) -> None:
    """No clock, no random seed of the process; ts has three decimals and base + ts is an exact integer."""
    first = [path.read_bytes() for path in write_capture(sharded_job(), tmp_path / "a")]
    again = [path.read_bytes() for path in write_capture(sharded_job(), tmp_path / "b")]
    text = gzip.decompress(first[0]).decode()

    assert first == again
    assert '"ts":1234567890123.456' in text
    assert 224 * 7_889_238 * 10**9 == json.loads(text)["baseTimeNanoseconds"]


def test_a_long_list_of_ranks_is_cut_as_kineto_cuts_it_and_still_read(tmp_path: Path) -> None:
    """Groups of 64 ranks appear with dots in the events; one present rank is enough to restore them."""
    world = ProcessGroup("0", "default_pg", tuple(range(64)))
    job = SynthJob(64, (world,), {0: (Collective("all_reduce", "0", MS, 8, 8), Wait(20), Sync())})
    write_capture(job, tmp_path)
    text = gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()).decode()

    assert ", 28, ..., 63]" in text
    assert 64 == load(tmp_path, workers=1).groups[0].size


def test_messages_match_by_their_pair(tmp_path: Path) -> None:
    """A send and its receive on other streams are one instance with two members."""
    pair = ProcessGroup("1", "mesh_pp", (0, 1))
    send = (Kernel("gemm", MS), Collective("send", "1", MS, 64, 64, stream=48, peer=1), Sync())
    receive = (Collective("recv", "1", MS, 64, 64, stream=44, peer=0), Wait(44), Kernel("gemm", MS), Sync())
    job = SynthJob(2, (GROUPS[0], pair), {0: send, 1: receive})
    write_capture(job, tmp_path)
    found = load(tmp_path, workers=1).collectives

    assert found.matched.all()
    assert [0, 0, 1, 1, 2, 2] == found.instance.tolist()
    assert {"send", "recv"} == set(found.to_frame()["kind"])
