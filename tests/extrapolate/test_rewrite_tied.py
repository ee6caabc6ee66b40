"""Weights that embedding and head share: how they are told, and what the first and last stage of a pipeline then sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import Role, Weight
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.batch import resize_micro_batch
from scaletrace.extrapolate.rewrite.depth import resize_hidden
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.tied import LEFT_OUT, NAME, of_embedding
from scaletrace.parse.build import build
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from tests.extrapolate.recordings import recorded
from tests.extrapolate.test_rewrite_layout import BIG

Stateful = Callable[..., State]
VOCABULARY, WIDTH = 1000, 4096
SHARED = 4 * VOCABULARY * WIDTH


def reducing(stateful: Stateful, copies: float, steps: int = 1) -> State:
    """Four layers on two data ranks, whose last bucket carries this many gradients of the vocabulary's matrix."""
    state = stateful(4, 4, 2, reduce_ns=500_000, steps=steps, **BIG)
    matrix = (Weight((VOCABULARY, WIDTH), Role.WHOLE),)
    weights = (matrix, *state.work.weights[1:-1], matrix)
    layers = 4 * sum(weight.elements for unit in weights[1:-1] for weight in unit)
    whole = round(layers + copies * SHARED)
    items = [
        replace(item, bytes_in=size, bytes_out=size)
        for at, item in enumerate(state.graph.collectives)
        for size in [whole - 3 * 4096 if at % 4 == 3 else 4096]
    ]
    graph = replace(state.graph, collectives=tuple(items))
    return replace(state, graph=graph, work=replace(state.work, weights=weights))


def sums(state: State) -> list[tuple[int, int, int, int]]:
    """Rank, step, bytes and stride of the members of all-reduces between stages."""
    graph = state.graph
    own = [of_embedding(item, graph.groups) for item in graph.collectives]
    nodes = np.flatnonzero(np.array([*own, False])[graph.instance] & (graph.kind == int(NodeKind.TRANSFER)))
    out = []
    for node in nodes.tolist():
        item = graph.collectives[graph.instance[node]]
        out.append((int(graph.rank[node]), int(graph.step[node]), item.bytes_in, graph.groups[item.group].stride))
    return sorted(out)


def test_the_first_and_the_last_stage_sum_a_shared_gradient(stateful: Stateful) -> None:
    """Once a step in every column, behind all other reductions and ahead of the optimizer."""
    made = pipeline(reducing(stateful, 1, steps=2), 4)

    assert [(rank, step, SHARED, 6) for rank in (0, 1, 6, 7) for step in (0, 1)] == sums(made)
    timeline = replay(made.graph)
    graph = made.graph
    names = np.array([graph.name_of(node) for node in range(len(graph))])
    mine = (graph.rank == 0) & (graph.step == 0)
    last = np.flatnonzero(mine & (names == NAME) & (graph.kind == int(NodeKind.TRANSFER)))
    before = mine & (graph.instance >= 0) & (graph.kind == int(NodeKind.TRANSFER)) & (names != names[last[0]])
    assert timeline.end_ns[before].max() <= timeline.start_ns[last[0]]
    optimizer = mine & (made.anatomy.phase == 3) & (graph.instance < 0) & (graph.kind == int(NodeKind.KERNEL))
    assert timeline.end_ns[last[0]] <= timeline.start_ns[optimizer].min()


@pytest.mark.parametrize(("copies", "note"), [(2, False), (1.5, True)])
def test_weights_that_are_not_known_to_be_shared_are_not_summed(stateful: Stateful, copies: float, note: bool) -> None:
    """Two gradients are two weights; where the bytes fit neither, what is left out is said."""
    made = pipeline(reducing(stateful, copies), 2)

    assert [] == sums(made)
    assert note == (LEFT_OUT in made.health.notes)


def test_other_degrees_keep_the_sum_between_the_ends(stateful: Stateful) -> None:
    """4 → 2 → 1 stages, and a V whose ends lie on one rank, which sums nothing."""
    state = reducing(stateful, 1)
    four = pipeline(state, 4)

    assert [(rank, 0, SHARED, 2) for rank in (0, 1, 2, 3)] == sums(pipeline(four, 2))
    assert [] == sums(pipeline(four, 1)) == sums(pipeline(state, 2, "ZBVZeroBubble", 2))
    assert len(state.graph) == len(pipeline(four, 1).graph)


def test_recorded_sums_move_to_the_new_ends(stateful: Stateful) -> None:
    """A recorded pipeline has them on its ends; cut into more stages, the new ends have them, as slow as they were."""
    two = pipeline(reducing(stateful, 1), 2)
    own = np.array([of_embedding(i, two.graph.groups) for i in two.graph.collectives] + [False])[two.graph.instance]
    slow = np.where(own, 3.0, 1.0) * two.anatomy.exact_ns
    measured = replace(two, source=None, anatomy=replace(two.anatomy, exact_ns=slow)).with_durations()
    made = pipeline(measured, 4)

    assert [0, 1, 6, 7] == [rank for rank, *_ in sums(made)]
    slowed = 3e9 * made.network.seconds("all_reduce", SHARED, 2, 6)
    named = np.array([made.graph.name_of(node) == NAME for node in range(len(made.graph))])
    moved = named & (made.graph.kind == int(NodeKind.TRANSFER))
    assert pytest.approx(slowed, rel=1e-3) == made.graph.dur_ns[moved].max()


def test_the_sum_grows_with_the_width_alone(stateful: Stateful) -> None:
    """Its bytes follow the weights, not the tokens; more data ranks lie between the stages."""
    made = pipeline(reducing(stateful, 1), 2)

    assert {2 * SHARED} == {size for _, _, size, _ in sums(resize_hidden(made, 2 * WIDTH))}
    assert {SHARED} == {size for _, _, size, _ in sums(resize_micro_batch(made, 8))}
    four = pipeline(reducing(stateful, 1), 4)
    assert {24} == {stride for *_, stride in sums(relayout(four, replace(four.layout, dp=8)))}
    assert Layout(dp=2, pp=4).span("pp").stride * 3 == sums(four)[0][3]


def test_recorded_models_tell_whether_weights_are_shared(tmp_path: Path) -> None:
    """A head that reads the embedding's weights leaves one gradient to accumulate, in one micro batch or three."""
    folder = recorded(tmp_path, "plain", "tied", "tied, accumulated")
    found = {}
    for path in folder.glob("*.json"):
        state = open_state(build(load(path)), Layout(), Network(Cluster.load("dgx_h100")))
        made = pipeline(state, 2, micro_batches=4)
        found[path.stem] = {(rank, size) for rank, _, size, _ in sums(made)}, LEFT_OUT in made.health.notes

    both = {(0, 4 * 128 * 64), (1, 4 * 128 * 64)}
    assert {"plain": (set(), False), "tied": (both, False), "tied, accumulated": (both, False)} == found
