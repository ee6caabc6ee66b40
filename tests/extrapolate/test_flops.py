"""FLOP from recorded shapes: products, attention, and whole captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.expand import distinct_ranks
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.flops import flop_by_growth, operator_flop, step_flop
from scaletrace.extrapolate.layout import Layout
from scaletrace.parse.job import Job
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


SMALL = Model("m", "llama", 4, 512, 8, ffn=1024, kv_heads=2, vocab=1024, seq=512, tied=False)
EXPERTS = replace(SMALL, family="moe", experts=4, experts_per_token=2)


def captured(folder: Path, model: Model, layout: str) -> Job:
    """A described job's capture, read."""
    on = device("h100")
    described = Described(model, Layout.parse(layout), on, costs_on(on))
    _, job = calibrated(described, distinct_ranks(described.layout), 1, None, Interference(), {})
    write_capture(job, folder)
    return load(folder, workers=1)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (SMALL, "fsdp=4,mbs=2"),
        (SMALL, "fsdp=2,recompute=full"),
        (SMALL, "tp=2,fsdp=2"),
        (SMALL, "pp=2,microbatches=4"),
        (EXPERTS, "fsdp=2,ep=2"),
    ],
)
def test_flop_grow_as_those_of_the_larger_model(tmp_path: Path, model: Model, layout: str) -> None:
    """From one capture of 4 layers of width 512 those of 6 layers of width 1,024, as the larger model's own capture has."""
    parts = flop_by_growth(captured(tmp_path / "small", model, layout))
    larger = step_flop(captured(tmp_path / "large", model.resized(6, 1024), layout))

    assert parts is not None and larger is not None
    assert larger == pytest.approx(parts.resized(6 / 4, 2.0), rel=2e-3)
    assert step_flop(captured(tmp_path / "small", model, layout)) == pytest.approx(parts.total)


def test_another_width_has_a_utilisation(tmp_path: Path) -> None:
    """The FLOP of `hidden=` and `layers=` are worked out from the recorded products, so MFU is not null."""
    job = captured(tmp_path, SMALL, "fsdp=4,mbs=2")
    wide, deep = (
        prepare(job, asked=Layout.parse(f"fsdp=4,{size}")).flop_per_step for size in ("hidden=1024", "layers=8")
    )
    parts = flop_by_growth(job)

    assert parts is not None
    assert (pytest.approx(parts.resized(1.0, 2.0)), pytest.approx(parts.resized(2.0, 1.0))) == (wide, deep)


def test_a_captures_products_are_those_of_its_model(samples: Path) -> None:
    """Forward and twice that backward over 256 tokens; the first layer's input needs no gradient, attention comes on top."""
    width, vocabulary, tokens = 192, 256, 256
    weights = 12 * width * width + width * vocabulary
    found = step_flop(load(samples / "ddp_w1"))

    assert found is not None
    assert 6 * weights * tokens <= found <= 6 * weights * tokens * 1.2
