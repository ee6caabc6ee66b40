"""Overlap: how much of a kernel ran beside a collective, what that cost, and putting another overlap in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate import overlap
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.interference import COLLECTIVE_SLOWDOWN
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from scaletrace.traces.synth.interference import Roles, contended


def _graph(names: list[str], durations: list[int], transfer_ns: int) -> Graph:
    """A chain of kernels on one stream beside one transfer that starts with them on another."""
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    draft.collective("all_reduce", 0, 64, [(0, []), (1, [])], transfer_ns)
    before: list[int] = []
    for name, dur_ns in zip(names, durations, strict=True):
        before = [draft.node(NodeKind.KERNEL, dur_ns, name=name, after=before)]
    return draft.graph()


def test_union_and_cover_count_every_moment_once() -> None:
    """Two overlapping intervals and a separate one cover 25 of the 40 ns asked for."""
    low, high = np.array([10, 0, 50]), np.array([20, 15, 60])

    assert [[0, 50], [20, 60]] == [array.tolist() for array in overlap.union(low, high)]
    assert [20, 5] == overlap.covered(np.array([0, 30]), np.array([25, 55]), low, high).tolist()


def test_share_is_the_part_of_a_kernel_beside_a_resident_collective() -> None:
    """A transfer of 150 ns covers the first kernel of 100 wholly, the second by half, the third not."""
    graph = _graph(["a", "b", "c"], [100, 100, 100], 150)
    timeline = replay(graph)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)

    assert [[0.0, 1.0], [0.0, 0.5], [0.0, 0.0]] == share[graph.kind == NodeKind.KERNEL].tolist()


def test_waiting_and_moving_are_told_apart() -> None:
    """Rank 1 arrives at 100: rank 0's first kernel runs beside a waiting member, its second beside a moving one.

    Of a transfer that moves data half as hard as it was measured, half counts as waiting.
    """
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    late = draft.node(NodeKind.KERNEL, 100, rank=1, name="late")
    draft.collective("all_reduce", 0, 64, [(0, []), (1, [late])], 100)
    first = draft.node(NodeKind.KERNEL, 100, name="a")
    draft.node(NodeKind.KERNEL, 100, name="b", after=[first])
    graph = draft.graph()
    timeline = replay(graph)
    rank0 = (graph.kind == NodeKind.KERNEL) & (graph.rank == 0)

    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)
    weaker = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns, np.array([0.5]))

    assert [[1.0, 0.0], [0.0, 1.0]] == share[rank0].tolist()
    assert [[1.0, 0.0], [0.5, 0.5]] == weaker[rank0].tolist()


def test_slowdown_is_measured_on_kernels_that_ran_both_ways() -> None:
    """Eight GEMMs took 140 ns beside moving data and 100 without: κ is 0.4 there, and the prior's beside a waiting one."""
    graph = _graph(["gemm"] * 16, [140] * 8 + [100] * 8, 8 * 140)
    timeline = replay(graph)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)

    found = overlap.measure(graph, share, prior=0.1)

    assert {"gemm": (pytest.approx(0.1), pytest.approx(0.4))} == dict(found.by_name)
    assert 0.1 == found.default[0] < found.default[1] < 0.4 and found.pairs == 1


@pytest.mark.parametrize(("apart", "trust"), [(0, 1.0), (8, 0.433), (40, 0.03)])
def test_runs_that_scatter_draw_a_kernel_to_the_prior(apart: int, trust: float) -> None:
    """Medians of 140 beside moving data and 100 without say 0.4; the more the runs scatter, the less of that is believed."""
    spread = [-apart, -apart, 0, apart, apart]
    durations = [140 + x for x in spread] + [100 + x for x in spread]
    graph = _graph(["gemm"] * 10, durations, 5 * 140)
    timeline = replay(graph)
    found = overlap.measure(graph, overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns), prior=0.2)
    default = (trust * 0.4 + overlap.PAIRS_WANTED * 0.2) / (trust + overlap.PAIRS_WANTED)

    assert found.default[1] == pytest.approx(default, abs=0.001)
    assert found.by_name["gemm"][1] == pytest.approx(trust * 0.4 + (1 - trust) * default, abs=0.01)


def test_provenance_of_the_slowdown_says_how_much_of_it_is_measured() -> None:
    """One kernel that is all of the time is measured; where another takes 9 times as long it is one of a mixture."""
    for rest, expected in (([], "measured"), ([10_000], "mixed (1 kernel)")):
        graph = _graph(["gemm"] * 16 + ["other"] * len(rest), [140] * 8 + [100] * 8 + rest, 8 * 140)
        timeline = replay(graph)
        found = overlap.measure(graph, overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns), prior=0.1)

        assert expected == found.provenance
    assert "prior" == overlap.Slowdown((0.1, 0.1), {}, "prior of the device").provenance
    assert "given" == overlap.Slowdown((0.1, 0.1), {}, "given").provenance


def test_too_few_kernels_leave_the_prior() -> None:
    """Four pairs are no evidence: the device's prior is used, and said to be one."""
    graph = _graph(["gemm"] * 8, [140] * 4 + [100] * 4, 4 * 140)
    timeline = replay(graph)
    found = overlap.measure(graph, overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns), prior=0.1)

    assert ((0.1, 0.1), {}, "prior of the device") == (found.default, dict(found.by_name), found.source)


def test_applying_the_measured_overlap_changes_no_bit() -> None:
    """Taking the overlap out and putting the same back is exact; more overlap lengthens, none takes the slowdown out."""
    dur, kappa = np.array([137, 1000, 999]), np.tile([0.2, 0.4], (3, 1))
    was, moving = np.array([[0.0, 1.0], [0.0, 0.5], [0.0, 0.0]]), np.tile([0.0, 1.0], (3, 1))

    assert dur.tolist() == overlap.apply(dur, kappa, was, was.copy()).tolist()
    assert [98, 857, 999] == overlap.apply(dur, kappa, was, np.zeros((3, 2))).tolist()
    assert [137, 1200, 1399] == overlap.apply(dur, kappa, was, moving).tolist()
    assert [117, 1029, 1199] == overlap.apply(dur, kappa, was, moving[:, ::-1]).tolist()


@pytest.mark.parametrize("begins", [0, 300, 900])
def test_what_a_kernel_does_beside_a_collective_for_a_part_of_its_run_is_found_again(begins: int) -> None:
    """A kernel of 1,000 ns slowed by 0.5 beside a transfer of 600, which 0.25 slows, as a simulation has them."""
    roles = Roles(kernels={0: 0}, arrivals={1: (0, 2)}, slowdown={2: 0.5})
    roles.members[2].append(0)
    start, end = (
        np.array(each) for each in contended([1000, 0, 600, begins], [[], [(3, 0)], [(1, 0)], []], roles, 0.25)
    )
    low, high = np.maximum(start[0], start[2]), np.minimum(end[0], end[2])
    beside = np.maximum(0, high - low) / (end - start)[[0, 2]]
    alone = overlap.apply((end - start)[[0, 2]], np.array([[0.0, 0.5], [0.0, 0.25]]), np.array([[0.0, f] for f in beside]), np.zeros((2, 2)))  # fmt: skip

    assert 0 < beside[0] < 1
    assert [1000, 600] == pytest.approx(alone.tolist(), abs=2)


def test_a_real_job_slows_more_beside_moving_data_than_beside_waiting(shared_data: Path) -> None:
    """On eight H100 a waiting collective costs kernels far less than one that moves data."""
    graph = build(load(shared_data / "traces" / "nanogpt8_h100")).graph
    timeline = replay(graph)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)
    found = overlap.measure(graph, share, prior=0.59)
    waiting, moving = found.default

    assert found.pairs > 10
    assert waiting < 0.35
    assert 0.4 < moving < 0.7


def test_a_transfer_has_the_kernels_of_the_member_with_most_of_them_beside_it() -> None:
    """Kernels cover half of a transfer of 200 ns on rank 0 and none of it on rank 1: both members move with half beside."""
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    draft.collective("all_reduce", 0, 64, [(0, []), (1, [])], 200)
    first = draft.node(NodeKind.KERNEL, 60, name="a")
    draft.node(NodeKind.KERNEL, 40, name="b", after=[first])
    graph = draft.graph()
    timeline = replay(graph)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)
    transfers = graph.kind == NodeKind.TRANSFER

    assert [[0.0, 0.5]] * 2 == share[transfers].tolist()
    slow = overlap.Slowdown((0.5, 0.5), {}, "given", transfers=0.25).per_node(graph)
    assert [180, 180] == overlap.apply(graph.dur_ns, slow, share, np.zeros_like(share))[transfers].tolist()


def test_transfers_of_the_same_bytes_tell_what_kernels_beside_them_cost() -> None:
    """Ten alike, 150 ns beside a kernel and 100 ns without, are worth as much as the prior; one of each kind nothing."""
    found = []
    for count in (5, 1):
        draft, before = Draft(groups=[GraphGroup("dp", 1, 1)]), list[int]()
        for _ in range(count):
            draft.node(NodeKind.KERNEL, 150, name="gemm", after=before)
            before = draft.collective("all_reduce", 0, 64, [(0, before)], 150)
            before = draft.collective("all_reduce", 0, 64, [(0, before)], 100)
        graph = draft.graph()
        timeline = replay(graph)
        share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)
        found.append(overlap.transfer_slowdown(graph, share, graph.dur_ns))

    assert [pytest.approx((0.5 + COLLECTIVE_SLOWDOWN) / 2), pytest.approx(COLLECTIVE_SLOWDOWN)] == found
