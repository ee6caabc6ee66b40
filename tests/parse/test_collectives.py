"""Collectives of one rank and their instances over ranks: NCCL, gloo, batches, messages, patterns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.job import KINDS
from scaletrace.parse.load import load
from scaletrace.parse.match_align import Sequence_, place
from scaletrace.parse.members import elements_of, kind_of, type_bytes
from scaletrace.parse.waits import instances_of
from tests.parse.jobs import BASE_NS, Event, host, instances, kernel, launch, loaded, nccl, record, step, write


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::broadcast_", "broadcast"),
        ("gloo:gather", "gather"),
        ("gloo:scatter", "scatter"),
        ("c10d::recv_", "recv"),
        ("c10d::reduce_", "reduce"),
        ("barrier", "barrier"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("nccldevkernel_allgather_ring_ll", "all_gather"),
        ("ncclDevKernel_SendRecv(x)", "unknown"),
        ("ncclDevKernel_Generic(x)", "unknown"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    """Words of records, ops and kernels of all generations."""
    assert kind == KINDS[kind_of(name)]


def test_sizes_of_types() -> None:
    """Kineto writes types in three dialects; unknown ones stay unknown."""
    names = ("Float", "BFloat16", "c10::Half", "long int", "Byte", "Float8_e4m3fn", "double", "TensorList", "")

    assert [4, 2, 2, 8, 1, 1, 8, -1, -1] == [type_bytes(name) for name in names]


def test_elements_of_ops() -> None:
    """Two-tensor ops name the output first; list forms record one side; no shapes means unknown."""
    gather, scatter = kind_of("all_gather"), kind_of("reduce_scatter")

    assert (8, 16) == elements_of(gather, [[16], [8], [], [], []], 2)
    assert (8, 32) == elements_of(gather, [[], [[8]], []], 4)
    assert (16, 8) == elements_of(scatter, [[8], [16], []], 2)
    assert (6, 6) == elements_of(kind_of("allreduce"), [[[2, 3]], []], 2)
    assert (-1, -1) == elements_of(gather, (), 2)


def test_a_barrier_counts_once(tmp_path: Path) -> None:
    """A barrier and the all-reduce inside it share a sequence number and are one collective."""
    ranks = {}
    for rank in (0, 1):
        inner = record("allreduce", 12, 5, 1, Seq=4)
        ranks[rank] = [
            record("barrier", 10, 10, 0, Seq=4),
            inner,
            launch(13, 1),
            kernel("ncclDevKernel_AllReduce", 20, 5, 1),
        ]
    job = loaded(tmp_path, ranks)

    assert [("barrier", (0, 1))] == instances(job)
    assert [4, 4] == job.collectives.seq.tolist()


def test_records_that_only_wait_are_no_collectives(tmp_path: Path) -> None:
    """ "wait" and "init" are written by record_param_comms too."""
    ranks = {r: [record("wait", 1), record("init", 8), *nccl("allreduce", 20, 30, 40, 1)] for r in (0, 1)}

    assert [("all_reduce", (0, 1))] == instances(loaded(tmp_path, ranks))


def test_a_batch_of_messages_is_a_member_each(tmp_path: Path) -> None:
    """batch_isend_irecv launches one kernel after its records; peers are ranks of the group, and pairs go both ways."""
    ranks: dict[int, list[Event]] = {}
    for rank in (0, 1):
        both = [record(kind, at, 3, Seq=9, Rank=1 - rank) for kind, at in (("send", 0), ("recv", 4))]
        ranks[rank] = [*both, launch(9, 5), kernel("ncclDevKernel_SendRecv", 20, 30, 5)]
    job = loaded(tmp_path, ranks)
    c = job.collectives

    assert [("send", (0, 1)), ("recv", (0, 1))] == instances(job)
    assert c.matched.all()
    assert [-1] * 4 == c.seq.tolist()
    assert 2 == len({(int(r), int(e)) for r, e in zip(c.rank, c.event, strict=True)})


def test_members_of_a_coalesced_group_match_in_turn(tmp_path: Path) -> None:
    """All-gathers that share one sequence number pair by their place in it."""
    ranks = {
        r: [
            e
            for k, n in enumerate((8, 64))
            for e in nccl("_allgather_base", 20 * k, 50 + k * 9, 58 + k * 9, k + 1, Seq=3, elements=(n, 2 * n))
        ]
        for r in (0, 1)
    }
    c = loaded(tmp_path, ranks).collectives

    assert [64, 64, 512, 512] == c.bytes_out.tolist()
    assert c.matched.all()


def test_a_kernel_launched_before_the_window_joins_by_its_stream(tmp_path: Path) -> None:
    """Without record and launch, the group comes from the stream, the kind from the name, the size from the others."""
    early = [kernel("ncclDevKernel_allreduce", 5, 5, 99), *nccl("allreduce", 20, 30, 40, 1)]
    ranks = {0: early, 1: [*nccl("allreduce", 0, 5, 10, 7), *nccl("allreduce", 20, 30, 40, 8)]}
    job = loaded(tmp_path, ranks)

    assert [("all_reduce", (0, 1)), ("all_reduce", (0, 1))] == instances(job)
    assert [1024] * 4 == job.collectives.bytes_in.tolist()
    assert job.health.guessed["collectives whose group was taken from others on their stream"] == 1


def test_seq_continues_over_members_without_a_record(tmp_path: Path) -> None:
    """A member between numbered ones of its group has the number between."""

    def rank(first: int, known: tuple[int, ...]) -> list[Event]:
        events: list[Event] = []
        for k in range(4):
            more = {"Seq": first + k} if k in known else {}
            events += nccl("allreduce", 20 * k, 20 * k + 9, 20 * k + 15, k + 1, **more)
        return events

    job = loaded(tmp_path, {0: rank(5, (0, 1, 2, 3)), 1: rank(5, (0, 3))})

    assert [5, 5, 6, 6, 7, 7, 8, 8] == job.collectives.seq.tolist()
    assert job.health.guessed["sequence numbers continued from their neighbours"] == 2


def test_two_groups_of_one_job_do_not_mix(tmp_path: Path) -> None:
    """Equal sequence numbers in two groups are two instances each."""
    groups = [("0", "default_pg", range(4)), ("1", "mesh_tp", (0, 1)), ("2", "mesh_tp", (2, 3))]
    ranks = {}
    for r in range(4):
        name, members = ("1", "[0, 1]") if r < 2 else ("2", "[2, 3]")
        group = {"Process Group Name": name, "Process Group Ranks": members, "Process Group Description": "mesh_tp"}
        ranks[r] = nccl("allreduce", 0, 10 + r, 30, 1, Seq=1, **group)
    job = loaded(tmp_path, ranks, groups=groups)

    assert [("all_reduce", (0, 1)), ("all_reduce", (2, 3))] == instances(job)
    assert ["world", "tp", "tp"] == [group.axis for group in job.groups]


def gloo(
    op: str, span: str, at: float, start: float, end: float, dims: object, tid: int = 300, **args: object
) -> list[Event]:
    """A c10d call and the span that served it."""
    shown = {"Input Dims": dims, "Input type": ["float", "float"], **args}
    inner = {"Input Dims": [args.pop("span_dims", [200])], "Input type": ["float"]}
    return [host(op, at, 5, **shown), host(span, start, end - start, tid, "user_annotation", **inner)]


def test_the_list_form_of_reduce_scatter_is_one_collective(tmp_path: Path) -> None:
    """gloo runs it as an all-reduce for each rank; they are one reduce_scatter of the whole input."""
    ranks = {}
    for r in (0, 1):
        op = host(
            "c10d::reduce_scatter_", 0, 5, **{"Input Dims": [[[4]], [[[4], [4]]], []], "Input type": ["TensorList"]}
        )
        spans = [
            host(
                "gloo:all_reduce",
                6 + 10 * k,
                8,
                300 + k,
                "user_annotation",
                **{"Input Dims": [[4]], "Input type": ["float"]},
            )
            for k in (0, 1)
        ]
        ranks[r] = [op, *spans]
    job = loaded(tmp_path, ranks, backend="gloo")
    c = job.collectives

    assert [("reduce_scatter", (0, 1))] == instances(job)
    assert (32, 16) == (int(c.bytes_in[0]), int(c.bytes_out[0]))
    assert [18_000, 18_000] == (c.end_ns - c.start_ns).tolist()


def test_sidecars_give_group_sequence_and_type(tmp_path: Path) -> None:
    """An entry created while a call ran names its group and turn, and the type that a tensor list lacks."""
    ranks, entries = {}, {}
    for r in (0, 1):
        call = host("c10d::allreduce_", 10, 5, **{"Input Dims": [[[50]]], "Input type": ["TensorList"]})
        span = host("gloo:all_reduce", 12, 8, 300, "user_annotation", **{"Input Dims": [[50]]})
        ranks[r] = [call, span]
        entries[r] = [
            {
                "process_group": ["0", "default_pg"],
                "collective_seq_id": 17,
                "profiling_name": "gloo:all_reduce",
                "time_created_ns": BASE_NS + 12_000,
                "input_dtypes": ["Double"],
                "is_p2p": False,
            }
        ]
    job = loaded(tmp_path, ranks, backend="gloo", entries=entries)
    c = job.collectives

    assert ([17, 17], "seq", [400, 400]) == (c.seq.tolist(), c.rung, c.bytes_in.tolist())


def test_a_fake_process_group_has_payloads_but_no_spans(tmp_path: Path) -> None:
    """Nothing was moved, so kind, group and bytes stand and no transfer is claimed."""
    call = host(
        "c10d::_allgather_base_", 10, 5, **{"Input Dims": [[64], [8], []], "Input type": ["float", "float", ""]}
    )
    job = loaded(tmp_path, {0: [call]}, world=8, backend="fake")
    c = job.collectives

    assert [("all_gather", (0,))] == instances(job)
    assert ([-1], [0], [32], [256]) == tuple(column.tolist() for column in (c.event, c.group, c.bytes_in, c.bytes_out))
    assert ([-1], [-1]) == (c.transfer_ns.tolist(), instances_of(job).at_most_ns.tolist())


def test_messages_pair_in_order_though_one_side_lost_its_first(tmp_path: Path) -> None:
    """A session that lost the first send still pairs the others, since both saw the end of the step."""

    def side(kind: str, numbers: range, delay: int) -> list[Event]:
        events = [step(1, 0, 400)]
        for k in numbers:
            at = 100 * k + delay
            name = f"c10d::{kind}" + ("_" if kind == "recv" else "")
            args = {
                "Input Dims": [[[8]]],
                "Input type": ["TensorList"],
                "Concrete Inputs": ["", "", "1" if kind == "send" else "0", "0"],
            }
            events += [
                host(name, at, 5, **args),
                host(
                    f"gloo:{kind}", at + 2, 40, 100, "user_annotation", **{"Input Dims": [[8]], "Input type": ["float"]}
                ),
            ]
        return events

    job = loaded(tmp_path, {0: side("send", range(1, 4), 0), 1: side("recv", range(4), 30)}, backend="gloo")
    c = job.collectives

    assert [("recv", (1,)), *[("send", (0, 1))] * 3] == instances(job)
    assert 1 == c.unmatched


def test_custom_collectives_match_by_pattern(tmp_path: Path) -> None:
    """DeepEP is known, a kernel of one's own can be named; each counts as a collective of its own kind."""
    for rank in (0, 1):
        own = [kernel("void my_exchange<4>(float*)", 10 + rank, 5), kernel("deep_ep::dispatch<1>(x)", 30 + rank, 9)]
        write(tmp_path, {rank: own}, world=2)

    assert [("custom", (0, 1))] == instances(load(tmp_path))
    assert [("custom", (0, 1))] * 2 == instances(load(tmp_path, patterns=["my_exchange"]))


def sequence(rank: int, text: str, steps: str = "", first_end: int = 0, jitter: int = 0) -> Sequence_:
    """Collectives named by letters, a millisecond apart, give or take `jitter` ns that only their place decides."""
    n = len(text)
    own = np.arange(first_end, first_end + n)
    noise = np.random.default_rng(7).integers(0, 100_000, 200)[own]
    end = own * 1_000_000 + noise + np.random.default_rng(rank).integers(0, jitter + 1, n)
    step_of = np.array([int(s) for s in steps] if steps else [-1] * n, np.int64)
    return Sequence_(rank, np.array([ord(c) for c in text], np.int64), np.full(n, -1, np.int64), step_of, end)


def test_windows_cut_at_both_ends_are_laid_over_each_other() -> None:
    """Names alone decide where they do not repeat."""
    placed = place([sequence(0, "abcdefg"), sequence(1, "cdefghi"), sequence(2, "efg")])

    assert [[0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7, 8], [4, 5, 6]] == [p.tolist() for p in placed.positions]


def test_step_numbers_decide_between_repeating_steps() -> None:
    """A window that holds one step less is not laid over the wrong one."""
    placed = place([sequence(0, "abcabcabc", "111222333"), sequence(1, "abcabc", "222333")])

    assert [3, 4, 5, 6, 7, 8] == placed.positions[1].tolist()


def test_ends_decide_where_steps_are_not_marked() -> None:
    """Without step numbers the shift at which ends move together wins, whatever the clocks say."""
    whole = sequence(0, "ab" * 12, jitter=3_000)
    part = sequence(1, "ab" * 8, first_end=4, jitter=3_000)
    moved = Sequence_(1, part.label, part.size, part.step, part.end_ns - 123_000_000)
    placed = place([whole, moved])

    assert list(range(4, 20)) == placed.positions[1].tolist()


def test_a_collective_lost_in_the_middle_shifts_nothing_behind_it() -> None:
    """The gap is found and counted; what lies behind it still matches."""
    placed = place([sequence(0, "abcdefgh" * 3), sequence(1, "abcdefgh" + "abdefgh" + "abcdefgh")])
    expected = [k for k in range(24) if k != 10]

    assert expected == placed.positions[1].tolist()
    assert 1 == placed.gaps


def test_the_answer_does_not_depend_on_the_order_of_ranks() -> None:
    """Sequences given backwards are placed alike."""
    parts = [sequence(0, "abcabd"), sequence(1, "bcabd"), sequence(2, "abd")]
    forward, backward = place(parts), place(parts[::-1])

    assert [p.tolist() for p in forward.positions] == [p.tolist() for p in backward.positions[::-1]]
