"""Layers: repetition, phases, micro batches and units found in host events."""

from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layers import Phase, Sections, find_sections
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.depth import resize_layers
from scaletrace.extrapolate.rewrite.state import open_state
from scaletrace.parse.build import build
from scaletrace.parse.events import Arg, Events, Lane
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.job import RankTrace, Step
from scaletrace.parse.load import load

BACKWARD = "autograd::engine::evaluate_function: "
Row = tuple[str, str, int, int | None]
"""(category, name, duration, autograd sequence number or None)."""


def trace_of(rows: list[Row]) -> RankTrace:
    """One rank's trace of operators one after the other, 10 ns apart; annotations span what their duration says."""
    strings = list(dict.fromkeys(name for _, name, _, _ in rows))
    cats = ["cpu_op", "user_annotation"]
    starts, now = [], 100
    for cat, _, dur, _ in rows:
        starts.append(now)
        now += 0 if cat == "user_annotation" else dur + 10
    n = len(rows)
    numbered = [(i, row[3]) for i, row in enumerate(rows) if row[3] is not None]
    sequence = Arg(np.array([i for i, _ in numbered], np.int32), np.array([number for _, number in numbered], np.int64))
    i32, minus = np.zeros(n, np.int32), np.full(n, -1, np.int64)
    events = Events(
        np.full(n, ord("X"), np.uint8),
        np.array([cats.index(cat) for cat, *_ in rows], np.int32),
        np.array([strings.index(name) for _, name, _, _ in rows], np.int32),
        i32,
        np.array(starts, np.int64),
        np.array([dur for _, _, dur, _ in rows], np.int64),
        minus,
        minus,
        minus,
        minus,
        tuple(strings),
        tuple(cats),
        (Lane(1, 1),),
        {"Sequence number": sequence},
    )
    return RankTrace(0, 1, events, "test", steps=(Step(0, 0, now + 10),))


def model(layers: int, first: int = 0) -> tuple[list[Row], list[Row]]:
    """(forward, backward) operators of embedding, layers of three operators each, and head."""
    names = ["aten::embedding", *["aten::norm", "aten::linear", "aten::gelu"] * layers, "aten::loss"]
    forward: list[Row] = [("cpu_op", name, 5, first + i) for i, name in enumerate(names)]
    backward: list[Row] = [("cpu_op", BACKWARD + row[1], 9, row[3]) for row in reversed(forward)]
    return forward, backward


def spell(sections: Sections) -> str:
    """Sections as letters: F, B, Z (optimizer) or O with unit and micro batch."""
    letters = {Phase.OTHER: "O", Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.OPTIMIZER: "Z"}
    words = [
        letters[Phase(p)] + (f"{u}.{b}" if u >= 0 else "")
        for p, u, b in zip(sections.phase, sections.unit, sections.micro_batch, strict=True)
    ]
    return " ".join(words)


def test_layers_are_found_without_any_name() -> None:
    """Repeated operators are layers; backward follows by autograd's numbers; the optimizer is told by its annotation."""
    forward, backward = model(3)
    optimizer: list[Row] = [
        ("user_annotation", "Optimizer.step#AdamW.step", 40, None), ("cpu_op", "aten::add_", 5, None),
    ]  # fmt: skip
    sections = find_sections(trace_of([*forward, *backward, *optimizer]))

    assert ("embedding", "layer 0", "layer 1", "layer 2", "head") == sections.units
    assert "O F0.0 F1.0 F2.0 F3.0 F4.0 B4.0 B3.0 B2.0 B1.0 B0.0 Z O" == spell(sections)


def test_micro_batches_are_backward_passes() -> None:
    """Accumulated and pipelined micro batches are told apart by where sequence numbers rise in backward."""
    f0, b0 = model(2)
    f1, b1 = model(2, first=100)
    accumulated = find_sections(trace_of([*f0, *b0, *f1, *b1]))
    pipelined = find_sections(trace_of([*f0, *f1, *b0, *b1]))
    first, second = "F0.0 F1.0 F2.0 F3.0", "F0.1 F1.1 F2.1 F3.1"

    assert f"O {first} B3.0 B2.0 B1.0 B0.0 {second} B3.1 B2.1 B1.1 B0.1" == spell(accumulated)
    assert f"O {first} {second} B3.0 B2.0 B1.0 B0.0 B3.1 B2.1 B1.1 B0.1" == spell(pipelined)


def test_what_lies_between_goes_with_what_was_before() -> None:
    """Operators that autograd does not number (a hook's collective, AccumulateGrad) do not break a section."""
    forward, backward = model(2)
    hook: Row = ("cpu_op", "c10d::allreduce_", 5, None)
    gather: Row = ("cpu_op", BACKWARD + "torch::autograd::AccumulateGrad", 5, 0)
    sections = find_sections(trace_of([*forward, *backward[:3], hook, gather, *backward[3:]]))

    assert "O F0.0 F1.0 F2.0 F3.0 B3.0 B2.0 B1.0 B0.0" == spell(sections)


def test_fsdp_names_the_modules() -> None:
    """FSDP's annotations win over repetition, and a module is a layer if only its number differs from another's."""
    forward, backward = model(2)
    rows: list[Row] = [
        ("user_annotation", "FSDP::root_pre_forward", 1, None),
        forward[0],
        ("user_annotation", "FSDP::pre_forward (layers.0)", 1, None),
        *forward[1:4],
        ("user_annotation", "FSDP::post_forward (layers.0)", 0, None),
        ("user_annotation", "FSDP::pre_forward (layers.1)", 1, None),
        *forward[4:7],
        ("user_annotation", "FSDP::post_forward (layers.1)", 0, None),
        forward[7],
        *backward,
    ]
    sections = find_sections(trace_of(rows))

    assert ("embedding", "layers.0", "layers.1", "head") == sections.units
    assert (False, True, True, False) == sections.is_layer
    assert "FSDP annotations" == sections.rule
    assert "O F0.0 F1.0 F2.0 F3.0 B3.0 B2.0 B1.0 B0.0" == spell(sections)


def wrapped(names: list[str], parts: list[list[Row]]) -> list[Row]:
    """Operators in the annotations that FSDP2 writes around its modules; "" is the root."""
    rows: list[Row] = []
    for name, inside in zip(names, parts, strict=True):
        label = "FSDP::root_pre_forward" if not name else f"FSDP::pre_forward ({name})"
        rows.append(("user_annotation", label, 1, None))
        rows += inside
        if name:
            rows.append(("user_annotation", f"FSDP::post_forward ({name})", 0, None))
    return rows


@pytest.mark.parametrize(
    ("names", "units", "layers"),
    [
        (["", "layers.0.mix", "layers.0.mlp", "layers.1.mix", "layers.1.mlp"],
         ("embedding", "layers.0", "layers.1", "head"), 2),
        (["tok_embeddings", "layers.0", "layers.1", "norm", "output"],
         ("embedding", "layers.0", "layers.1", "norm", "head"), 2),
        (["embed", "blocks.0", "blocks.1", "blocks.2", "lm_head"],
         ("embedding", "blocks.0", "blocks.1", "blocks.2", "head"), 3),
        (["", "dense.0", "moe.1", "moe.2", "dense.3"], ("embedding", "dense.0", "moe.1", "moe.2", "dense.3", "head"), 4),
        (["", "stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
         ("embedding", "stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1", "head"), 4),
        (["embed", "a", "h.0", "b", "lm_head"], ("embedding", "a", "h.0", "b", "head"), 1),
    ],
)  # fmt: skip
def test_units_of_fsdp_are_layers_where_their_names_count(
    names: list[str], units: tuple[str, ...], layers: int
) -> None:
    """Parts of a layer are that layer, modules for embedding and head are those, and one numbered module is one layer."""
    each: list[list[Row]] = [[("cpu_op", f"aten::op{at}", 5, at)] for at in range(5)]
    backward: list[Row] = [("cpu_op", BACKWARD + "Op", 9, at) for at in reversed(range(5))]
    sections = find_sections(trace_of([*wrapped(names, each), *backward]))

    assert (units, layers, "FSDP annotations") == (sections.units, sections.layers, sections.rule)


def test_a_root_alone_names_no_layer() -> None:
    """Where FSDP wraps only the whole model its operators tell the layers."""
    forward, backward = model(3)
    sections = find_sections(trace_of([*wrapped([""], [forward]), *backward]))

    assert (3, "repeated operators") == (sections.layers, sections.rule)


def test_the_optimizer_is_told_without_its_annotation() -> None:
    """Updates of weights behind the backward pass are the optimizer, what comes between and after is not."""
    forward, backward = model(2)
    tail: list[Row] = [("cpu_op", name, 5, None) for name in ("aten::norm_all", "aten::_foreach_mul_", "aten::item")]
    sections = find_sections(trace_of([*forward, *backward, *tail]))

    assert spell(sections).endswith("B1.0 B0.0 O Z O")


def test_pipeline_actions_name_the_micro_batch() -> None:
    """`Forward 0` and `Backward 0` say which micro batch runs."""
    f0, b0 = model(2)
    f1, b1 = model(2, first=100)
    span = 8 * 15
    rows: list[Row] = [
        ("user_annotation", "Forward 1", span, None), *f1,
        ("user_annotation", "Forward 0", span, None), *f0, *b0, *b1,
    ]  # fmt: skip
    sections = find_sections(trace_of(rows))

    assert spell(sections).startswith("O F0.1 F1.1 F2.1 F3.1 F0.0 F1.0")


def test_nothing_repeated_is_said() -> None:
    """A model whose operators do not repeat is one unit, and the rule says so."""
    rows: list[Row] = [("cpu_op", f"op {i}", 5, i) for i in range(5)]
    rows += [("cpu_op", BACKWARD + name, 5, number) for _, name, _, number in reversed(rows)]
    sections = find_sections(trace_of(rows))

    assert (("model",), "nothing repeats", 0) == (sections.units, sections.rule, sections.layers)


@pytest.mark.parametrize(
    ("job", "layers", "micro_batches", "rule"),
    [
        ("ddp_w2", 2, 1, "repeated operators"),
        ("tp_w2", 2, 1, "repeated operators"),
        ("fsdp2_w2", 2, 1, "FSDP annotations"),
        ("tp_dp_w4", 2, 1, "FSDP annotations"),
        ("pp_1f1b_w1", 4, 4, "repeated operators"),
        ("pp_1f1b_w2", 2, 4, "repeated operators"),
        ("pp_gpipe_w2", 2, 4, "repeated operators"),
    ],
)
def test_real_jobs_show_their_layers_and_micro_batches(
    shared_data: Path, job: str, layers: int, micro_batches: int, rule: str
) -> None:
    """Recorded CPU jobs of known shape: every rank shows what it ran."""
    for trace in load(shared_data / "gloo" / job).ranks:
        sections = find_sections(trace)

        assert (layers, micro_batches, rule) == (sections.layers, sections.micro_batches, sections.rule)


def test_a_pipelines_stages_are_numbered_through(shared_data: Path) -> None:
    """Two stages of two layers are four layers in all, each on one rank, with every parameter counted once."""
    built = build(load(shared_data / "gloo" / "pp_1f1b_w2"))
    anatomy = dissect(built, Layout(pp=2))
    expected = ("embedding", "layer 0", "layer 1", "layer 2", "layer 3", "head")
    of_rank = {
        rank: sorted(set(anatomy.unit[(built.graph.rank == rank) & (anatomy.unit >= 0)].tolist())) for rank in (0, 1)
    }

    assert expected == anatomy.units
    assert {0: [0, 1, 2], 1: [3, 4, 5]} == of_rank
    assert [4160, 16704, 16704, 16704, 16704, 2080] == anatomy.parameters.tolist()
    assert 2 * 64 * 4 == anatomy.boundary_bytes
    assert 16 * 2 == int((anatomy.is_message & (built.graph.kind == int(NodeKind.ARRIVE))).sum()) * 2


def test_kernels_belong_to_the_layer_that_launched_them(shared_data: Path) -> None:
    """On a GPU job kernels run later than their launch and still count for its layer."""
    built = build(load(shared_data / "traces" / "megatron_tp2_v100"))
    anatomy = dissect(built)
    kernels = built.graph.kind == int(NodeKind.KERNEL)
    counts = [int(((anatomy.unit == unit) & kernels & (built.graph.rank == 0)).sum()) for unit in (1, 2)]

    assert ("embedding", "layer 0", "layer 1", "head") == anatomy.units
    assert counts[0] == counts[1] > 20


def test_one_layer_is_said_and_its_number_is_kept(samples: Path) -> None:
    """A model of a single block is one layer between embedding and head; asked for two, the reason for none is given."""
    built = build(load(samples / "ddp_w2"))
    state = open_state(built, Layout(dp=2), Network(Cluster.load("gloo_10g")))

    assert (("embedding", "layer 0", "head"), 1) == (state.anatomy.units, state.anatomy.layers)
    with pytest.raises(UsageError, match="shows one layer"):
        resize_layers(state, 2)


def test_stages_of_one_layer_each_make_a_stack(shared_data: Path) -> None:
    """Four stages of one block are four layers, with embedding and head apart, on one rank each."""
    built = build(load(shared_data / "gloo" / "pp_1f1b_w4"))
    anatomy = dissect(built, Layout(pp=4))
    of_rank = [
        sorted(set(anatomy.unit[(built.graph.rank == rank) & (anatomy.unit >= 0)].tolist())) for rank in range(4)
    ]

    assert (4, "what all stages do", ("", "layer", "layer", "layer", "layer", "")) == (
        anatomy.layers, anatomy.rule, anatomy.kind,
    )  # fmt: skip
    assert [[0, 1], [2], [3], [4, 5]] == of_rank


def test_kernels_of_a_cuda_graph_have_layers_of_their_own(shared_data: Path) -> None:
    """One launch brings all kernels of a pass, and each still belongs to its layer."""
    built = build(load(shared_data / "traces" / "lightllm8_h200-logs-run1"))
    anatomy = dissect(built)
    kernels = (built.graph.kind == int(NodeKind.KERNEL)) & (built.graph.rank == 0)
    counts = [int(((anatomy.unit == unit) & kernels).sum()) for unit in (1, 2, 3, 10, 11)]

    assert 61 == anatomy.layers
    assert counts[0] == counts[1] == counts[2] < counts[3] == counts[4]
