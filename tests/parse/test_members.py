"""Sizes as a trace writes them, which may be no sizes at all."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrace.parse.job import KINDS
from scaletrace.parse.members import concrete, elements_of, is_shape, parsed, times


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ([[2, 3]], (6, 6)),
        ([[[2, 3], [4]]], (10, 10)),
        ([["s0", 3]], (-1, -1)),
        ([[None]], (-1, -1)),
        ([[-2, 3]], (-1, -1)),
        ([[10**30]], (-1, -1)),
        ([[1 << 40] * 8], (1 << 42, 1 << 42)),
    ],
)
def test_elements_are_counted_where_dimensions_are_sizes(dims: Any, expected: tuple[int, int]) -> None:
    """Whatever stands there, the count fits a column of 64 bits, or is not known."""
    assert expected == elements_of(KINDS.index("all_reduce"), dims, 2)


def test_text_that_is_no_list_is_none() -> None:
    """Broken, absurdly nested or of another kind."""
    assert [(), (), (), [1]] == [parsed(text) for text in ("[1", "[" * 100_000, "{}", "[1]")]


def test_an_argument_is_an_integer_of_64_bits_or_not_known() -> None:
    """Infinite and huge numbers are none."""
    assert [7, -1, -1, -1, -1] == [concrete("[7, 1e999, 1e30, null]", at) for at in range(5)]


def test_bytes_that_no_column_holds_are_not_known() -> None:
    """Zero elements are zero bytes; an unknown count or size is unknown."""
    assert [8, 0, -1, -1, -1] == [times(2, 4), times(0, -1), times(-1, 4), times(2, -1), times(1 << 61, 8)]


def test_a_shape_is_integers_whose_product_a_tensor_can_have() -> None:
    """An empty list is a scalar's; symbols, huge sizes and huge products are none."""
    values = ([2, 3], [], ["s0"], [10**30], [1 << 40] * 8, None)

    assert [True, True, False, False, False, False] == [is_shape(value) for value in values]
