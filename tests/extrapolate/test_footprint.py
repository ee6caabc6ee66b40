"""Memory of a rank at any size: measured where it was recorded, modelled where shapes tell, else a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.footprint import Footprint, footprint_of, gradients_of
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.memory import StateBytes, peak_memory
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphCollective, GraphGroup
from scaletrace.parse.health import Health
from scaletrace.parse.load import load

GPT = Model("gpt", "gpt", layers=12, hidden=768, heads=12, vocab=50304, seq=1024)
LAYOUT = Layout(fsdp=8, mbs=4, microbatches=1, seq=1024)
STATES = StateBytes()


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


def test_replicas_do_not_change_a_recorded_peak() -> None:
    """Plain data parallelism shards nothing, so even unknown parameters don't matter."""
    layout = Layout(dp=2, mbs=1, microbatches=1, seq=1)

    assert (5e9, "") == Footprint(layout, STATES, 0.0, None, 5e9).at(replace(layout, dp=64))


@pytest.mark.parametrize(
    ("footprint", "layout", "reason"),
    [
        (Footprint(LAYOUT, STATES, on_device=False), LAYOUT, "ran on CPUs"),
        (Footprint(LAYOUT, STATES, 1e9, None, missing="no shapes"), LAYOUT, "activations are not known: no shapes"),
        (Footprint(LAYOUT, STATES, 0.0, None, 5e9), replace(LAYOUT, fsdp=16), "not how many parameters"),
        (Footprint(LAYOUT, STATES, 1e9, None, 5e9, "no shapes"), replace(LAYOUT, mbs=2), "other activations"),
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


_SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "ddp_w1"


def test_public_jobs_have_memory_or_a_reason(shared_data: Path) -> None:
    """nanogpt on 8 H100 is modelled and fits its device; DLRM says what to record."""
    known, unknown = (
        footprint_of(built, built.graph, dissect(built), layout, Health())
        for built, layout in (
            (build(load(shared_data / "traces" / "nanogpt_ab_v1")), Layout(fsdp=8)),
            (build(load(shared_data / "traces" / "torchrec2_v100")), Layout(dp=2)),
        )
    )

    value, reason = known.at(known.layout)
    assert reason or 1e9 < (value or 0) < 80e9
    assert "profile_memory=True" in unknown.at(unknown.layout)[1]


def test_another_number_of_chunks_takes_its_own_schedule() -> None:
    """A recorded 1F1B says nothing of a pipeline with two chunks a rank, and does not forbid it."""
    measured = Layout(pp=2, dp=2, mbs=1, microbatches=8, seq=1024, schedule="1F1B")
    asked = replace(measured, chunks=2, schedule="")
    found, reason = Footprint(measured, STATES, 0.0, GPT).at(asked)

    assert (True, "") == (found is not None, reason)
