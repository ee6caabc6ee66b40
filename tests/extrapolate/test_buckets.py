"""Other bucket sizes: merged and split all-reduces, when they are ready, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.buckets import ddp_buckets, measured_caps, rebucket
from scaletrace.extrapolate.rewrite.removal import without_nodes
from scaletrace.extrapolate.rewrite.stage_buckets import EXACT, SHARED, staged_buckets
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

WORK_NS, RATE = 100, 10.0


def cost_ns(item: GraphCollective) -> float:
    """20 ns and a nanosecond for each 10 bytes."""
    return 20 + item.bytes_in / RATE


def _job(buckets: int, size: int = 1000, kernels: int = 4) -> Graph:
    """Two ranks: `kernels` of 25 ns before each bucket of 1,000 bytes (120 ns), and an optimizer that awaits them all."""
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    computed: list[list[int]] = [[], []]
    moved: list[list[int]] = [[], []]
    for _ in range(buckets):
        for rank in (0, 1):
            for _ in range(kernels):
                computed[rank] = [draft.node(NodeKind.KERNEL, WORK_NS // kernels, rank=rank, after=computed[rank])]
        arrivals = [(rank, [*computed[rank], *moved[rank][-1:]]) for rank in (0, 1)]
        nodes = draft.collective("all_reduce", 0, size, arrivals, 120)
        for rank, node in enumerate(nodes):
            moved[rank].append(node)
    for rank in (0, 1):
        draft.node(NodeKind.KERNEL, 10, rank=rank, after=[*computed[rank], *moved[rank]], name="sgd")
    return draft.graph()


def test_the_measured_size_changes_nothing() -> None:
    """A cap that every bucket fits alone, and no two together, gives back the same graph."""
    graph = _job(4)
    assert rebucket(graph, 1500, cost_ns) is graph


def test_merged_buckets_are_ready_with_their_last_part() -> None:
    """Four of 1,000 bytes become two of 2,000 (220 ns each), ready at 200 and 400; the second starts at 420."""
    graph = _job(4)
    merged = rebucket(graph, 2000, cost_ns)

    assert merged.is_topological()
    assert [2000, 2000] == [merged.collectives[i].bytes_in for i in sorted(set(merged.instance.tolist()) - {-1})]
    assert (100 + 4 * 120 + 10, 200 + 2 * 220 + 10) == (replay(graph).makespan_ns, replay(merged).makespan_ns)


def test_split_buckets_are_ready_with_their_share_of_the_work() -> None:
    """One of 1,000 in four of 250 (45 ns each): ready at 25, 50, 75 and 100, so that the last ends at 205."""
    graph = _job(1)
    split = rebucket(graph, 250, cost_ns)
    timeline = replay(split)
    arrivals = (split.kind == NodeKind.ARRIVE) & (split.rank == 0)

    assert [250] * 4 == [split.collectives[i].bytes_in for i in sorted(set(split.instance.tolist()) - {-1})]
    assert [25, 70, 115, 160] == timeline.start_ns[arrivals].tolist()
    assert 205 + 10 == timeline.makespan_ns


def test_bytes_are_conserved() -> None:
    """Whatever the cap, the new buckets carry what the old ones did."""
    graph = _job(5, size=1001)
    for cap in (1, 300, 1000, 1001, 2500, 10**6):
        new = rebucket(graph, cap, cost_ns) if cap > 1 else rebucket(graph, 7, cost_ns)
        carried = sum(new.collectives[i].bytes_in for i in set(new.instance.tolist()) - {-1})
        assert 5 * 1001 == carried


def test_a_bucket_of_nothing_is_refused() -> None:
    """Zero bytes hold no gradient."""
    with pytest.raises(UsageError, match="at least one byte"):
        rebucket(_job(1), 0, cost_ns)


def test_a_capture_can_be_stretched_with_other_buckets(samples: Path) -> None:
    """One bucket instead of two costs the overlap of the first; the collectives of a step are counted anew."""
    built = build(load(samples / "ddp_w4"))
    few, many = (extrapolate(built, sizes=[64], bucket_bytes=size).base.graph for size in (10**9, 200_000))

    assert 3 == len(set(few.instance.tolist()) - {-1})
    assert len(set(many.instance.tolist()) - {-1}) > 3 * 10


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "first", "cap", "expected"),
    [
        ([4] * 5, 8, 12, [2, 5]),
        ([4] * 5, 5, 100, [2, 5]),
        ([30, 1, 1], 8, 12, [1, 3]),
        ([8, 8], 8, 8, [1, 2]),
        ([3], 8, 8, [1]),
        ([], 8, 8, []),
    ],
)
def test_a_bucket_is_closed_by_what_fills_it(sizes: list[int], first: int, cap: int, expected: list[int]) -> None:
    """The gradient with which a bucket reaches its limit still belongs to it, and the first has a limit of its own."""
    assert expected == ddp_buckets(sizes, first, cap)


@pytest.mark.parametrize(
    ("sizes", "ends", "expected"),
    [
        ([MIB // 2] * 9, [2, 9], (MIB, 25 * MIB, True)),
        ([MIB // 2] * 9, [2, 4, 6, 8, 9], (MIB, MIB, True)),
        ([100] * 9, [3, 6, 9], (300, 300, True)),
        ([100] * 9, [9], (MIB, 25 * MIB, False)),
        ([100] * 9, [3, 5, 9], None),
        ([20 * MIB] * 5, [1, 3, 5], (MIB, 25 * MIB, True)),
    ],
)
def test_limits_are_found_from_recorded_buckets(
    sizes: list[int], ends: list[int], expected: tuple[int, int, bool] | None
) -> None:
    """The usual limits where they make the recorded buckets, else those that do; and whether others would too."""
    assert expected == measured_caps([(sizes, ends)])


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30), cap=st.integers(1, 200))
def test_found_limits_make_the_buckets_that_they_were_found_from(sizes: list[int], cap: int) -> None:
    """Whatever limit a job has, one is found that makes the same buckets."""
    ends = ddp_buckets(sizes, cap, cap)
    found = measured_caps([(sizes, ends)])

    assert found is not None and ends == ddp_buckets(sizes, *found[:2])


def state_of(folder: Path, job: str, layout: str) -> State:
    return open_state(build(load(folder / "gloo" / job)), Layout.parse(layout), Network(Cluster.load("gloo_10g")))


def by_stage(state: State) -> list[set[tuple[int, ...]]]:
    """For each stage (column 0) the bytes of the buckets of each of its steps, in order of their issuers."""
    graph, out = state.graph, []
    for rank in state.columns[0]:
        arrive = np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == rank))
        issuer = {
            node: graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]].tolist() for node in arrive.tolist()
        }
        host = {node: [u for u in before if graph.instance[u] < 0] for node, before in issuer.items()}
        steps: dict[int, list[int]] = {}
        for node in sorted(arrive.tolist(), key=lambda node: max(host[node], default=node)):
            item = graph.collectives[int(graph.instance[node])]
            if item.kind == "all_reduce":
                steps.setdefault(int(graph.step[node]), []).append(item.bytes_in)
        out.append({tuple(sizes) for sizes in steps.values()})
    return out


@pytest.mark.parametrize("job", ["ddp_w2", "ddp_w4", "ddp_w8"])
def test_stages_have_buckets_of_their_own(shared_data: Path, job: str) -> None:
    """Of five recorded buckets two reach over the border; each stage fills its own, also where a stall hid one."""
    state = state_of(shared_data, job, f"dp={job[-1]},mbs=1,seq=8")
    made = relayout(state, replace(state.layout, pp=2, microbatches=4))

    assert [{(33536, 33280, 16640)}, {(41344, 33280, 512)}] == by_stage(made)
    assert EXACT in made.health.notes
    timeline = replay(made.graph)
    steps = made.graph.step
    for rank in made.columns[0] + made.columns[1]:
        mine = made.graph.rank == rank
        moved = mine & (made.graph.kind == int(NodeKind.TRANSFER)) & ~made.anatomy.is_message
        works = mine & np.array(["Optimizer.step" in name for name in made.graph.names])[made.graph.name]
        for step in np.unique(steps[moved]).tolist():
            last = timeline.end_ns[moved & (steps == step)].max()
            assert last <= timeline.start_ns[works & (steps == step)].min()


def test_unknown_gradients_cut_buckets_by_share(stateful: Callable[..., State]) -> None:
    """Two buckets that are no runs of known weights: the one over the border is cut by the weights of the units on
    both sides (250 and 100), no byte is lost, and the guess is counted."""
    state = stateful(4, 2, 2, reduce_ns=1000)
    late = (state.graph.instance < 0) | (state.anatomy.unit < 3)
    less = without_nodes(state, ~late)
    made = relayout(less, replace(state.layout, pp=2))

    assert [{(1170, 4096)}, {(2926,)}] == by_stage(made)
    assert 1 == made.health.guessed[SHARED]
    assert 1000 * 2926 / 4096 == pytest.approx(max(made.graph.dur_ns[made.anatomy.unit == 3]), rel=0.5)


def test_buckets_within_stages_are_left_as_they_are(stateful: Callable[..., State]) -> None:
    """A reduction for each layer crosses no border, so the graph keeps its nodes."""
    state = stateful(4, 2, 2, reduce_ns=1000)

    assert staged_buckets(state, [(0, 1, 2), (3, 4, 5)]) is state
