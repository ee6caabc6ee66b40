"""A model read back from shapes: every family, every split, and pipelines with what their stages hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.blocks import Operator, block_of
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.expand import distinct_ranks
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.footprint import Footprint, footprint_of
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.memory import FRAGMENTATION, layer_activation_bytes
from scaletrace.extrapolate.traced_memory import traced_memory
from scaletrace.extrapolate.workload import read_model
from scaletrace.parse.build import Built, build
from scaletrace.parse.health import Health
from scaletrace.parse.load import load
from scaletrace.traces.synth import Fault, write_capture

GATED = Model("gated", "llama", 4, 256, 8, 704, 0, 1000, 128, False)
GROUPED = Model("grouped", "llama", 4, 256, 8, 704, 2, 1000, 128, False)
PLAIN = Model("plain", "gpt", 4, 256, 8, 0, 0, 1000, 128, False)
EXPERTS = Model("experts", "moe", 4, 256, 8, 448, 2, 1000, 128, False, 8, 2)


def captured(folder: Path, model: Model, layout: Layout, fault: str = "", ranks: tuple[int, ...] = ()) -> Built:
    """The built capture of a described job, of its distinct ranks or of `ranks`."""
    on = device("h100")
    described = Described(model, layout, on, costs_on(on))
    _, job = calibrated(described, ranks or distinct_ranks(layout), 1, None, Interference(), {})
    write_capture(job, folder, [Fault.parse(fault)] if fault else [])
    return build(load(folder, workers=1))


@pytest.mark.parametrize("model", [GATED, GROUPED, PLAIN, EXPERTS], ids=lambda model: model.name)
@pytest.mark.parametrize("layout", ["dp=2", "fsdp=4", "tp=2,dp=2", "tp=2,sp=1", "pp=2,microbatches=4", "cp=2"])
def test_a_described_model_is_read_back(tmp_path: Path, model: Model, layout: str) -> None:
    """Gated or not, with shared keys, experts, and under every split: the parameters within 2 %, the sizes exactly."""
    cut = Layout.parse(layout)
    built = captured(tmp_path, model, cut)
    found = read_model(built, cut, dissect(built))

    assert "" == found.doubt
    assert found.model.parameters == pytest.approx(model.parameters, rel=0.02)
    assert (model.layers, model.mlp_width, model.kv_width, model.vocab, model.experts, model.experts_per_token) == (
        found.model.layers, found.model.mlp_width, found.model.kv_width, found.model.vocab, found.model.experts,
        found.model.experts_per_token,
    )  # fmt: skip


def test_experts_on_other_ranks_count(tmp_path: Path) -> None:
    """A rank that holds one of eight experts tells a model of eight."""
    cut = Layout.parse("fsdp=8,ep=8")
    built = captured(tmp_path, EXPERTS, cut)

    assert read_model(built, cut, dissect(built)).model.parameters == pytest.approx(EXPERTS.parameters, rel=0.02)


def test_layers_without_names_are_read_too(tmp_path: Path) -> None:
    """No frames of modules: the stack that repeats has the same shapes."""
    built = captured(tmp_path, GATED, Layout(dp=2), "no-modules")

    assert read_model(built, Layout(dp=2), dissect(built)).model.parameters == pytest.approx(GATED.parameters, rel=0.02)


def test_one_stage_stands_for_the_others(tmp_path: Path) -> None:
    """With one stage of two on file the depth is twice what is seen."""
    cut = Layout(pp=2, microbatches=2)
    built = captured(tmp_path, GATED, cut, ranks=(1,))

    assert 4 == read_model(built, cut, dissect(built, cut)).model.layers


def linear(columns: float, depth: float) -> Operator:
    return Operator("linear", Shape(Work.MATMUL, 512, columns, depth))


ATTENTION = Operator("scaled_dot_product_attention", Shape(Work.ATTENTION, 256, 256, 64, 16.0, queries_per_key=4.0))
APART = [linear(512, 512), linear(128, 512), linear(128, 512), ATTENTION, linear(512, 512)]
FUSED = [linear(768, 512), ATTENTION, linear(512, 512)]
SCORES = Operator("bmm", Shape(Work.MATMUL, 256, 256, 64, 16.0))


@pytest.mark.parametrize("head", [APART, FUSED])
@pytest.mark.parametrize(
    ("tail", "gated"),
    [
        ([linear(1024, 512), linear(1024, 512), linear(512, 1024)], True),
        ([linear(2048, 512), linear(512, 1024)], True),
        ([linear(1024, 512), linear(512, 1024)], False),
        ([linear(512, 512), linear(512, 512)], False),
    ],
)
def test_products_in_one_or_apart(head: list[Operator], tail: list[Operator], gated: bool) -> None:
    """Queries, keys and values, and gate and up, may be one product or several; the width is what comes down."""
    found = block_of([*head, *tail])

    assert found is not None
    assert (512, 8, 2, tail[-1].shape.depth, gated) == (
        found.hidden, found.heads, found.key_heads, found.width, found.is_gated,
    )  # fmt: skip
    assert sum(one.weights for one in (*head, *tail)) == found.weights


def test_attention_of_plain_products_is_told_from_weights() -> None:
    """Scores and their product with values are batches; what stands behind them is the output and the MLP."""
    found = block_of([linear(1536, 512), SCORES, SCORES, linear(512, 512), linear(2048, 512), linear(512, 2048)])

    assert found is not None
    assert (2048, False, 12 * 512 * 512) == (found.width, found.is_gated, found.weights)


def seen(folder: Path, layout: str) -> Footprint:
    built = captured(folder, GATED, Layout.parse(layout))
    cut = Layout.parse(layout.split(",")[0])
    return footprint_of(built, built.graph, dissect(built), cut, Health())


@pytest.mark.parametrize(
    ("layout", "schedule", "held"),
    [
        ("pp=2,microbatches=4", "1F1B", 2),
        ("pp=2,microbatches=8", "1F1B", 2),
        ("pp=2,microbatches=4,schedule=GPipe", "GPipe", 4),
        ("pp=2,microbatches=8,schedule=GPipe", "GPipe", 8),
    ],
)
def test_a_pipelines_memory_is_one_stage_and_what_it_holds(
    tmp_path: Path, layout: str, schedule: str, held: int
) -> None:
    """The schedule is told by the micro batches alive, which the shapes of the first stage's trace count as well."""
    found = seen(tmp_path, layout)
    stage = GATED.parameters / 2
    first = traced_memory(load(tmp_path, workers=1).ranks[0])

    assert schedule == found.layout.schedule
    value, _ = found.at(found.layout)
    assert value is not None and value > 16 * stage
    assert held == first.held


def test_more_micro_batches_alive_take_more_memory(tmp_path: Path) -> None:
    """GPipe with 16 micro batches holds 14 more than 1F1B on the first of two stages, whatever the last one holds."""
    few, many = (
        seen(tmp_path / name, f"pp=2,microbatches=16,schedule={name}").at(Layout(pp=2))[0] or 0
        for name in ("1F1B", "GPipe")
    )
    layers = 2 * layer_activation_bytes(GATED, Layout(), GATED.seq, GATED.seq)

    assert 13 * layers < many - few < 15 * layers * (1 + FRAGMENTATION)
