"""Memory of a rank at any size: measured where it was recorded, modelled where shapes tell, else a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.footprint import Footprint, footprint_of_job, gradients_of
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.memory import (
    CHANNEL_BYTES,
    FRAGMENTATION,
    RESERVED_BYTES,
    StateBytes,
    peak_memory,
    rank_parameters,
)
from scaletrace.extrapolate.traced_memory import Traced
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphCollective, GraphGroup
from scaletrace.parse.load import load
from scaletrace.traces.synth import write_capture

GPT = Model("gpt", "gpt", layers=12, hidden=768, heads=12, vocab=50304, seq=1024)
LAYOUT = Layout(fsdp=8, mbs=4, microbatches=1, seq=1024)
STATES = StateBytes()
SHAPES = Traced(
    weights=2_500_000, states=16_700_000, activations=3_000_000, passing=200_000, measured=0, optimizer="Adam",
    on_device=True, elements=1_000_000, tables=500_000, fused=700_000,
)  # fmt: skip
"""A million weights of 2 bytes with 4 of gradient and 12 of optimizer, and tables that keep 0.7 MB themselves."""


def test_without_a_peak_the_model_answers() -> None:
    """States from the parameters that were moved, all else from memory.peak_memory."""
    parameters = float(GPT.parameters)
    found = Footprint(LAYOUT, STATES, parameters, GPT).at(replace(LAYOUT, fsdp=64))
    expected = peak_memory(GPT, replace(LAYOUT, fsdp=64)).total

    assert (pytest.approx(expected, rel=0.02), "") == found


def test_a_recorded_peak_keeps_all_but_the_shards() -> None:
    """18 bytes a parameter, an eighth of them at 8 shards, a 64th at 64; the rest of the peak stays."""
    known = Footprint(LAYOUT, STATES, 1e9, None, 10e9)

    assert (10e9, "") == known.at(LAYOUT)
    assert (pytest.approx(10e9 - 18e9 / 8 + 18e9 / 64), "") == known.at(replace(LAYOUT, fsdp=64))
    assert "measured and stretched" == known.source


def test_shapes_answer_where_no_model_is_recognised() -> None:
    """18 bytes a weight over 8 shards, tables whole, activations and what passes; half the samples keep half of them."""
    known = Footprint(LAYOUT, STATES, missing="no layers", traced=SHAPES)
    tensors = 18e6 / 8 + 500_000 + 700_000 + 3_000_000 + 200_000

    def whole(bytes_: float) -> float:
        return bytes_ * (1 + FRAGMENTATION) + RESERVED_BYTES + CHANNEL_BYTES

    assert (pytest.approx(whole(tensors)), "") == known.at(LAYOUT)
    assert (pytest.approx(whole(tensors - 18e6 / 8 + 18e6 / 16)), "") == known.at(replace(LAYOUT, fsdp=16))
    assert (pytest.approx(whole(tensors - 1_500_000)), "") == known.at(replace(LAYOUT, mbs=2))
    assert (pytest.approx(tensors), "") == replace(known, on_device=False).at(LAYOUT)
    assert "from shapes of operators" == known.source


def test_what_is_surely_needed_is_told() -> None:
    """States of the parameters that were reduced, at any number of shards, where activations are not known."""
    known = Footprint(LAYOUT, STATES, 1e9, missing="no shapes")

    assert (18e9 / 8, "weights, gradients and optimizer states alone") == known.at_least(LAYOUT)
    assert (18e9 / 64, "weights, gradients and optimizer states alone") == known.at_least(replace(LAYOUT, fsdp=64))
    assert (None, "") == known.at_least(replace(LAYOUT, pp=2))
    assert (None, "") == Footprint(LAYOUT, STATES, missing="no shapes").at_least(LAYOUT)


def test_a_recorded_peak_follows_the_model_to_another_layout() -> None:
    """States are those of the parameters, the rest of the peak scales the model's other tensors; nothing beside is added."""
    peak = peak_memory(GPT, LAYOUT)
    known = Footprint(LAYOUT, STATES, 0.0, GPT, peak.states + 1.5 * (peak.tensors - peak.states))
    asked = replace(LAYOUT, tp=4, fsdp=2)
    there = peak_memory(GPT, asked)

    assert (pytest.approx(known.measured_bytes), "") == known.at(LAYOUT)
    assert (pytest.approx(there.states + 1.5 * (there.tensors - there.states)), "") == known.at(asked)


def test_frozen_weights_have_no_gradients() -> None:
    """A tenth of the weights is reduced, so a tenth is trained: all of them stay, gradients and moments shrink."""
    layout = Layout(dp=8, mbs=4, microbatches=1, seq=1024)
    whole = peak_memory(GPT, layout)
    few = Footprint(layout, STATES, rank_parameters(GPT, layout) / 10, GPT).parts(layout)

    assert (whole.weights, whole.optimizer / 10, whole.gradients / 10) == pytest.approx(
        (few.weights, few.optimizer, few.gradients)
    )


def test_weights_that_are_gathered_behind_the_optimizer_are_whole() -> None:
    """Groups that look like FSDP's but gather once a step shard the optimizer alone."""
    known = Footprint(LAYOUT, STATES, 0.0, GPT, whole_weights=True).parts(LAYOUT)
    expected = peak_memory(GPT, replace(LAYOUT, fsdp=1, dp=8, zero=1))

    assert expected == known


def test_depth_and_width_change_the_memory() -> None:
    """Twice the layers are twice their weights and activations."""
    known = Footprint(LAYOUT, STATES, 0.0, GPT)
    base, deep, wide = (
        known.parts(layout) for layout in (LAYOUT, replace(LAYOUT, layers=24), replace(LAYOUT, hidden=1536))
    )

    assert 12 * GPT.layer_parameters * 2 / 8 == pytest.approx(deep.weights - base.weights)
    assert wide.weights > 3 * base.weights and wide.activations == pytest.approx(2 * base.activations)


def test_replicas_do_not_change_a_recorded_peak() -> None:
    """Plain data parallelism shards nothing, so even unknown parameters don't matter."""
    layout = Layout(dp=2, mbs=1, microbatches=1, seq=1)

    assert (5e9, "") == Footprint(layout, STATES, 0.0, None, 5e9).at(replace(layout, dp=64))


@pytest.mark.parametrize(
    ("footprint", "layout", "reason"),
    [
        (Footprint(LAYOUT, STATES, trains=False, missing="no shapes"), LAYOUT, "no backward pass is seen"),
        (Footprint(LAYOUT, STATES, 1e9, None, missing="no shapes"), LAYOUT, "activations are not known: no shapes"),
        (
            Footprint(LAYOUT, STATES, 1e9, missing="no layers", traced=SHAPES),
            LAYOUT,
            "show 1,000,000 of the 1,000,000,000",
        ),
        (Footprint(LAYOUT, STATES, 0.0, None, 5e9), replace(LAYOUT, fsdp=16), "not how many parameters"),
        (Footprint(LAYOUT, STATES, 1e9, None, 5e9, "no shapes"), replace(LAYOUT, mbs=2), "other activations"),
        (Footprint(LAYOUT, STATES, 1e9, None, 5e9, "no layers"), replace(LAYOUT, tp=2), "another layout of the model"),
        (Footprint(LAYOUT, STATES, 1e9, GPT), replace(LAYOUT, hidden=700), "no multiple of the 64"),
    ],
)
def test_what_is_not_known_has_a_reason(footprint: Footprint, layout: Layout, reason: str) -> None:
    """Missing is never zero."""
    value, said = footprint.at(layout)

    assert value is None and reason in said


def test_an_unknown_micro_batch_keeps_a_recorded_peak() -> None:
    """A layout that says one sample because nobody knows better changes no activations."""
    known = Footprint(Layout(dp=2), STATES, 1e9, None, 5e9)

    assert (5e9, "") == known.at(Layout(dp=8, mbs=1, seq=1, microbatches=1))


def test_half_the_samples_take_half_the_activations_off_a_recorded_peak() -> None:
    """The difference is that of the model's activations."""
    known = Footprint(LAYOUT, STATES, 1e9, GPT, 10e9)
    whole, half, quarter = (known.at(replace(LAYOUT, mbs=mbs))[0] or 0.0 for mbs in (4, 2, 1))

    assert whole - half == pytest.approx(2 * (half - quarter)) and whole > half


def test_gradients_are_what_one_micro_batch_reduces() -> None:
    """Two buckets in each of two micro batches and a loss: the parameters are those of two buckets, in fp32."""
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    for size in (4000, 8000, 4, 4000, 8000):
        draft.collective("all_reduce", 0, size, [(0, []), (1, [])])
        draft.collectives[-1] = GraphCollective("all_reduce", 0, size, size, "Float")
    graph = draft.graph()
    batches = np.array([0, 0, 0, 1, 1])[graph.instance]
    anatomy = replace(dissect(build(load(_SAMPLE))), micro_batch=batches.astype(np.int32))

    assert (12_000.0, 4) == gradients_of(graph, anatomy)


def test_gradients_of_no_micro_batch_come_to_those_of_one() -> None:
    """A root's gradients are scattered behind the last micro batch and belong to none; they are parameters too."""
    draft = Draft(groups=[GraphGroup("fsdp", 2, 1)])
    for size in (4000, 4000, 1000):
        draft.collective("reduce_scatter", 0, size, [(0, []), (1, [])])
        draft.collectives[-1] = GraphCollective("reduce_scatter", 0, size, size // 2, "BFloat16")
    graph = draft.graph()
    batches = np.array([0, 1, -1])[graph.instance]
    anatomy = replace(dissect(build(load(_SAMPLE))), micro_batch=batches.astype(np.int32))

    assert (5000.0, 2) == gradients_of(graph, anatomy)


def test_a_capture_of_a_described_job_takes_the_memory_of_its_model(tmp_path: Path) -> None:
    """bf16 weights with fp32 gradients: the recorded types, not those of the products, tell how many parameters move."""
    on, model = device("h100"), load_model("llama2-1b")
    described = Described(model, Layout(fsdp=8, mbs=2), on, costs_on(on))
    write_capture(calibrated(described, [0], 2, None, Interference(), {})[1], tmp_path)
    built = build(load(tmp_path, workers=1))
    found = footprint_of_job(built)

    assert {"BFloat16", "Float"} == {item.dtype for item in built.graph.collectives}
    assert model.parameters == pytest.approx(found.parameters, rel=1e-3)
    assert peak_memory(model, found.layout).total == pytest.approx(found.at(found.layout)[0], rel=1e-2)


_SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "ddp_w1"


@pytest.mark.parametrize(
    ("job", "source", "low", "high"),
    [
        # 640.6 million rows' numbers of tables and as many of Adagrad, 4 bytes each, are 5.13 GB; the rest is small
        ("dlrm8_v100", "from shapes of operators", 6.9e9, 7.3e9),
        # 495 million parameters in bf16 with a sharded Adam: 2.97 GB of states, and 16,384 tokens
        ("nanogpt8_h100", "modelled", 8e9, 40e9),
        ("hta_v100_2", "measured and stretched", 6_629_508_096, 6_629_508_096),
        ("triosim_vgg13/profiler_vgg13-iter41.json.gz", "measured and stretched", 39_343_881_216, 39_343_881_216),
    ],
)
def test_public_jobs_have_memory(shared_data: Path, job: str, source: str, low: float, high: float) -> None:
    """From a recorded peak, a model that shapes tell, or the shapes alone."""
    found = footprint_of_job(build(load(shared_data / "traces" / job)))
    value, reason = found.at(found.layout)

    assert (source, "") == (found.source, reason)
    assert low <= (value or 0.0) <= high


@pytest.mark.parametrize(
    ("job", "reason", "least"),
    [
        # 25,557,032 parameters of ResNet-50 in fp32, with momentum: 12 bytes each
        ("resnet50_ddp_ws2_a100", "record_shapes=True", 25_557_032 * 12),
        ("torchrec2_v100", "no backward pass is seen", None),
        ("lightllm8_h200-logs-run1", "no backward pass is seen", None),
    ],
)
def test_other_public_jobs_have_a_reason(shared_data: Path, job: str, reason: str, least: float | None) -> None:
    """What is missing is said, and what is surely needed where gradients tell the weights."""
    found = footprint_of_job(build(load(shared_data / "traces" / job)))
    value, said = found.at(found.layout)

    assert value is None and reason in said
    assert least == found.at_least(found.layout)[0]


def test_another_number_of_chunks_takes_its_own_schedule() -> None:
    """A recorded 1F1B says nothing of a pipeline with two chunks a rank, and does not forbid it."""
    measured = Layout(pp=2, dp=2, mbs=1, microbatches=8, seq=1024, schedule="1F1B")
    asked = replace(measured, chunks=2, schedule="")
    found, reason = Footprint(measured, STATES, 0.0, GPT).at(asked)

    assert (True, "") == (found is not None, reason)
