"""Wait, transfer and bandwidth of instances, and the verdict on who holds whom up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.job import KINDS
from scaletrace.parse.load import load
from scaletrace.parse.stragglers import straggler_summary
from scaletrace.parse.waits import bus_factor, instances_of, payload, split
from tests.parse.jobs import Event, host, kernel, loaded, nccl, record, step


def waits_of(kind: str, starts: list[int], ends: list[int], root: int = -1, on_device: bool = True) -> list[list[int]]:
    """[wait, transfer] of the members of one instance."""
    n = len(starts)
    kinds = np.full(n, KINDS.index(kind), np.uint8)
    if kind == "send":
        kinds[1:] = KINDS.index("recv")
    none, every = np.zeros(n, np.bool_), np.ones(n, np.bool_)
    wait, transfer = split(
        np.array([0]),
        np.array([n]),
        np.arange(n, dtype=np.int32),
        kinds,
        np.full(n, root, np.int32),
        np.array(starts),
        np.array(ends),
        every if on_device else none,
        every,
        none,
    )
    return [wait.tolist(), transfer.tolist()]


@pytest.mark.parametrize(
    ("kind", "root", "expected"),
    [
        ("all_reduce", -1, [[30, 10, 0], [60, 60, 60]]),
        ("barrier", -1, [[30, 10, 0], [60, 60, 60]]),
        ("custom", -1, [[30, 10, 0], [60, 60, 60]]),
        ("broadcast", 1, [[20, 0, 0], [70, 70, 60]]),
        ("scatter", 0, [[0, 0, 0], [90, 70, 60]]),
        ("reduce", 0, [[30, 0, 0], [60, 70, 60]]),
        ("gather", 1, [[0, 10, 0], [90, 60, 60]]),
    ],
)
def test_who_waits_for_whom(kind: str, root: int, expected: list[list[int]]) -> None:
    """All wait for the last in a synchronising collective, for the root in a broadcast, the root for all in a reduce."""
    assert expected == waits_of(kind, [0, 20, 30], [90, 90, 90], root)


def test_a_receive_waits_for_its_send_and_a_kernel_also_sends_only_to_a_receiver() -> None:
    """gloo hands a message to the system, a kernel of NCCL holds it until the receiver is there."""
    assert [[0, 0], [50, 30]] == waits_of("send", [0, 20], [50, 50], on_device=False)
    assert [[20, 0], [30, 30]] == waits_of("send", [0, 20], [50, 50], on_device=True)
    assert [[0, 40], [10, 10]] == waits_of("send", [40, 0], [50, 50], on_device=False)


def test_a_wait_is_never_longer_than_the_member() -> None:
    """A member that ended before the last one started, by clocks that are off, has waited all its time."""
    assert [[20, 0], [0, 20]] == waits_of("all_reduce", [0, 30], [20, 50])


@pytest.mark.parametrize(
    ("kind", "size", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_as_nccl_tests_define_it(kind: str, size: int, factor: float) -> None:
    """What a link carries per byte of payload."""
    assert factor == bus_factor(kind, size)


def test_payload_is_the_full_buffer() -> None:
    """The output of a gather, the input of everything else."""
    assert [80, 80, 10] == [
        payload("all_gather", 10, 80),
        payload("reduce_scatter", 80, 10),
        payload("all_reduce", 10, 10),
    ]


def test_an_instance_that_lacks_a_present_rank_tells_no_transfer(tmp_path: Path) -> None:
    """Without the third rank's member nobody knows who came last."""
    groups = [("0", "default_pg", range(3))]
    more = {"Group size": 3, "Process Group Ranks": "[0, 1, 2]"}
    ranks = {r: nccl("allreduce", 0, 10, 30, 1, Seq=1, **more) for r in (0, 1)}
    ranks[2] = nccl("allreduce", 40, 50, 60, 1, Seq=2, **more)
    job = loaded(tmp_path, ranks, groups=groups)

    assert [-1, -1, -1] == job.collectives.transfer_ns.tolist()
    assert [-1, -1] == instances_of(job).transfer_ns.tolist()
    assert np.isnan(instances_of(job).busbw_Bps).all()


def test_a_rank_alone_gives_an_upper_bound(tmp_path: Path) -> None:
    """Without partners nothing tells the transfer, but it was never longer than the shortest of its kind."""
    events = [
        e
        for k, took in enumerate((50, 20, 90))
        for e in nccl("allreduce", 200 * k, 200 * k + 9, 200 * k + 9 + took, k + 1)
    ]
    each = instances_of(loaded(tmp_path, {0: events}, world=2))

    assert [-1, -1, -1] == each.transfer_ns.tolist()
    assert [20_000] * 3 == each.at_most_ns.tolist()
    bare = [kernel("ncclDevKernel_AllReduce", 0, 5)]
    assert [-1] == loaded(tmp_path / "b", {0: bare}, world=2, groups=[]).collectives.transfer_ns.tolist()
    assert [5_000] == loaded(tmp_path / "c", {0: bare}, world=1, groups=[]).collectives.transfer_ns.tolist()


def training(
    delay_us: int, work_us: int, slow: int | None = None, host_late: bool = False, ranks: int = 3
) -> dict[int, list[Event]]:
    """Three steps of a kernel and an all-reduce; rank `slow` comes `delay_us` late, by computing or by its host."""
    out: dict[int, list[Event]] = {}
    for rank in range(ranks):
        events: list[Event] = []
        for k in range(3):
            at = 10_000 * k
            late = delay_us if rank == slow else 0
            busy = work_us + (0 if host_late else late)
            begin = at + 100 + (late if host_late else 0)
            end = begin + busy
            last = at + 100 + work_us + delay_us
            events += [step(k, at, 9_000), kernel("gemm", begin, busy, 10 * k + 1, 7)]
            listed = str(list(range(ranks)))
            more = {"Seq": k + 1, "Group size": ranks, "Process Group Ranks": listed}
            events += nccl("allreduce", begin + 5, end, last + 500, 10 * k + 2, **more)
        out[rank] = events
    return out


@pytest.mark.parametrize(("host_late", "cause"), [(False, "computes longer"), (True, "launches later")])
def test_a_slow_rank_and_a_late_host_are_told_apart(tmp_path: Path, host_late: bool, cause: str) -> None:
    """Rank 1 comes 2 ms late in each step: with a longer kernel, or with the same kernel launched later."""
    first, *rest = straggler_summary(loaded(tmp_path, training(2_000, 1_000, slow=1, host_late=host_late)))

    assert (1, 2_000_000, 4_000_000, cause) == (first.rank, first.delay_ns, first.caused_wait_ns, first.cause)
    assert (0 if host_late else 2_000_000) == first.extra_compute_ns
    assert [("", 2_000_000)] * 2 == [(share.cause, share.waited_ns) for share in rest]


def test_a_rank_that_was_made_late_is_not_the_culprit(tmp_path: Path) -> None:
    """Rank 1 is late in its tensor-parallel group; rank 0, which waited there, is late in its own data-parallel group."""
    groups = [("0", "default_pg", range(4)), ("1", "mesh_tp", (0, 1)), ("2", "mesh_tp", (2, 3))]
    groups += [("3", "mesh_dp", (0, 2)), ("4", "mesh_dp", (1, 3))]
    late = 1_000
    ranks: dict[int, list[Event]] = {}
    for r in range(4):
        tp, dp = 1 + r // 2, 3 + r % 2
        first = 100 + (late if r == 1 else 0)
        second = 200 + (late if r in (0, 1) else 0)
        listed = {1: "[0, 1]", 2: "[2, 3]", 3: "[0, 2]", 4: "[1, 3]"}
        both = ((tp, first, 150 + (late if tp == 1 else 0)), (dp, second, 250 + late))
        ranks[r] = [step(0, 0, 5_000)]
        for k, (group, start, end) in enumerate(both):
            more = {"Process Group Name": str(group), "Process Group Ranks": listed[group]}
            ranks[r] += nccl("allreduce", 10 * k, start, end, k + 1, Seq=1, **more)
    first_, *rest = straggler_summary(loaded(tmp_path, ranks, groups=groups))

    assert (1, "launches later", 1_000_000) == (first_.rank, first_.cause, first_.behind_ns)
    assert ["", "", ""] == [share.cause for share in rest]


def test_nobody_is_named_where_all_keep_pace(tmp_path: Path) -> None:
    """Equal ranks have no straggler."""
    assert ["", "", ""] == [share.cause for share in straggler_summary(loaded(tmp_path, training(0, 1_000)))]


def test_a_slow_link_shows_between_sister_groups(tmp_path: Path) -> None:
    """Two tensor-parallel groups move the same bytes; the transfers of one take three times as long."""
    groups = [("0", "default_pg", range(4)), ("1", "mesh_tp", (0, 1)), ("2", "mesh_tp", (2, 3))]
    ranks: dict[int, list[Event]] = {}
    for r in range(4):
        pair, took = ((0, 1), 200) if r < 2 else ((2, 3), 600)
        more = {"Process Group Name": str(1 + r // 2), "Process Group Ranks": str(list(pair))}
        ranks[r] = [step(0, 0, 9_000)]
        for k in range(5):
            at = 1_000 * k
            ranks[r] += nccl("allreduce", at, at + 10, at + 10 + took, k + 1, Seq=k + 1, elements=4096, **more)
    shares = {share.rank: share for share in straggler_summary(loaded(tmp_path, ranks, groups=groups))}

    assert ["", "", "transfers longer", "transfers longer"] == [shares[r].cause for r in range(4)]
    assert 5 * 400_000 == shares[2].transfer_excess_ns


def test_the_first_stage_of_a_pipeline_is_no_straggler(tmp_path: Path) -> None:
    """It ends last in every step, so what all ranks do together at the end says nothing about its pace."""
    groups = [("0", "default_pg", (0, 1)), ("1", "mesh_pp", (0, 1))]
    ranks = {r: [step(0, 0, 9_000), *nccl("allreduce", 10, 8_000 - 4_000 * r, 8_100, 1, Seq=1)] for r in (0, 1)}

    assert ["", ""] == [share.cause for share in straggler_summary(loaded(tmp_path, ranks, groups=groups))]
    assert "launches later" == straggler_summary(loaded(tmp_path, ranks, groups=groups[:1]))[0].cause


def test_overlapping_collectives_count_once(tmp_path: Path) -> None:
    """Two buckets that wait for the same late rank at the same time are one delay."""
    ranks: dict[int, list[Event]] = {}
    for r in (0, 1):
        ranks[r] = [step(0, 0, 9_000)]
        for k in range(2):
            start = 100 + 50 * k if r == 0 else 4_000
            ranks[r] += [
                record("allreduce", 10 + 20 * k, 5, Seq=k + 1, **{"External id": 7 + k}),
                {**kernel("ncclDevKernel_AllReduce", start, 4_100 - start, k + 1, 20 + k)},
                host("cudaLaunchKernelExC", 11 + 20 * k, 2, cat="cuda_runtime", correlation=k + 1),
            ]

    assert 3_900_000 == straggler_summary(loaded(tmp_path, ranks))[0].delay_ns


@pytest.mark.parametrize("name", ["ddp_straggler_w2", "ddp_straggler_w4"])
def test_the_known_straggler_is_named(shared_data: Path, name: str) -> None:
    """The last rank sleeps 50 ms a step, and that much is put down to it."""
    first = straggler_summary(load(shared_data / "gloo" / name))[0]

    assert (int(name[-1]) - 1, "launches later") == (first.rank, first.cause)
    assert 50 == pytest.approx(first.delay_ns / 1e6, rel=0.15)


def test_the_big_all_gather_of_the_h100_job_runs_at_full_speed(shared_data: Path) -> None:
    """151 MB over eight H100 show 279 to 316 GB/s of bus bandwidth on every call whose payload was recorded."""
    job = load(shared_data / "traces" / "nanogpt8_h100")
    each, c = instances_of(job), job.collectives
    recorded = np.isin(np.arange(len(each)), c.instance[c.host_event >= 0])
    big = (each.kind == KINDS.index("all_gather")) & (each.bytes == 150_994_944) & recorded

    assert 8 == int(big.sum())
    assert (279, 316) == (round(each.busbw_Bps[big].min() / 1e9), round(each.busbw_Bps[big].max() / 1e9))
