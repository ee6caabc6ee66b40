"""Transfers of a graph: shared links, sizes that the trace doesn't carry, evidence, and ratios of costs."""

from __future__ import annotations

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import Provenance, collective_seconds
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.transfers import (
    algorithm_of,
    beyond_ns,
    evidence,
    rescale,
    serialised,
    unshared_ns,
    whole_bytes,
    with_groups,
    with_sizes,
)
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.health import Health
from scaletrace.replay.engine import replay

H100, ETHERNET = Cluster.load("dgx_h100"), Cluster.load("gloo_1g")


def _job(durations: list[int], items: list[GraphCollective], groups: list[GraphGroup] | None = None) -> Graph:
    """Collectives of two ranks that all start at once, each on a lane of its own."""
    draft = Draft(groups=groups or [GraphGroup("dp", 8, 1)])
    for dur_ns, item in zip(durations, items, strict=True):
        draft.collective(item.kind, item.group, 0, [(0, []), (1, [])], dur_ns)
        draft.collectives[-1] = item
    return draft.graph()


def _reduce(size: int) -> GraphCollective:
    return GraphCollective("all_reduce", 0, size, size)


@pytest.mark.parametrize(
    ("item", "whole"),
    [
        (GraphCollective("all_gather", 0, 100, 800), 800),
        (GraphCollective("all_gather", 0, 100, -1), 800),
        (GraphCollective("reduce_scatter", 0, -1, 100), 800),
        (GraphCollective("all_reduce", 0, 64, 64), 64),
        (GraphCollective("all_reduce", 0, -1, -1), -1),
    ],
)
def test_the_whole_vector_is_found_from_either_side(item: GraphCollective, whole: int) -> None:
    """A gather's output, a scatter's input, from the shard where only that is known; unknown stays unknown."""
    assert whole == whole_bytes(item, 8)


def test_transfers_that_shared_a_link_are_cut_to_what_they_take_alone() -> None:
    """100 and 160 ns side by side: 100 shared equally, then 60 alone, so 50 and 110; one after the other they end at 160."""
    graph = _job([100, 160], [_reduce(64), _reduce(128)])
    timeline = replay(graph)
    alone = unshared_ns(graph, timeline.start_ns, timeline.end_ns)
    transfers = (graph.kind == NodeKind.TRANSFER) & (graph.rank == 0)

    assert [50, 110] == alone[transfers].tolist()
    assert 160 == replay(serialised(graph), alone).makespan_ns == timeline.makespan_ns


def test_what_exceeds_transfers_of_the_same_size_is_told_apart() -> None:
    """Of 100, 90 and 160 ns after each other 90 count as clean, so 10 and 70 go beyond; another size is by itself."""
    graph = serialised(_job([100, 90, 160, 400], [_reduce(64), _reduce(64), _reduce(64), _reduce(128)]))
    timeline = replay(graph)
    moves = np.flatnonzero(graph.kind == NodeKind.TRANSFER)
    beyond = beyond_ns(graph, timeline.start_ns, timeline.end_ns)
    by_instance = {int(graph.instance[node]): float(beyond[node]) for node in moves}
    assert {0: 10.0, 1: 0.0, 2: 70.0, 3: 0.0} == by_instance
    assert 160.0 == beyond.sum()


def test_a_transfer_that_shared_its_link_has_nothing_beyond() -> None:
    """Of three side by side none tells what it takes alone, so all of their time is stretched with what they move."""
    graph = _job([100, 100, 160], [_reduce(64), _reduce(64), _reduce(64)])
    timeline = replay(graph)
    assert 0.0 == beyond_ns(graph, timeline.start_ns, timeline.end_ns).sum()


def test_sizes_are_taken_from_time_where_the_trace_has_none() -> None:
    """The size for which the model takes as long is found within 1 %, and counted as guessed."""
    truth = collective_seconds("all_gather", 100_000_000, 8, H100).seconds
    graph = _job([round(truth * 1e9)], [GraphCollective("all_gather", 0, -1, -1)])
    health = Health()
    (item,) = with_sizes(graph, graph.dur_ns, H100, health).collectives

    assert 100_000_000 == pytest.approx(item.bytes_out, rel=0.01)
    assert item.bytes_out // 8 == pytest.approx(item.bytes_in, abs=1)
    assert 1 == sum(health.guessed.values())


def test_unknown_groups_are_taken_to_span_all_ranks() -> None:
    """And that is counted."""
    health = Health()
    graph = with_groups(_job([10], [GraphCollective("all_reduce", -1, 8, 8)]), 16, health)

    assert GraphGroup("", 16, 1) == graph.groups[graph.collectives[0].group]
    assert 1 == sum(health.guessed.values())


def test_evidence_is_one_piece_a_size_from_the_faster_instances() -> None:
    """Ten transfers of one size, one of them held up: one piece near the usual time, with the weight of all."""
    graph = _job([1000] * 9 + [50_000, 3000], [_reduce(64)] * 10 + [_reduce(4096)])
    found = sorted(evidence(graph, graph.dur_ns), key=lambda piece: piece.size_bytes)

    assert [(64, 1e-6), (4096, 3e-6)] == [(piece.size_bytes, pytest.approx(piece.seconds)) for piece in found]
    assert 10**0.5 == pytest.approx(found[0].weight)


def test_measured_times_are_multiplied_by_a_ratio_of_costs() -> None:
    """A transfer that took 1.5 times the model's time at 8 ranks takes 1.5 times its time at 1,024."""
    size = 1 << 28
    before, after = (collective_seconds("all_reduce", size, n, H100).seconds for n in (8, 1024))
    graph = _job([round(1.5e9 * before)], [_reduce(size)])
    new = resize(graph, Layout(dp=8), Layout(dp=1024))
    change = rescale(graph, new, graph.dur_ns, H100, None)

    moved = change.dur_ns[graph.kind == NodeKind.TRANSFER]
    assert [pytest.approx(1.5e9 * after, rel=1e-6)] * 2 == moved.tolist()
    assert Provenance.PRIOR is change.worst


def test_a_larger_ring_takes_as_long_as_the_last_of_two_ranks() -> None:
    """Over gloo ranks end one after another, so that another ring follows from the one that waited for none."""
    graph = _job([0], [GraphCollective("all_gather", 0, 1 << 20, 1 << 21)], [GraphGroup("fsdp", 2, 1)])
    moves = graph.kind == NodeKind.TRANSFER
    graph.dur_ns[moves] = (20_000_000, 30_000_000)
    new = resize(graph, Layout(fsdp=2), Layout(fsdp=4))
    two, four = (collective_seconds("all_gather", 2 << 20, n, ETHERNET) for n in (2, 4))
    change = rescale(graph, new, graph.dur_ns, ETHERNET, None)

    assert [pytest.approx(20e6 * four.seconds / (two.seconds - two.last_s), rel=1e-6)] * 2 == change.dur_ns[
        moves
    ].tolist()
    assert [20_000_000, 30_000_000] == rescale(graph, graph, graph.dur_ns, ETHERNET, None).dur_ns[moves].tolist()


def test_in_a_larger_job_no_two_ranks_arrive_together() -> None:
    """A gather whose two ranks met at once takes the last rank's time too, once another group has more ranks."""
    gather = GraphCollective("all_gather", 0, 1 << 20, 1 << 21)
    groups = [GraphGroup("fsdp", 2, 1), GraphGroup("dp", 2, 2)]
    graph = _job([20_000_000, 50_000_000], [gather, GraphCollective("all_reduce", 1, 1 << 20, 1 << 20)], groups)
    new = resize(graph, Layout(dp=2, fsdp=2), Layout(dp=4, fsdp=2))
    two = collective_seconds("all_gather", 2 << 20, 2, ETHERNET)
    moved = rescale(graph, new, graph.dur_ns, ETHERNET, None).dur_ns[graph.kind == NodeKind.TRANSFER]

    assert [pytest.approx(20e6 * two.seconds / (two.seconds - two.last_s), rel=1e-6)] * 2 == moved[:2].tolist()


def test_a_group_of_one_gets_the_models_own_time() -> None:
    """Nothing was measured there, so the model stands alone."""
    graph = _job([0], [_reduce(1 << 28)], [GraphGroup("dp", 1, 1)])
    new = resize(graph, Layout(dp=1), Layout(dp=64))
    change = rescale(graph, new, graph.dur_ns, H100, None)

    expected = round(collective_seconds("all_reduce", 1 << 28, 64, H100).seconds * 1e9)
    assert {expected} == set(change.dur_ns[graph.kind == NodeKind.TRANSFER].tolist())


def test_ranks_that_fill_a_node_make_a_gather_faster() -> None:
    """From 11 to 16 ranks a gather of 4 GiB no longer passes the last node's 3 NICs; from 16 to 11 it does."""
    size = 4 << 30
    gather = GraphCollective("all_gather", 0, size // 16, size)
    times = [collective_seconds("all_gather", size, n, H100).seconds for n in (11, 16)]
    for here, there, ratio in ((11, 16, times[1] / times[0]), (16, 11, times[0] / times[1])):
        graph = _job([10**9], [gather], [GraphGroup("dp", here, 1)])
        new = resize(graph, Layout(dp=here), Layout(dp=there))
        change = rescale(graph, new, graph.dur_ns, H100, None)

        assert (ratio < 0.5) == (there == 16)
        assert pytest.approx(1e9 * ratio, rel=0.01) == change.dur_ns[graph.kind == NodeKind.TRANSFER].max()


def test_latency_bound_transfers_move_data_less_hard() -> None:
    """Of a gather of 1 MiB over 1,024 ranks far less time goes into bytes than over 8."""
    graph = _job([30_000], [GraphCollective("all_gather", 0, 1 << 17, 1 << 20)])
    new = resize(graph, Layout(dp=8), Layout(dp=1024))

    assert rescale(graph, new, graph.dur_ns, H100, None).moving[0] < 0.2
    assert 1.0 == rescale(graph, graph, graph.dur_ns, H100, None).moving[0]


def test_the_measured_scale_keeps_every_bit() -> None:
    """No ratio, no rounding, no error of a model."""
    graph = _job([123, 456], [_reduce(64), _reduce(128)])
    change = rescale(graph, graph, graph.dur_ns, H100, None)

    assert np.array_equal(graph.dur_ns, change.dur_ns)
    assert (Provenance.MEASURED, 0.0) == (change.worst, float(change.errors().max()))


@pytest.mark.parametrize(
    ("kernel", "algorithm"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "tree"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "not tree"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "not tree"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("ncclDevKernel_Broadcast_RING_LL", ""),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_SIMPLE", "ring"),
        ("ncclDevKernel_AllReduce_Sum_f32_NVLS_TREE_SIMPLE", "nvls_tree"),
        ("ncclDevKernel_AllGather_PAT_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", "pat"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", ""),
        ("gloo:all_reduce", ""),
    ],
)
def test_the_algorithm_is_read_from_the_kernels_name(kernel: str, algorithm: str) -> None:
    """Names of NCCL 2.19 and later tell; others are left to the model."""
    assert algorithm == algorithm_of(kernel)
