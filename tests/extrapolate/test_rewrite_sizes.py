"""Depth, width, micro batches, length and precision: what grows with what, and every way there and back."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import Role, Weight
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.batch import resize_micro_batch
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.depth import measured_width, resize_hidden, resize_layers
from scaletrace.extrapolate.rewrite.precision import measured_bytes, reduce_gradients
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphCollective
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from tests.extrapolate.test_rewrite_layout import BIG, kernel_ns, same

Stateful = Callable[..., State]
WIDTH = 4096


def sizes(state: State, axis: str) -> set[int]:
    """Bytes of the collectives of an axis that nodes belong to."""
    graph = state.graph
    used = np.unique(graph.instance[graph.instance >= 0]).tolist()
    items = [graph.collectives[at] for at in used]
    return {item.bytes_in for item in items if item.group >= 0 and graph.groups[item.group].axis == axis}


@pytest.mark.parametrize("hidden", [1024, 2048, 8192, 12288])
def test_a_width_and_back_gives_the_same_graph(stateful: Stateful, hidden: int) -> None:
    """4,096 → N' → 4,096 returns every duration and byte, under tensor ranks too; buckets that shrink are rounded once."""
    for degree in (1, 2):
        state = tensor(stateful(4, 2, 2, reduce_ns=500_000, **BIG), degree)
        there = resize_hidden(state, hidden)

        back = resize_hidden(there, WIDTH)
        off = [a.bytes_in - b.bytes_in for a, b in zip(state.graph.collectives, back.graph.collectives, strict=True)]

        assert same(state.graph, back.graph) or hidden < WIDTH
        assert np.abs(off).max() <= (WIDTH / hidden) ** 2 and np.abs(state.graph.dur_ns - back.graph.dur_ns).max() <= 2
        assert state.graph.dur_ns.tolist() != there.graph.dur_ns.tolist()


def test_matrices_grow_with_the_square_of_the_width_and_the_rest_in_proportion(stateful: Stateful) -> None:
    """Twice the width: four times the products, twice attention and norms, four times the gradients of the layers."""
    state = replace(stateful(4, 1, 2, reduce_ns=500_000, **BIG), ceilings=Ceilings(1e12, 1e15))
    made = resize_hidden(state, 2 * WIDTH)

    assert [4, 4, 2] == [
        round(kernel_ns(made, role) / kernel_ns(state, role), 2) for role in (Role.COLUMN, Role.ROW, Role.HEADS)
    ]
    old = sum(weight.elements for unit in state.work.weights for weight in unit)
    new = sum(weight.elements for unit in made.work.weights for weight in unit)
    assert {round(4096 * new / old)} == sizes(made, "dp")
    assert 2 * WIDTH == measured_width(made) == made.layout.hidden


def with_router(state: State, weights: list[tuple[int, ...]], products: list[Shape]) -> State:
    """The state with other weights in its layers, and with these products in turn in place of their own."""
    unit = tuple(Weight(dims, Role.WHOLE) for dims in weights)
    layers = tuple(unit if is_layer else () for is_layer in state.anatomy.is_layer)
    turn = cycle(products)
    shapes = [None if shape is None else next(turn) for shape in state.work.shape]
    return replace(state, work=replace(state.work, weights=layers, shape=tuple(shapes)))


@pytest.mark.parametrize(
    ("weights", "products", "wider"),
    [
        ([(8, WIDTH), (8,), (WIDTH, WIDTH)], [Shape(Work.MATMUL, 64, WIDTH, WIDTH, 8)], [(8, 2 * WIDTH), (8,), (2 * WIDTH, 2 * WIDTH)]),
        ([(4, WIDTH), *[(512, WIDTH), (WIDTH, 512)] * 4], [], [(4, 2 * WIDTH), *[(1024, 2 * WIDTH), (2 * WIDTH, 1024)] * 4]),
        ([(2, WIDTH), *[(512, WIDTH)] * 3], [], [(4, 2 * WIDTH), *[(1024, 2 * WIDTH)] * 3]),
    ],
    ids=["grouped", "one by one", "two rows and three matrices"],
)  # fmt: skip
def test_routers_keep_their_columns(
    stateful: Stateful, weights: list[tuple[int, ...]], products: list[Shape], wider: list[tuple[int, ...]]
) -> None:
    """Twice the width: a router has as many columns as there are experts, told by grouped or by equal products."""
    experts = weights[0][0]
    gate = Shape(Work.MATMUL, 1_000_000, experts, WIDTH)
    chosen = Shape(Work.ELEMENTWISE, 1_000_000, experts)
    state = with_router(stateful(4, 1, **BIG), weights, [gate, chosen, *products])
    made = resize_hidden(replace(state, ceilings=Ceilings(1e12, 1e15)), 2 * WIDTH)

    for unit, is_layer in zip(made.work.weights, made.anatomy.is_layer, strict=True):
        assert not is_layer or wider == [weight.dims for weight in unit]
    rows = wider[0][0]
    assert {(rows, 2 * WIDTH), (rows, 1)} <= {(s.columns, s.depth) for s in made.work.shape if s is not None}


def test_activations_of_tensor_and_pipeline_ranks_grow_with_the_width(stateful: Stateful) -> None:
    """Bytes over tp and pp double with the width, as they do with the length and the micro batch."""
    state = pipeline(tensor(stateful(4, 4, **BIG), 2), 2)

    for change in (lambda s: resize_hidden(s, 2 * WIDTH), lambda s: resize_sequence(s, 4096),
                   lambda s: resize_micro_batch(s, 8)):  # fmt: skip
        made = change(state)
        for axis in ("tp", "pp"):
            assert {2 * size for size in sizes(state, axis)} == sizes(made, axis)
        assert 2 * state.anatomy.boundary_bytes == made.anatomy.boundary_bytes


def test_gathered_units_grow_to_the_byte(stateful: Stateful) -> None:
    """FSDP over 8 ranks of a layer whose rows do not divide: the padding of the wider matrix, and half that of a head."""
    state = stateful(2, 1, 8, reduce_ns=1000, **BIG)
    units = ((), (Weight((100, 12), Role.COLUMN),), (Weight((12, 100), Role.ROW),), (Weight((50, 12), Role.WHOLE),))
    whole = [4 * sharded_elements([unit[0].dims], 8) for unit in units if unit]
    items = [GraphCollective("all_gather", 0, size // 8, size) for size in whole]
    collectives = tuple(items[at % 3] for at in range(len(state.graph.collectives)))
    groups = (replace(state.graph.groups[0], axis="fsdp"),)
    graph = replace(state.graph, collectives=collectives, groups=groups)
    blank = tuple(None for _ in state.work.shape)
    made = resize_hidden(
        replace(state, graph=graph, work=replace(state.work, weights=units, shape=blank)), 24
    )  # fmt: skip

    assert [4 * sharded_elements([dims], 8) for dims in ((200, 24), (24, 200))] == [
        item.bytes_out for item in made.graph.collectives[:2]
    ]
    assert [(200, 24), (24, 200), (50, 24)] == [unit[0].dims for unit in made.work.weights if unit]


def test_heads_keep_their_size(stateful: Stateful) -> None:
    """A width that is no multiple of a head is refused by the head's size."""
    with pytest.raises(UsageError, match="hidden=4100 is no multiple of the 128 of each head"):
        resize_hidden(stateful(4, 1), 4100)


@pytest.mark.parametrize(("layers", "stages"), [(2, 1), (3, 1), (13, 1), (2, 2), (8, 2)])
def test_a_depth_and_back_gives_the_same_step(stateful: Stateful, layers: int, stages: int) -> None:
    """4 → N' → 4 layers, in a pipeline too where they divide: the same nodes, bytes and step."""
    state = stateful(4, 4, 2, reduce_ns=500_000, steps=2, **BIG)
    state = pipeline(state, stages) if stages > 1 else state
    there = resize_layers(state, layers)
    back = resize_layers(there, 4)

    assert len(state.graph) == len(back.graph) and layers == there.layout.layers
    assert sorted(state.graph.dur_ns.tolist()) == sorted(back.graph.dur_ns.tolist())
    assert replay(state.graph).makespan_ns == replay(back.graph).makespan_ns
    assert sizes(state, "dp") == sizes(back, "dp")


def test_buckets_hold_what_the_weights_do_at_any_depth(stateful: Stateful) -> None:
    """Gradients of data ranks are all parameters: with one bucket for two layers at any number of layers as well."""
    state = stateful(4, 1, 2, reduce_ns=500_000, **BIG)
    per_parameter = 4 * 4096 / state.anatomy.parameters.sum()
    for layers in (2, 7, 16):
        made = resize_layers(state, layers)
        used = np.unique(made.graph.instance[made.graph.instance >= 0]).tolist()
        total = sum(made.graph.collectives[at].bytes_in for at in used)

        assert per_parameter * made.anatomy.parameters.sum() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_precision_and_back_gives_the_same_graph(stateful: Stateful, name: str) -> None:
    """fp32 → bf16 → fp32 returns every byte and duration; parameters and scalars keep theirs."""
    state = stateful(4, 2, 2, reduce_ns=500_000, **BIG)
    items = tuple(replace(item, dtype="Float") for item in state.graph.collectives)
    state = replace(state, graph=replace(state.graph, collectives=items))
    there = reduce_gradients(state, name)

    assert {4096 // {"bf16": 2, "fp8": 4}[name]} == sizes(there, "dp")
    assert {"BFloat16" if name == "bf16" else "Float8"} == {item.dtype for item in there.graph.collectives}
    assert there.graph.dur_ns.sum() < state.graph.dur_ns.sum()
    assert same(state.graph, reduce_gradients(there, "fp32").graph)


def test_the_measured_precision_is_told_by_types_or_by_the_weights(stateful: Stateful) -> None:
    """A collective's own type first, else bytes over weights; without either it counts as fp32, and that is said."""
    state = stateful(4, 1, 2, reduce_ns=1000)
    elements = sum(weight.elements for unit in state.work.weights for weight in unit)
    per_bucket = tuple(
        replace(item, bytes_in=elements // 2, bytes_out=elements // 2) for item in state.graph.collectives
    )
    typed = tuple(replace(item, dtype="BFloat16") for item in state.graph.collectives)

    assert 2.0 == measured_bytes(replace(state, graph=replace(state.graph, collectives=per_bucket)))
    assert 2.0 == measured_bytes(replace(state, graph=replace(state.graph, collectives=typed)))
    assert measured_bytes(state) is None
    assert 1 == sum(n for guess, n in reduce_gradients(state, "bf16").health.guessed.items() if "fp32" in guess)
    with pytest.raises(UsageError, match="one of fp32, bf16, fp16, fp8, not 'int3'"):
        reduce_gradients(state, "int3")


def test_scalars_and_losses_keep_their_precision(stateful: Stateful) -> None:
    """Four bytes of a loss stay four bytes."""
    state = stateful(4, 1, 2, reduce_ns=1000)
    items = (GraphCollective("all_reduce", 0, 4, 4), *state.graph.collectives[1:])
    made = reduce_gradients(replace(state, graph=replace(state.graph, collectives=items)), "bf16")

    assert [4, 2048] == [item.bytes_in for item in made.graph.collectives[:2]]


def test_sizes_come_with_a_layout(stateful: Stateful) -> None:
    """Depth, width and precision are asked for as any axis is, and compose in one order however they are written."""
    state = stateful(4, 4, 2, reduce_ns=500_000, **BIG)
    one = relayout(state, Layout.parse("dp=4,tp=2,layers=8,hidden=8192,grads=bf16,seq=4096"))
    other = relayout(state, Layout.parse("grads=bf16,seq=4096,hidden=8192,tp=2,layers=8,dp=4"))
    plain = relayout(state, Layout.parse("dp=4,tp=2,seq=4096"))

    assert same(one.graph, other.graph) and (8, 8192, "bf16") == (
        one.layout.layers,
        one.layout.hidden,
        one.layout.grads,
    )
    assert one.anatomy.layers == 2 * plain.anatomy.layers
    assert plain.layout == relayout(plain, Layout(dp=4, tp=2)).layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("dp=1,layers=-1", "needs a whole number"), ("dp=1,grads=int8", "grads=int8 must be one of fp32"),
     ("dp=1,recompute=some", "must be one of none, selective, full, off")],
)  # fmt: skip
def test_sizes_that_can_not_be_are_refused(text: str, sentence: str) -> None:
    """Each wrong part of a layout is named."""
    with pytest.raises(UsageError, match=sentence):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("job", "measured"),
    [("ddp_w2", "dp=2,mbs=1,seq=8"), ("fsdp2_w2", "fsdp=2,mbs=1,seq=8"), ("tp_w2", "tp=2,mbs=1,seq=8")],
)
def test_recorded_jobs_go_there_and_back(shared_data: Path, job: str, measured: str) -> None:
    """Sizes of real captures: every change and its inverse give the step back, every other size another step."""
    built = build(load(shared_data / "gloo" / job))
    state = open_state(built, Layout.parse(measured), Network(Cluster.load("gloo_10g")))
    width = measured_width(state)
    changes: list[tuple[Callable[[State], State], Callable[[State], State]]] = [
        (lambda s: resize_hidden(s, 4 * width), lambda s: resize_hidden(s, width)),
        (lambda s: resize_micro_batch(s, 3), lambda s: resize_micro_batch(s, 1)),
        (lambda s: resize_sequence(s, 32), lambda s: resize_sequence(s, 8)),
    ]
    for there, back in changes:
        changed = there(state)
        again = back(changed)

        assert np.abs(state.graph.dur_ns - again.graph.dur_ns).max() <= 1
        assert changed.graph.dur_ns.sum() > state.graph.dur_ns.sum()
        assert [i.bytes_in for i in state.graph.collectives] == [i.bytes_in for i in again.graph.collectives]
    assert any(int(p) == int(Phase.FORWARD) for p in state.anatomy.phase)
    assert Work.MATMUL in {shape.work for shape in state.work.shape if isinstance(shape, Shape)}
