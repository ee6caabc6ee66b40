"""Context parallelism: what is exchanged around attention, what work is left, and the way back."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, seconds
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import EXCHANGES, Layout
from scaletrace.extrapolate.nodework import Role
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.batch import attention_of, resize_micro_batch
from scaletrace.extrapolate.rewrite.cp import _without_inserted_gradients, measured_exchange, spread_context
from scaletrace.extrapolate.rewrite.insert import LANES, PART
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import NodeKind
from scaletrace.replay.engine import replay
from tests.extrapolate.test_rewrite_layout import BIG, kernel_ns, same

Stateful = Callable[..., State]
KEYS = 2 * 8192 * 4096 * 2
"""Bytes of all keys and values of one micro batch of the fixture: two of 8,192 tokens by 4,096 in bf16."""


def exchanged(state: State, axis: str = "cp") -> list[tuple[str, int, int]]:
    """(kind, bytes in, bytes out) of the axis' collectives of the first rank, in order of nodes."""
    graph = state.graph
    found = []
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == 0)).tolist():
        item = graph.collectives[int(graph.instance[node])]
        if graph.groups[item.group].axis == axis:
            found.append((item.kind, item.bytes_in, item.bytes_out))
    return found


@pytest.mark.parametrize(
    ("exchange", "forward", "backward"),
    [
        ("all_gather", [("all_gather", 1, 4)], [("all_gather", 1, 4), *[("all_to_all", 2, 2)] * 4]),
        ("ring", [("all_to_all", 1, 1)] * 3, [*[("all_to_all", 1, 1), ("all_to_all", 2, 2)] * 3, ("all_to_all", 2, 2)]),
        ("gather_scatter", [("all_gather", 0.5, 2)] * 2, [("reduce_scatter", 2, 0.5)] * 2),
    ],
)
def test_keys_and_values_are_exchanged_around_attention(
    stateful: Stateful, exchange: str, forward: list[tuple[str, float, float]], backward: list[tuple[str, float, float]]
) -> None:
    """Four ranks: forward and backward of the one attention, in units of a rank's keys and values in bf16; gradients
    that go from rank to rank are in fp32."""
    local = KEYS // 4
    expected = [(kind, round(local * a), round(local * b)) for kind, a, b in [*forward, *backward]]

    assert expected == exchanged(spread_context(stateful(4, 1, **BIG), 4, exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("degree", [2, 4, 32])
def test_a_degree_and_back_gives_the_same_graph(stateful: Stateful, exchange: str, degree: int) -> None:
    """1 → k → 1 returns every node, edge, duration and byte, with and without data ranks."""
    for ranks, reduce_ns in ((1, 0), (2, 500_000)):
        state = stateful(4, 2, ranks, reduce_ns=reduce_ns, steps=2, **BIG)
        there = spread_context(state, degree, exchange)

        assert len(there.graph) > len(state.graph) and there.graph.is_topological()
        assert same(state.graph, spread_context(there, 1).graph)


def test_a_degree_is_the_same_on_any_way_there(stateful: Stateful) -> None:
    """1 → 4 and 1 → 2 → 4 exchange the same and take the same time."""
    state = stateful(4, 2, 2, reduce_ns=500_000, **BIG)
    direct, by_two = spread_context(state, 4), spread_context(spread_context(state, 2), 4)

    assert exchanged(direct) == exchanged(by_two)
    assert replay(direct.graph).makespan_ns == pytest.approx(replay(by_two.graph).makespan_ns, rel=1e-5)


def test_attention_costs_local_times_global_tokens_and_the_rest_its_local_ones(stateful: Stateful) -> None:
    """Over four ranks each part of the work is a quarter; at twice the length attention is four times, the rest twice."""
    state = stateful(4, 1, **BIG)
    free = replace(state, ceilings=Ceilings(1e12, 1e15))
    spread, longer = spread_context(free, 4), spread_context(resize_sequence(free, 4096), 4)

    for role in (Role.HEADS, Role.COLUMN):
        assert kernel_ns(spread, role) / kernel_ns(free, role) == pytest.approx(1 / 4, rel=0.02)
    assert kernel_ns(longer, Role.HEADS) / kernel_ns(spread, Role.HEADS) == pytest.approx(4, rel=0.02)
    assert kernel_ns(longer, Role.COLUMN) / kernel_ns(spread, Role.COLUMN) == pytest.approx(2, rel=0.02)


def test_a_ring_hides_behind_the_parts_that_need_no_foreign_keys(stateful: Stateful) -> None:
    """With long attention only the last gradients are seen; gathered one by one, all of it is."""
    state = stateful(4, 1, forward_ns=1_000_000_000, gap_ns=0, launch_ns=0)
    state = replace(state, anatomy=replace(state.anatomy, parameters=0 * state.anatomy.parameters))
    compute = replay(spread_context(state, 2, "ring").graph)
    kernels = int(compute.graph.dur_ns[compute.graph.kind == int(NodeKind.KERNEL)].sum())
    transfers = compute.graph.dur_ns[compute.graph.kind == int(NodeKind.TRANSFER)]
    gathered = replay(spread_context(state, 2, "gather_scatter").graph)
    seen = gathered.makespan_ns - int(gathered.graph.dur_ns[gathered.graph.kind == int(NodeKind.KERNEL)].sum())

    assert int(transfers.max()) <= compute.makespan_ns - kernels < 1.2 * int(transfers.max())
    assert int(gathered.graph.dur_ns[gathered.graph.kind == int(NodeKind.TRANSFER)].sum()) <= seen


def test_gradients_are_reduced_over_data_and_context_ranks(stateful: Stateful) -> None:
    """Two data ranks by four context ranks are a group of eight; what lies outside lies four times as far apart."""
    state = stateful(4, 1, 2, reduce_ns=500_000, **BIG)
    made = spread_context(state, 4)

    assert {"dp": (8, 1), "cp": (4, 1)} == {g.axis: (g.size, g.stride) for g in made.graph.groups}
    assert [item.bytes_in for item in state.graph.collectives] == [
        item.bytes_in for item in made.graph.collectives[: len(state.graph.collectives)]
    ]
    assert [4, 4] == made.graph.multiplicity.tolist()


def test_shards_are_spread_over_context_ranks_too(stateful: Stateful) -> None:
    """FSDP over 2 ranks becomes FSDP over 2 × 4: shards are a quarter, whole vectors stay."""
    state = stateful(4, 1, 2, reduce_ns=500_000, **BIG)
    groups = (replace(state.graph.groups[0], axis="fsdp"),)
    items = tuple(replace(i, kind="reduce_scatter", bytes_in=4096, bytes_out=2048) for i in state.graph.collectives)
    graph = replace(state.graph, groups=groups, collectives=items)
    made = spread_context(replace(state, graph=graph, layout=replace(state.layout, dp=1, fsdp=2)), 4)

    assert {(4096, 512)} == {(i.bytes_in, i.bytes_out) for i in made.graph.collectives[: len(items)]}
    assert Layout(fsdp=2, cp=4).shards == made.graph.groups[0].size


def test_a_job_without_data_ranks_reduces_gradients_over_context_ranks(stateful: Stateful) -> None:
    """One all-reduce of its weights behind each unit's backward in the last micro batch, awaited by the optimizer."""
    state = stateful(2, 2, **BIG)
    made = spread_context(replace(state, graph=replace(state.graph, groups=())), 4)
    found = exchanged(made, "dp")
    optimizer = np.flatnonzero((made.anatomy.phase == int(Phase.OPTIMIZER)) & (made.graph.instance < 0))
    waits = made.graph.pred[made.graph.pred_ptr[optimizer[1]] : made.graph.pred_ptr[optimizer[1] + 1]]

    assert {"all_reduce"} == {kind for kind, *_ in found}
    assert sorted(2 * state.anatomy.parameters.astype(int)) == sorted(size for _, size, _ in found)
    assert len(found) == int((made.graph.kind[waits] == int(NodeKind.TRANSFER)).sum()) or len(waits)
    assert same(replace(state.graph, groups=()), spread_context(made, 1).graph)


def test_context_ranks_that_were_recorded_without_a_reduction_get_none(stateful: Stateful) -> None:
    """A capture with context ranks but no gradients between them keeps it so over more of them, and says so."""
    there = spread_context(stateful(4, 1, **BIG), 2)
    lanes = tuple(replace(lane, name="recorded") if lane.name == LANES["cp"] else lane for lane in there.graph.lanes)
    assert exchanged(there, "dp")
    kept = _without_inserted_gradients(replace(there, graph=replace(there.graph, lanes=lanes)))
    wider = spread_context(kept, 4)

    assert [] == exchanged(wider, "dp")
    assert any("reduce no gradients" in note for note in wider.health.notes)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_later_changes_reach_the_parts(stateful: Stateful, exchange: str) -> None:
    """A larger micro batch after the cut is the cut of a larger micro batch: bytes equal, times too."""
    state = stateful(4, 1, **BIG)
    one = resize_micro_batch(spread_context(state, 4, exchange), 8)
    other = spread_context(resize_micro_batch(state, 8), 4, exchange)

    assert exchanged(one) == exchanged(other)
    assert kernel_ns(one, Role.HEADS) == pytest.approx(kernel_ns(other, Role.HEADS), rel=1e-3)


def test_a_part_is_the_same_work_as_the_others(stateful: Stateful) -> None:
    """Causal halves: with an early and a late piece each, every rank's parts take the same time."""
    made = spread_context(stateful(4, 1, **BIG), 4)
    parts = [made.graph.name_of(node).endswith(PART) for node in range(len(made.graph))]
    times = made.graph.dur_ns[parts].reshape(2, 3)

    assert (times == times[:, :1]).all()
    assert 2 * times[0, 0] == pytest.approx(times[1, 0], rel=0.01)


def test_unfused_attention_is_told_by_its_sizes_and_grows_with_the_square(stateful: Stateful) -> None:
    """Batched products between tokens and passes over scores count as attention; products of experts do not."""
    state = stateful(4, 1)
    scores = Shape(Work.MATMUL, 2048, 2048, 128, 128)
    mixed = Shape(Work.MATMUL, 2048, 128, 2048, 128)
    softmax = Shape(Work.NORM, 2048 * 128, 2048)
    norm, experts = Shape(Work.NORM, 8192, 4096), Shape(Work.MATMUL, 1024, 4096, 512, 8)
    big = Ceilings(1e12, 1e15)
    shape = [scores if s is not None and s.work is Work.ATTENTION else s for s in state.work.shape]
    state = replace(state, work=replace(state.work, shape=tuple(shape)), ceilings=big)
    attends = attention_of(state)
    made = resize_sequence(state, 4096)
    grown = [s for s in made.work.shape if s is not None and s.work is Work.MATMUL and s.batch > 1]

    assert [True, True, True, False, False] == [attends(s) for s in (scores, mixed, softmax, norm, experts)]
    assert {scores.scaled(rows=2, columns=2)} == set(grown)
    assert seconds(grown[0], big) == pytest.approx(4 * seconds(scores, big), rel=0.01)


def test_uneven_pieces_and_unknown_exchanges_are_refused(stateful: Stateful) -> None:
    """Two causal halves a rank need a multiple of twice the degree."""
    state = stateful(4, 1)
    with pytest.raises(UsageError, match="cp=3 needs a multiple of 6 tokens a sample, and there are 2048"):
        spread_context(state, 3)
    with pytest.raises(UsageError, match="all_gather, ring, gather_scatter"):
        spread_context(state, 2, "magic")
    with pytest.raises(UsageError, match="1001 tokens a sample can't be cut"):
        resize_sequence(spread_context(state, 2), 1001)


def test_context_ranks_come_with_the_rest_of_a_layout(stateful: Stateful) -> None:
    """Context, tensor and data axes at once."""
    made = relayout(stateful(4, 1, 2, reduce_ns=1000, **BIG), Layout(dp=8, tp=2, cp=4))

    assert {"dp": (32, 2), "cp": (4, 2), "tp": (2, 1)} == {g.axis: (g.size, g.stride) for g in made.graph.groups}
    assert (KEYS // 8, KEYS // 2) == exchanged(made)[0][1:]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_job_keeps_its_way_of_exchanging_unless_asked_for_another(stateful: Stateful, exchange: str) -> None:
    """Told by what is issued; another degree keeps it, a layout changes it, and both are what they are from nothing."""
    state = stateful(4, 1, **BIG)
    two = spread_context(state, 2, exchange)

    assert exchange == measured_exchange(two)
    assert exchanged(spread_context(two, 4)) == exchanged(spread_context(state, 4, exchange))
    for other in EXCHANGES:
        made = relayout(two, Layout.parse(f"cp=2,exchange={other}"))
        assert exchanged(made) == exchanged(spread_context(state, 2, other)) and other == made.layout.exchange
    with pytest.raises(UsageError, match="exchange=magic must be one of all_gather, ring, gather_scatter"):
        Layout.parse("cp=2,exchange=magic")
