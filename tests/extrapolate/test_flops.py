"""FLOP from recorded shapes: products, attention, and whole captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.extrapolate.flops import operator_flop, step_flop
from scaletrace.parse.load import load


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
            10 * 2 * 4 * 64 * 32 * 128,
        ),
        ("aten::mm", "[[4,8],[9,16]]", 0),
        ("aten::mm", "[]", 0),
        ("aten::mm", "not json", 0),
        ("aten::add", "[[4,8],[4,8]]", 0),
    ],
)
def test_flop_of_one_call(name: str, dims: str, flop: int) -> None:
    """Two for each multiply-add; what doesn't fit counts nothing."""
    assert flop == operator_flop(name, dims)


def test_a_captures_products_are_those_of_its_model(samples: Path) -> None:
    """Forward and twice that backward over 256 tokens; the first layer's input needs no gradient, attention comes on top."""
    width, vocabulary, tokens = 192, 256, 256
    weights = 12 * width * width + width * vocabulary
    found = step_flop(load(samples / "ddp_w1"))

    assert found is not None
    assert 6 * weights * tokens <= found <= 6 * weights * tokens * 1.2
