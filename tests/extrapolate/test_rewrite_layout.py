"""Layout rewrites on a small layered job: identities, what grows with what, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.kernels import Ceilings, Work, anchored
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import Role, layer_roles
from scaletrace.extrapolate.relayout import predict, relayout
from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches, resize_micro_batch
from scaletrace.extrapolate.rewrite.checkpointing import checkpoint
from scaletrace.extrapolate.rewrite.cp import spread_context
from scaletrace.extrapolate.rewrite.depth import resize_hidden, resize_layers
from scaletrace.extrapolate.rewrite.device import move
from scaletrace.extrapolate.rewrite.precision import reduce_in
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, message_ns
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

Stateful = Callable[..., State]
BIG = {"forward_ns": 10_000_000}


def same(one: Graph, other: Graph) -> bool:
    """Equal in every column, edge and collective, in the same order."""
    names = ("dur_ns", "release_ns", "kind", "rank", "lane", "name", "step", "instance", "pred_ptr", "pred", "lag_ns",
             "edge_kind")  # fmt: skip
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and (
        one.collectives == other.collectives and one.names == other.names and one.lanes == other.lanes
    )


def kernel_ns(state: State, role: Role) -> int:
    """Time of all kernels of a role in the layers."""
    layer = np.array([*state.anatomy.is_layer, False])[state.anatomy.unit]
    mine = (state.work.role == int(role)) & (state.graph.kind == int(NodeKind.KERNEL)) & layer
    return int(state.graph.dur_ns[mine].sum())


def kinds(state: State, axis: str) -> dict[str, int]:
    """How many collectives of each kind the graph has on an axis."""
    used = set(state.graph.instance[state.graph.instance >= 0].tolist())
    out: dict[str, int] = {}
    for at, item in enumerate(state.graph.collectives):
        if at in used and state.graph.groups[item.group].axis == axis:
            out[item.kind] = out.get(item.kind, 0) + 1
    return out


CHANGES: dict[str, tuple[Callable[[State], State], Callable[[State], State]]] = {
    "tensor 4": (lambda s: tensor(s, 4), lambda s: tensor(s, 1)),
    "tensor 2, 8": (lambda s: tensor(tensor(s, 2), 8), lambda s: tensor(tensor(s, 2), 1)),
    "micro batch": (lambda s: resize_micro_batch(s, 12), lambda s: resize_micro_batch(s, 4)),
    "sequence": (lambda s: resize_sequence(s, 6144), lambda s: resize_sequence(s, 2048)),
    "context": (lambda s: spread_context(s, 4), lambda s: spread_context(s, 1)),
    "width": (lambda s: resize_hidden(s, 12288), lambda s: resize_hidden(s, 4096)),
    "gradients": (lambda s: reduce_in(s, 2, 4), lambda s: reduce_in(s, 4, 2)),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_and_its_inverse_give_the_same_graph(stateful: Stateful, name: str) -> None:
    """There and back returns every duration, edge and byte."""
    state = stateful(4, 2, 2, reduce_ns=500_000, **BIG)
    there, back = CHANGES[name]
    changed = there(state)

    assert not same(state.graph, changed.graph)
    assert same(state.graph, back(changed).graph)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: tensor(s, 1),
        lambda s: resize_micro_batch(s, 4),
        lambda s: resize_sequence(s, 2048),
        lambda s: repeat_micro_batches(s, 2),
        lambda s: resize_layers(s, 4),
        lambda s: spread_context(s, 1),
        lambda s: relayout(s, Layout(dp=2)),
        lambda s: relayout(s, s.layout),
    ],
)
def test_the_measured_layout_changes_nothing(stateful: Stateful, change: Callable[[State], State]) -> None:
    """Asking for what was measured gives the measured graph, bit for bit."""
    state = stateful(4, 2, 2, reduce_ns=500_000, **BIG)

    assert same(state.graph, change(state).graph)


def test_tensor_parallelism_splits_products_and_leaves_norms(stateful: Stateful) -> None:
    """Products and attention follow the ratio of their divided shapes, norms keep their time, launches too."""
    state = stateful(4, 1, **BIG)
    made = tensor(state, 4)
    for role, split in (
        (Role.COLUMN, {"columns": 1 / 4}),
        (Role.ROW, {"depth": 1 / 4}),
        (Role.HEADS, {"batch": 1 / 4}),
    ):
        old = next(s for s, r in zip(state.work.shape, state.work.role, strict=True) if r == role and s)
        each = 1e-9 * BIG["forward_ns"]
        factor = anchored(each, old, old.scaled(**split), state.ceilings) / each

        assert kernel_ns(state, role) * factor == pytest.approx(kernel_ns(made, role), rel=1e-3)
    assert kernel_ns(state, Role.WHOLE) == kernel_ns(made, Role.WHOLE)
    launches = [np.sort(s.graph.dur_ns[s.graph.kind == int(NodeKind.LAUNCH)]).tolist() for s in (state, made)]
    assert launches[0] == launches[1]


def test_tensor_collectives_follow_megatron(stateful: Stateful) -> None:
    """One all-reduce behind each row product and each column's backward; with sequence parallelism a gather and a
    scatter in place of each half."""
    state = stateful(4, 3, **BIG)

    assert {"all_reduce": 2 * 3} == kinds(tensor(state, 2), "tp")
    # and, of the two norms, one reduction of its weight's gradient for each micro batch
    both = {"all_gather": 2 * 3, "reduce_scatter": 2 * 3, "all_reduce": 2 * 3}
    assert both == kinds(tensor(state, 2, True), "tp")
    assert {} == kinds(tensor(tensor(state, 2, True), 1), "tp")


def test_compute_waits_for_tensor_collectives(stateful: Stateful) -> None:
    """On a slow network the step grows by the collectives, since nothing hides them."""
    state = stateful(4, 1, gap_ns=0, launch_ns=0, **BIG)
    made = tensor(state, 2)
    transfers = int(made.graph.dur_ns[(made.graph.kind == int(NodeKind.TRANSFER))].sum())
    kernels = int(made.graph.dur_ns[made.graph.kind == int(NodeKind.KERNEL)].sum())

    assert kernels + transfers == pytest.approx(replay(made.graph).makespan_ns, rel=0.001)


def test_sequence_parallelism_splits_norms_too(stateful: Stateful) -> None:
    """With sequence parallelism norms work on their share of the tokens."""
    state = stateful(4, 1, **BIG)

    assert 0.2 < kernel_ns(tensor(state, 4, True), Role.WHOLE) / kernel_ns(state, Role.WHOLE) < 0.35


@pytest.mark.parametrize(("degree", "sentence"), [(3, "tp=3 does not divide"), (5, "tp=5 does not divide")])
def test_uneven_divisions_are_refused(stateful: Stateful, degree: int, sentence: str) -> None:
    """A degree that does not divide a matrix or the heads is refused by its size."""
    with pytest.raises(UsageError, match=sentence):
        tensor(stateful(4, 1), degree)


@pytest.mark.parametrize(
    ("heads", "shared", "degree", "sentence"),
    [
        (6, 1, 4, "tp=4 does not divide 6 heads of attention"),
        (32, 8, 8, r"does not divide 4 heads of attention \(keys and"),
    ],
)
def test_heads_are_never_cut(stateful: Stateful, heads: int, shared: int, degree: int, sentence: str) -> None:
    """Heads of queries, and the fewer of keys and values, stay whole, however many samples a micro batch has."""
    state = stateful(4, 1)
    shapes = tuple(
        replace(s, batch=4.0 * heads, queries_per_key=shared) if s and s.work is Work.ATTENTION else s
        for s in state.work.shape
    )
    with pytest.raises(UsageError, match=sentence):
        tensor(replace(state, work=replace(state.work, shape=shapes)), degree)


def test_longer_samples_cost_attention_their_square(stateful: Stateful) -> None:
    """Twice the tokens: four times the attention, about twice the rest; context ranks take it back."""
    state = stateful(4, 1, **BIG)
    longer = resize_sequence(state, 4096)
    spread = spread_context(longer, 2)

    assert kernel_ns(longer, Role.HEADS) / kernel_ns(state, Role.HEADS) == pytest.approx(4, rel=0.05)
    assert kernel_ns(longer, Role.COLUMN) / kernel_ns(state, Role.COLUMN) == pytest.approx(2, rel=0.05)
    assert kernel_ns(spread, Role.HEADS) / kernel_ns(state, Role.HEADS) == pytest.approx(2, rel=0.05)
    assert kernel_ns(state, Role.COLUMN) == pytest.approx(kernel_ns(spread, Role.COLUMN), rel=1e-6)


def test_gradients_do_not_grow_with_the_batch(stateful: Stateful) -> None:
    """A larger micro batch moves the same gradients and hands larger activations to the next stage."""
    state = stateful(4, 1, 2, reduce_ns=1000, **BIG)
    made = resize_micro_batch(state, 8)

    assert state.graph.collectives == made.graph.collectives
    assert 2 * state.anatomy.boundary_bytes == made.anatomy.boundary_bytes


def test_accumulated_micro_batches_reduce_once(stateful: Stateful) -> None:
    """From one micro batch to four: four times the compute, and gradients reduced behind the last alone."""
    state = stateful(4, 1, 2, reduce_ns=1000, **BIG)
    made = repeat_micro_batches(state, 4)
    always = repeat_micro_batches(state, 4, accumulate=False)

    assert 4 * kernel_ns(state, Role.COLUMN) == kernel_ns(made, Role.COLUMN)
    assert {"all_reduce": 4} == kinds(made, "dp")
    assert {"all_reduce": 16} == kinds(always, "dp")


def test_micro_batches_there_and_back(stateful: Stateful) -> None:
    """3 → 7 → 3 micro batches give the same step."""
    state = stateful(4, 3, 2, reduce_ns=1000, **BIG)
    back = repeat_micro_batches(repeat_micro_batches(state, 7), 3)

    assert len(state.graph) == len(back.graph)
    assert replay(state.graph).makespan_ns == replay(back.graph).makespan_ns


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 9])
def test_another_depth_repeats_or_drops_inner_layers(stateful: Stateful, layers: int) -> None:
    """Compute follows the number of layers, collectives stay one a layer, and the optimizer follows the parameters."""
    state = stateful(4, 2, 2, reduce_ns=1000)
    made = resize_layers(state, layers)
    work = (made.anatomy.phase == int(Phase.FORWARD)) & (made.graph.kind == int(NodeKind.KERNEL))
    optimizer = (made.anatomy.phase == int(Phase.OPTIMIZER)) & (made.graph.kind == int(NodeKind.KERNEL))

    assert layers == made.anatomy.layers
    assert 2 * 2 * (layers + 2) == int(work.sum())
    assert {"all_reduce": layers} == kinds(made, "dp")
    assert {round(960 * (100 * layers + 100) / 500)} == set(made.graph.dur_ns[optimizer].tolist())


def test_depth_there_and_back(stateful: Stateful) -> None:
    """4 → 9 → 4 layers give the same step."""
    state = stateful(4, 2)
    back = resize_layers(resize_layers(state, 9), 4)

    assert len(state.graph) == len(back.graph)
    assert replay(state.graph).makespan_ns == replay(back.graph).makespan_ns


def test_recomputation_adds_one_forward_of_every_layer(stateful: Stateful) -> None:
    """Full checkpointing repeats the layers' forward, not embedding and head, and only once."""
    state = stateful(4, 2, launch_ns=0, gap_ns=0)
    made = checkpoint(state)

    assert 2 * 4 * 100 == replay(made.graph).makespan_ns - replay(state.graph).makespan_ns
    with pytest.raises(UsageError, match="recomputes its activations already"):
        checkpoint(made)


def test_another_device_scales_kernels_and_keeps_host_work(stateful: Stateful) -> None:
    """Twice the FLOP halves products, three times the bandwidth thirds norms; launches stay, and so does the inverse."""
    state = stateful(4, 1, **BIG)
    own = state.ceilings
    faster = Ceilings(own.flops * 2, own.memory_Bps * 3, own.sms, own.floor_s)
    made = move(state, faster)
    launches = state.graph.kind == int(NodeKind.LAUNCH)

    assert kernel_ns(made, Role.COLUMN) / kernel_ns(state, Role.COLUMN) == pytest.approx(1 / 2, rel=0.01)
    norm = next(s for s, r in zip(state.work.shape, state.work.role, strict=True) if r == Role.WHOLE and s)
    blind = anchored(1e-2, norm, norm, own, faster) / 1e-2
    shaped = np.array([s is not None for s in state.work.shape]) & (state.work.role == int(Role.WHOLE))
    assert state.graph.dur_ns[shaped].sum() * blind == pytest.approx(made.graph.dur_ns[shaped].sum(), rel=1e-3)
    assert state.graph.dur_ns[launches].tolist() == made.graph.dur_ns[launches].tolist()
    assert same(state.graph, move(made, own).graph)


def test_gradients_in_half_the_bytes(stateful: Stateful) -> None:
    """Reductions move half as much and are faster; nothing else changes."""
    state = stateful(4, 1, 2, reduce_ns=1_000_000)
    made = reduce_in(state, 2, 4)

    assert {2048} == {item.bytes_in for item in made.graph.collectives}
    assert int(made.graph.dur_ns.sum()) <= int(state.graph.dur_ns.sum())
    with pytest.raises(UsageError, match="must be positive"):
        reduce_in(state, 0, 4)


def test_a_layout_is_reached_in_one_call(stateful: Stateful) -> None:
    """Tensor, pipeline, micro batches and data ranks at once: groups, counts and messages are those of the parts."""
    state = stateful(4, 1, 2, reduce_ns=1000, **BIG)
    made = relayout(state, Layout(dp=8, tp=2, pp=2, microbatches=4))

    assert made.layout == Layout(dp=8, tp=2, pp=2, mbs=4, microbatches=4, seq=2048)
    assert {"send": 2 * 4 * 2} == kinds(made, "pp")
    assert {"all_reduce": 4} == kinds(made, "dp")
    assert {"all_reduce": 2 * 4 * 2} == kinds(made, "tp")
    assert {"dp": 8, "tp": 2, "pp": 2} == {group.axis: group.size for group in made.graph.groups}


def test_a_measured_message_takes_as_long_as_its_receiver_waited(stateful: Stateful) -> None:
    """A send ends when its bytes are buffered, so the receiver's side is the message's time; half the bytes take less."""
    state = pipeline(stateful(4, 2), 2)
    graph = state.graph
    ends = np.array(["RECV" in name for name in graph.names])[graph.name]
    transfers = graph.kind == int(NodeKind.TRANSFER)
    dur_ns = np.where(transfers, np.where(ends, 900_000, 10), graph.dur_ns)
    time = message_ns(replace(state, graph=replace(graph, dur_ns=dur_ns)))

    assert 900_000 == time(1024, 0, 1)
    assert 0 < time(512, 0, 1) <= 900_000 <= time(2048, 0, 1)


def test_replicas_of_shards_reduce_what_was_scattered(stateful: Stateful) -> None:
    """From FSDP over 8 ranks to 16 replicas of 4: every scatter is followed by a reduction of the new, larger shard."""
    state = stateful(4, 1, 8, reduce_ns=1000)
    groups = (replace(state.graph.groups[0], axis="fsdp"),)
    items = tuple(replace(i, kind="reduce_scatter", bytes_in=4096, bytes_out=512) for i in state.graph.collectives)
    graph = replace(state.graph, groups=groups, collectives=items)
    made = relayout(replace(state, graph=graph, layout=replace(state.layout, dp=1, fsdp=8)), Layout(dp=16, fsdp=4))

    assert {"reduce_scatter": 4} == kinds(made, "fsdp")
    assert {(1024, 1024, 16)} == {
        (item.bytes_in, item.bytes_out, made.graph.groups[item.group].size)
        for item in made.graph.collectives
        if item.kind == "all_reduce"
    }
    assert len(made.graph) == len(made.anatomy.unit) == len(made.work.role)


def test_pipeline_there_and_back_with_state(stateful: Stateful) -> None:
    """Degree 1 → 4 → 1 through the state gives the same step."""
    state = stateful(4, 4, 2, reduce_ns=1000, steps=2)
    back = pipeline(pipeline(state, 4), 1)

    assert len(state.graph) == len(back.graph)
    assert replay(state.graph).makespan_ns == replay(back.graph).makespan_ns


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ([("aten::linear", [(8, 64), (256, 64)]), ("aten::gelu", [(8, 256)]), ("aten::linear", [(8, 256), (64, 256)])],
         [Role.COLUMN, Role.BETWEEN, Role.ROW]),
        ([("aten::layer_norm", [(8, 64)]), ("aten::linear", [(8, 64), (64, 64)]), ("aten::linear", [(8, 64), (16, 64)]),
          ("aten::scaled_dot_product_attention", [(1, 4, 8, 16)]), ("aten::linear", [(8, 64), (64, 64)]),
          ("aten::add", [(8, 64)])],
         [Role.WHOLE, Role.COLUMN, Role.COLUMN, Role.HEADS, Role.ROW, Role.WHOLE]),
        ([("aten::linear", [(8, 64), (172, 64)]), ("aten::silu", [(8, 172)]), ("aten::linear", [(8, 64), (172, 64)]),
          ("aten::mul", [(8, 172)]), ("aten::linear", [(8, 172), (64, 172)])],
         [Role.COLUMN, Role.BETWEEN, Role.COLUMN, Role.BETWEEN, Role.ROW]),
        ([("aten::matmul", []), ("aten::softmax", []), ("aten::add", [])], [Role.COLUMN, Role.WHOLE, Role.WHOLE]),
    ],
    ids=["mlp", "attention", "gated", "no shapes"],
)  # fmt: skip
def test_roles_follow_from_names_and_dimensions(
    operands: list[tuple[str, list[tuple[int, ...]]]], expected: list[Role]
) -> None:
    """Columns, rows, heads and what lies between are told without any annotation."""
    assert expected == layer_roles(operands)


@pytest.mark.parametrize(
    ("job", "measured", "target"),
    [
        ("pp_1f1b_w1", "mbs=1,seq=2", "pp=4"),
        ("pp_1f1b_w2", "pp=2,mbs=1,seq=2", "pp=4"),
        ("pp_gpipe_w2", "pp=2,mbs=1,seq=2", "pp=1"),
        ("pp_1f1b_w2", "pp=2,mbs=1,seq=2", "pp=2,microbatches=8,schedule=GPipe"),
        ("tp_w2", "tp=2,mbs=1,seq=8", "tp=4"),
        ("tp_w4", "tp=4,mbs=1,seq=8", "tp=1"),
        ("ddp_w2", "dp=2,mbs=1,seq=8", "dp=2,tp=2,pp=2,microbatches=4"),
        ("fsdp2_w2", "fsdp=2,mbs=1,seq=8", "fsdp=8,tp=2,mbs=2,seq=16"),
        ("tp_dp_w4", "fsdp=2,tp=2,mbs=1,seq=8", "dp=4,fsdp=8,tp=4,recompute=full"),
    ],
)
def test_recorded_jobs_reach_other_layouts(shared_data: Path, job: str, measured: str, target: str) -> None:
    """Real captures are rewritten along every axis into graphs that replay, and unchanged they replay as measured."""
    built = build(load(shared_data / "gloo" / job))
    cluster = Cluster.load("gloo_10g")
    found = predict(built, Layout.parse(target), cluster, Layout.parse(measured))
    untouched = predict(built, Layout.parse(measured), cluster, Layout.parse(measured))

    assert untouched.step_s == untouched.measured_s
    assert found.timeline.graph.is_topological()
    assert 0 < found.step_s < 10 * found.measured_s
    assert int(found.timeline.start_ns.min()) > 10**15
