"""Shapes that no operator recorded, from weights and the bytes of collectives."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from scaletrace.extrapolate.inferred import BLIND, TOLD, Sizes, _products, with_inferred_shapes
from scaletrace.extrapolate.kernels import Ceilings, Shape
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import NodeWork
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import GraphCollective, GraphGroup

Stateful = Callable[..., State]
H100 = Ceilings(8e14, 2.8e12, 132, 2e-6)
WIDTH, TOKENS = 4096, 8192


def blind(state: State, groups: list[GraphGroup], items: list[GraphCollective]) -> tuple[State, NodeWork]:
    """The state without shapes, all layers' kernels products, and its collectives replaced by these in turn."""
    names = tuple(name.replace("gemm", "nvjet_gemm") for name in state.graph.names)
    collectives = tuple(items[at % len(items)] for at in range(len(state.graph.collectives)))
    graph = replace(state.graph, names=names, groups=tuple(groups), collectives=collectives)
    work = replace(state.work, shape=(None,) * len(graph))
    work.health.guessed[BLIND] += 100
    return replace(state, graph=graph), work


def shapes_of(state: State, work: NodeWork) -> list[Shape]:
    """Known shapes of the forward pass, in order."""
    forward = state.anatomy.phase == int(Phase.FORWARD)
    return [shape for node, shape in enumerate(work.shape) if shape is not None and forward[node]]


def test_width_is_that_of_what_is_gathered_and_tokens_are_what_is_reduced_over_it(stateful: Stateful) -> None:
    """12 h² gathered a layer in bf16 are h; a tensor all-reduce of t · h elements tells t."""
    state = stateful(4, 1, 2, reduce_ns=1000)
    gathered = 12 * WIDTH**2 * 2
    state, work = blind(
        state,
        [GraphGroup("fsdp", 2, 1), GraphGroup("tp", 2, 1)],
        [GraphCollective("all_gather", 0, gathered // 2, gathered),
         GraphCollective("all_reduce", 1, TOKENS * WIDTH * 2, TOKENS * WIDTH * 2)],
    )  # fmt: skip
    made = with_inferred_shapes(state.graph, state.anatomy, work, Layout(fsdp=2, mbs=1, seq=1), H100)
    found = shapes_of(state, made)

    assert {(TOKENS, WIDTH)} == {(shape.rows, shape.depth) for shape in found}
    assert 2 * 2 * 2 * 4 == made.health.guessed[TOLD] * 2
    assert 100 - 16 == made.health.guessed[BLIND]
    assert BLIND in work.health.guessed and TOLD not in work.health.guessed


def test_tokens_alone_follow_from_the_time_of_the_products(stateful: Stateful) -> None:
    """Without a tensor collective a layer's products tell how many tokens their weights can have met."""
    state = stateful(4, 1, 2, reduce_ns=1000, forward_ns=10_000_000)
    gathered = 12 * WIDTH**2 * 2
    state, work = blind(state, [GraphGroup("fsdp", 2, 1)], [GraphCollective("all_gather", 0, gathered // 2, gathered)])
    made = with_inferred_shapes(state.graph, state.anatomy, work, Layout(fsdp=2, mbs=1, seq=1), H100)

    assert 0.01 * H100.flops / (2 * 12 * WIDTH**2) == pytest.approx(shapes_of(state, made)[0].rows)


def test_nothing_is_told_where_nothing_tells_and_what_is_recorded_stays(stateful: Stateful) -> None:
    """No collective of a layer: the work is left as it is; so is one with a recorded product."""
    state = stateful(4, 1)
    _, work = blind(state, [], [])

    assert work is with_inferred_shapes(state.graph, state.anatomy, work, Layout(mbs=1, seq=1), H100)
    assert state.work is with_inferred_shapes(state.graph, state.anatomy, state.work, Layout(), H100)


@pytest.mark.parametrize(
    ("count", "tp", "expected"),
    [
        (4, 1, [(3 * 64, 64), (64, 64), (256, 64), (64, 256)]),
        (4, 2, [(3 * 32, 64), (64, 32), (128, 64), (64, 128)]),
        (7, 1, [(64, 64)] * 4 + [(512 / 3, 64)] * 2 + [(64, 512 / 3)]),
        (3, 1, [(64, 64)] * 3),
    ],
)
def test_products_of_a_layer_by_their_number(count: int, tp: int, expected: list[tuple[float, float]]) -> None:
    """Attention and MLP, gated or not, divided over tensor ranks; backward has two of each from the last to the first."""
    sizes = Sizes(128, 64, 256, 2)
    forward = [shape for shape in _products(count, sizes, tp, False) if shape is not None]
    backward = [shape for shape in _products(2 * count, sizes, tp, True) if shape is not None]

    assert expected == [(shape.columns, shape.depth) for shape in forward]
    assert [shape for shape in reversed(forward) for _ in range(2)] == backward
