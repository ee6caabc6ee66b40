"""The two reproduced papers: headlines that follow without tables, and pages that state them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.papers import erdil, fernandez, fernandez_page
from benchmarks.papers.fernandez_claims import bus_GBps, claims
from benchmarks.validation.papers import fernandez_result
from benchmarks.validation.result import Verdict
from scaletrace.extrapolate.described.constants import device
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.energy import Prices
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
    """Claims, sources, our figures and verdicts stand in one table, and every plot that the text shows is there."""
    files = fernandez_page.page()
    text = files["fernandez.md"]

    assert "| throughput a GPU -37.22 % from 128 to 2,048 H100 | stated in a summary |" in text
    assert set(re.findall(r"\((fernandez-[a-z]+\.svg)\)", text)) == set(files) - {"fernandez.md"}
    assert all(text.startswith("<svg") for name, text in files.items() if name.endswith(".svg"))


def test_a_price_table_adds_the_cost_of_tokens() -> None:
    """At 2.50 a GPU-hour the cost grows from 8 to 2,048 GPUs as throughput falls."""
    text = fernandez_page.page(Prices.parse({"h100": 2.5}))["fernandez.md"]
    lines = text.split("money a million tokens |")[1].splitlines()[2:11]
    costs = [float(line.split("|")[-2]) for line in lines]

    assert costs[0] == pytest.approx(2.5e6 / 3600 / 9198, abs=1e-3)
    assert costs == sorted(costs)


def test_every_known_claim_stands_beside_what_the_model_says(shared_data: Path) -> None:
    """Each entry of the public list of claims, verified or from memory, has at least one row with a verdict."""
    known = json.loads((shared_data / "numbers" / "fernandez_claims.json").read_text(encoding="utf-8"))
    entries = [entry["claim"] for entry in known["established"]] + known["from_memory_unverified"]
    found = claims(MODEL, ON)

    assert [] == [entry for entry in entries if not any(entry.startswith(claim.of) for claim in found)]
    assert [] == [claim.of for claim in found if not any(entry.startswith(claim.of) for entry in entries)]
    assert {claim.verdict.split()[0] for claim in found} <= {"reproduced", "direction", "not", "fitted", "covered"}


def test_collectives_that_ring_lose_their_bandwidth_with_nodes_and_trees_keep_it() -> None:
    """256 MiB from 4 to 128 nodes: AllGather falls below a quarter, AllReduce stays above 90 %."""
    size = 2.0**28
    gather, reduce = ([bus_GBps(ON, kind, size, nodes) for nodes in (4, 128)] for kind in ("all_gather", "all_reduce"))

    assert gather[1] < 0.25 * gather[0]
    assert reduce[1] > 0.9 * reduce[0]


def test_models_that_do_not_fit_are_not_timed() -> None:
    """70 B parameters need 32 H100 or more to train; 7 B fit on eight."""
    large = load_model("llama2-70b")

    assert [False, False, True] == [fernandez.fits(large, ON, gpus) for gpus in (8, 16, 32)]
    assert fernandez.fits(MODEL, ON, 8)


def test_closed_form_and_engine_agree_where_the_schedule_is_the_assumed_one() -> None:
    """With a layer a chunk the replay is within 3 % of the closed form; with whole stages it takes a third longer."""
    found = erdil.by_replay(H100, Training(), 1e27)

    assert found.interleaved_s == pytest.approx(found.closed_s, rel=0.03)
    assert found.whole_stages_s > 1.2 * found.closed_s
