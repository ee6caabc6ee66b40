"""The synthesizer: times of programs, and files that the project's own parser, matcher and graph builder read as real."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
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
    Backward,
    Collective,
    Fault,
    HostOp,
    Instruction,
    Kernel,
    Module,
    ProcessGroup,
    Sync,
    SynthJob,
    Wait,
    plan,
    write_capture,
)
from scaletrace.traces.synth.faults import FAULTS, conditions

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


def test_kernels_beside_a_collective_take_longer_and_the_collective_too() -> None:
    """κ = 1 doubles a kernel that is wholly covered; a transfer beside kernels all along takes 1 + μ times as long."""
    beside = (
        Collective("all_reduce", "0", 4 * MS, 8, 8, slowdown=1.0),
        Kernel("beside", MS),
        Wait(20),
        Kernel("alone", MS),
        Sync(),
    )
    job = SynthJob(1, (ProcessGroup("0", "default_pg", (0,)),), {0: beside}, steps=1, collective_slowdown=0.5)
    timing = plan(job)
    lasted = {
        getattr(call.what, "name", "transfer"): timing.end_ns[call.end] - timing.start_ns[call.device]
        for call in timing.plans[0].calls
        if call.device >= 0
    }

    # The kernel starts a launch behind the transfer: 2 ms beside it, during which the transfer does 2 / 1.5 ms.
    assert 2 * MS == lasted["beside"]
    assert MS == lasted["alone"]
    assert lasted["transfer"] == pytest.approx(4 * MS + 2 * MS - 2 * MS / 1.5, abs=2)


def test_a_kernel_half_beside_a_collective_is_slowed_for_that_half() -> None:
    """A transfer of 1 ms beside a kernel of 3 ms at κ = 1 costs it half of that millisecond."""
    program = (Collective("all_reduce", "0", MS, 8, 8, slowdown=1.0), Kernel("gemm", 3 * MS), Sync())
    job = SynthJob(1, (ProcessGroup("0", "default_pg", (0,)),), {0: program}, steps=1)
    timing = plan(job)
    call = timing.plans[0].calls[1]
    late = timing.start_ns[call.device] - timing.start_ns[timing.plans[0].calls[0].device]

    assert timing.end_ns[call.end] - timing.start_ns[call.device] == pytest.approx(3 * MS + (MS - late) / 2, abs=1)


def test_without_slowdown_both_ways_of_timing_agree() -> None:
    """The simulation of contending works gives the longest path where nothing slows anything."""
    job = sharded_job()
    plain = plan(job)
    simulated = plan(replace(job, collective_slowdown=1e-15))

    assert plain.start_ns == simulated.start_ns
    assert plain.end_ns == simulated.end_ns


def test_ranks_that_disagree_are_refused_with_slowdown_too() -> None:
    """The simulation sees the cycle as well."""
    one = Collective("all_reduce", "0", MS, 1, 1, slowdown=0.5)
    other = Collective("all_reduce", "1", MS, 1, 1, slowdown=0.5)

    with pytest.raises(UsageError, match="call their collectives in another order"):
        plan(SynthJob(2, GROUPS, {0: (one, other), 1: (other, one)}, steps=1))


def test_a_marked_wait_awaits_one_collective_and_no_later_one(tmp_path: Path) -> None:
    """Two receives are posted at once; the kernel that needs the first does not wait for the second."""
    pair = ProcessGroup("1", "mesh_pp", (0, 1))
    slow = tuple(Kernel("gemm", 2 * MS) for _ in range(2))
    send = (Collective("send", "1", MS, 64, 64, stream=48, peer=1), *slow,
            Collective("send", "1", MS, 64, 64, stream=48, peer=1), Sync())  # fmt: skip
    receive = (
        Collective("recv", "1", MS, 64, 64, stream=44, peer=0, mark="a"),
        Collective("recv", "1", MS, 64, 64, stream=44, peer=0, mark="b"),
        Wait(44, mark="a"),
        Kernel("first", MS),
        Wait(44, mark="b"),
        Kernel("second", MS),
        Sync(),
    )
    job = SynthJob(2, (GROUPS[0], pair), {0: send, 1: receive}, steps=1)
    calls = plan(job).plans[1].calls
    starts = [plan(job).start_ns[call.device] for call in calls if isinstance(call.what, Kernel)]
    write_capture(job, tmp_path)
    built = build(load(tmp_path, workers=1))
    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))

    assert starts[1] - starts[0] > 3 * MS
    assert 0.003 > max(abs(error.error) for error in errors)


def test_autograd_nodes_and_modules_are_written_as_a_profiler_shows_them(tmp_path: Path) -> None:
    """A tagged operator and its node share a sequence number; an operator lies in the one that calls it."""
    forward = Kernel("gemm", MS, "aten::mm", shapes=((8, 4), (4, 2)), outer="aten::linear", outer_shapes=((8, 4), (2, 4), ()), tag="x")  # fmt: skip
    program = (
        Module("Block_0", (forward,)),
        Backward("MmBackward0", "x", (Kernel("gemm", MS, "aten::mm"),)),
        Sync(),
    )
    job = SynthJob(1, (ProcessGroup("0", "default_pg", (0,)),), {0: program}, steps=1)
    write_capture(job, tmp_path)
    events = json.loads(gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()))["traceEvents"]
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    numbers = [(event["name"], event["args"].get("Sequence number")) for event in ops]
    found = {event["name"]: event for event in events}

    node = "autograd::engine::evaluate_function: MmBackward0"
    assert [(node, 1), ("aten::linear", 1), ("aten::mm", 1), ("aten::mm", None)] == numbers
    assert [[8, 4], [2, 4], []] == found["aten::linear"]["args"]["Input Dims"]
    assert "python_function" == found["nn.Module: Block_0"]["cat"]
    assert found["nn.Module: Block_0"]["ts"] < found["aten::linear"]["ts"]


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


@pytest.mark.parametrize(
    ("text", "field"), [("loader-stall:1:5000000", "loader_ns"), ("late-launch:1:300", "launch_ns")]
)
def test_faults_of_the_host_delay_their_rank(text: str, field: str) -> None:
    """A stalled loader delays a step once, slow launches delay it once a launch."""
    fault = Fault.parse(text)
    plans = [plan(sharded_job(1), faults) for faults in ([], [fault])]
    hosts = [sum(p.end_ns[call.host] - p.start_ns[call.host] for call in p.plans[1].calls) for p in plans]
    loads = [[stretch for stretch in p.plans[1].ranges if "DataLoader" in stretch.what.name] for p in plans]

    assert int(fault.amount) == getattr(conditions([fault], 1), field)
    assert 0 == getattr(conditions([fault], 0), field)
    if field == "launch_ns":
        assert 300 * (2 + 2 + 2 + 2 + 1) == hosts[1] - hosts[0]
    else:
        assert [0, 1] == [len(found) for found in loads]
        assert 5 * MS == plans[1].end_ns[loads[1][0].last] - plans[1].start_ns[loads[1][0].first]


def test_jitter_spreads_kernels_and_keeps_their_mean() -> None:
    """Standard deviation as asked, the same each time, other ranks untouched."""
    many = tuple(Kernel("gemm", MS) for _ in range(400))
    job = SynthJob(2, GROUPS, {0: many, 1: many}, steps=1)
    timing = plan(job, [Fault.parse("jitter:1:0.1")])
    lasted = [
        [timing.end_ns[call.end] - timing.start_ns[call.device] for call in timing.plans[rank].calls] for rank in (0, 1)
    ]

    assert {MS} == set(lasted[0])
    assert np.mean(lasted[1]) == pytest.approx(MS, rel=0.02)
    assert np.std(lasted[1]) == pytest.approx(0.1 * MS, rel=0.1)
    assert timing.end_ns == plan(job, [Fault.parse("jitter:1:0.1")]).end_ns


def test_a_drifting_clock_keeps_spans_nested(tmp_path: Path) -> None:
    """Durations drift too, so nothing crosses that was nested."""
    write_capture(sharded_job(), tmp_path, [Fault.parse("drift:1:500")])

    assert not load(tmp_path, workers=1).health.unmatched


def test_other_traces_in_the_folder_are_refused(tmp_path: Path) -> None:
    """A smaller job does not leave ranks of a larger one behind; the same job is written again."""
    write_capture(sharded_job(), tmp_path)
    write_capture(sharded_job(), tmp_path)

    with pytest.raises(UsageError, match=r"holds other traces \(rank1.json.gz\)"):
        write_capture(replace(sharded_job(), programs={0: sharded_program()}), tmp_path)


def test_a_described_model_is_in_the_manifest(tmp_path: Path) -> None:
    """Tokens and FLOP of a step stand where every command looks for them."""
    write_capture(replace(sharded_job(), model={"tokens_per_step": 64, "flops_per_step": 1e12}), tmp_path)
    job = load(tmp_path, workers=1)

    assert {"tokens_per_step": 64, "flops_per_step": 1e12} == job.manifest["model"]
    assert () == job.missing_ranks


BAD_AMOUNTS = [
    f"{kind}:0:{value}"
    for kind, known in FAULTS.items()
    if known.meaning
    for value in ("nan", "inf", "-inf", "1e300", known.low - 1, 2 * known.high + 1)
]


@pytest.mark.parametrize("text", BAD_AMOUNTS)
def test_amounts_that_can_not_be_are_refused(text: str) -> None:
    """One sentence with what the amount means and where it lies, for every fault that has one."""
    with pytest.raises(UsageError, match=r"is not possible; give the .*, from .* to"):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("text", "amount", "said"),
    [
        ("delay:3:20ms", 20_000_000, "delay on rank 3: 20 ms of host time before each of its steps"),
        ("delay:3:20", 20, "delay on rank 3: 20 ns of host time before each of its steps"),
        ("late-launch::5us", 5_000, "late-launch on every rank: 5 µs that each of its launches takes longer"),
        ("clock:1:-0.5s", -500_000_000, "clock on rank 1: -500 ms by which its clock is ahead"),
        ("slow:0:1.3", 1.3, "slow on rank 0: 1.3 factor on the kernel times of the rank"),
        ("missing:2", 0, "missing on rank 2"),
    ],
)
def test_times_take_units_and_what_is_injected_is_said(text: str, amount: float, said: str) -> None:
    """A bare number is ns, which the sentence shows."""
    fault = Fault.parse(text)

    assert (amount, said) == (fault.amount, str(fault))


@pytest.mark.parametrize("text", ["delay:0:20kg", "delay:0:ms", "slow:0:2ms"])
def test_units_that_do_not_fit_are_refused(text: str) -> None:
    """Only times take a unit, and only one of time."""
    with pytest.raises(UsageError, match=r"with numbers, as in (delay:0:20ms|slow:0:1\.2)"):
        Fault.parse(text)


@pytest.mark.parametrize("kind", [kind for kind, known in FAULTS.items() if not known.meaning])
def test_faults_without_an_amount_take_none(kind: str) -> None:
    """A number that would be ignored is refused."""
    with pytest.raises(UsageError, match=f"{kind} takes no amount"):
        Fault.parse(f"{kind}:0:1")


def test_every_fault_is_documented() -> None:
    """The table of the README names each of them with its default."""
    text = (Path(__file__).resolve().parents[2] / "traces" / "README.md").read_text(encoding="utf-8")

    for kind in FAULTS:
        assert f"`{kind}`" in text


def test_a_shifted_clock_is_found(tmp_path: Path) -> None:
    """Ranks on two nodes, one 5 ms ahead: the offset is found within its own bounds."""
    job = SynthJob(2, GROUPS, {0: sharded_program(), 1: sharded_program()}, gpus_per_node=1)
    write_capture(job, tmp_path, [Fault("clock", 1, 5 * MS)])
    clock = load(tmp_path, workers=1).clocks[1]

    assert clock.low_ns <= 5 * MS <= clock.high_ns
    assert clock.offset_ns == pytest.approx(5 * MS, abs=0.5 * MS)


DAMAGE = {
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


@pytest.mark.parametrize("text", DAMAGE)
def test_every_fault_is_what_it_says(text: str, tmp_path: Path) -> None:
    """The reader names exactly the damage that was done."""
    kind, reason = DAMAGE[text]
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


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    """Its files have the names that the synthesizer gives, and stay as they are."""
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": []}'))
    before = (tmp_path / "rank0.json.gz").read_bytes()

    with pytest.raises(UsageError, match=r"rank0.json.gz was not written by synth"):
        write_capture(sharded_job(), tmp_path)
    assert before == (tmp_path / "rank0.json.gz").read_bytes()
