"""The two reproduced papers: headlines that follow without tables, and pages that state them."""

from __future__ import annotations

import pytest

from benchmarks.papers import erdil, fernandez
from benchmarks.validation.papers import fernandez_result
from benchmarks.validation.result import Verdict
from scaletrace.extrapolate.described.constants import device
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.limits import H100, Training

MODEL, ON = load_model("llama2-7b"), device("h100")


def test_every_gate_of_fernandez_is_met() -> None:
    """The range holds -37.22 %, tensor parallelism changes sides, A100 is ahead of H100, power falls less."""
    for gate in fernandez_result().gates:
        assert gate.verdict is not Verdict.MISSED, f"{gate.name}: {gate.figure}"


@pytest.mark.parametrize("base", fernandez.BASES)
def test_the_loss_grows_with_the_base_mfu_and_lies_near_the_published_one(base: float) -> None:
    """Faster compute leaves less to hide behind; at the published MFU the loss is within half a point."""
    loss = fernandez.loss(MODEL, ON, base)

    assert -0.43 < loss < -0.37
    if base == fernandez.PUBLISHED_MFU:
        assert loss == pytest.approx(fernandez.PUBLISHED_LOSS, abs=0.005)


def test_calibration_gives_the_base_mfu_back() -> None:
    """At 128 GPUs the run has the MFU that it was calibrated to."""
    assert 0.45 == pytest.approx(fernandez.weak(MODEL, ON, 0.45, 128).mfu, rel=1e-6)


def test_a_fixed_batch_stops_scaling() -> None:
    """Batch 32 keeps about 40 % MFU on two nodes and falls below 15 % on 32."""
    small, large = (fernandez.strong(MODEL, ON, fernandez.PUBLISHED_MFU, gpus, 32).mfu for gpus in (16, 256))

    assert small == pytest.approx(0.40, abs=0.04)
    assert large < 0.15


def test_the_page_of_fernandez_states_its_headlines() -> None:
    """Claims, sources and our figures stand in one table, and the plots are there."""
    files = fernandez.page()

    assert {"fernandez.md", "fernandez-weak.svg", "fernandez-degrees.svg"} == set(files)
    assert "| throughput a GPU -37.22 % from 128 to 2,048 H100 | stated in a summary |" in files["fernandez.md"]
    assert all(text.startswith("<svg") for name, text in files.items() if name.endswith(".svg"))


def test_closed_form_and_engine_agree_where_the_schedule_is_the_assumed_one() -> None:
    """With a layer a chunk the replay is within 3 % of the closed form; with whole stages it takes a third longer."""
    found = erdil.by_replay(H100, Training(), 1e27)

    assert found.interleaved_s == pytest.approx(found.closed_s, rel=0.03)
    assert found.whole_stages_s > 1.2 * found.closed_s
