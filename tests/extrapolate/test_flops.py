"""FLOP from recorded shapes: products, attention, and whole captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.expand import distinct_ranks
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.flops import operator_flop, step_flop
from scaletrace.extrapolate.layout import Layout
from scaletrace.parse.load import load
from scaletrace.traces.synth import write_capture


@pytest.mark.parametrize(
    ("name", "dims", "flop"),
    [
        ("aten::mm", "[[4,8],[8,16]]", 2 * 4 * 8 * 16),
        ("aten::addmm", "[[16],[4,8],[8,16],[],[]]", 2 * 4 * 8 * 16),
        ("aten::bmm", "[[3,4,8],[3,8,16]]", 2 * 3 * 4 * 8 * 16),
        (
            "aten::_scaled_dot_product_flash_attention",
            "[[2,4,64,32],[2,4,128,32],[2,4,128,32]]",
            4 * 2 * 4 * 64 * 32 * 128,
        ),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            "[[2,4,64,32],[2,4,64,32],[2,4,128,32]]",
            8 * 2 * 4 * 64 * 32 * 128,
        ),
        ("aten::_grouped_mm", "[[40,8],[4,8,16],[4]]", 2 * 40 * 8 * 16),
        ("aten::mm", "[[4,8],[9,16]]", 0),
        ("aten::mm", "[]", 0),
        ("aten::mm", "not json", 0),
        ("aten::add", "[[4,8],[4,8]]", 0),
    ],
)
def test_flop_of_one_call(name: str, dims: str, flop: int) -> None:
    """Two for each multiply-add; what doesn't fit counts nothing."""
    assert flop == operator_flop(name, dims)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["fsdp=4,mbs=2", "tp=2,cp=2,fsdp=2", "pp=2,microbatches=4", "fsdp=2,ep=2"])
def test_the_model_flop_of_a_described_job_are_counted_from_its_trace(
    tmp_path: Path, layout: str, recompute: str
) -> None:
    """Shapes alone give what the model's formula gives, also where the forward runs twice and for grouped experts."""
    model = Model("m", "moe" if "ep" in layout else "llama", 4, 512, 8, ffn=1024, vocab=1024, seq=512, tied=False,
                  experts=4 if "ep" in layout else 1, experts_per_token=2 if "ep" in layout else 1)  # fmt: skip
    on = device("h100")
    described = Described(model, Layout.parse(f"{layout},recompute={recompute}"), on, costs_on(on))
    ranks = distinct_ranks(described.layout)
    _, job = calibrated(described, ranks, 1, None, Interference(), {})
    write_capture(job, tmp_path)

    found = step_flop(load(tmp_path, workers=1))

    assert found is not None
    whole = model.step_flop(described.tokens_per_step, described.seq) / described.layout.ranks
    assert found == pytest.approx(whole, rel=1e-6)


def test_a_captures_products_are_those_of_its_model(samples: Path) -> None:
    """Forward and twice that backward over 256 tokens; the first layer's input needs no gradient, attention comes on top."""
    width, vocabulary, tokens = 192, 256, 256
    weights = 12 * width * width + width * vocabulary
    found = step_flop(load(samples / "ddp_w1"))

    assert found is not None
    assert 6 * weights * tokens <= found <= 6 * weights * tokens * 1.2
