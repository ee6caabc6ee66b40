"""Layouts: what their text means, what they refuse, and which ranks form which group."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.layout import (
    _ALIASES,
    EXCHANGES,
    MESH,
    PRECISIONS,
    VOCABULARIES,
    Layout,
    Span,
    divisors,
    renamed,
)
from scaletrace.parse.graph import GraphGroup


def test_text_names_axes_and_choices() -> None:
    """Axes, aliases and choices are read, and what is left out keeps its default."""
    expected = Layout(fsdp=64, tp=8, pp=4, mbs=2, microbatches=16, schedule="Interleaved1F1B", chunks=2, sp=True)

    assert expected == Layout.parse("fsdp=64, tp=8,pp=4 mbs=2,m=16,schedule=interleaved,vpp=2,sp=1")


def test_a_layout_prints_as_it_is_read() -> None:
    """Printing and parsing are inverse, defaults left out."""
    layout = Layout(dp=2, fsdp=8, tp=4, pp=2, cp=2, ep=4, mbs=1, microbatches=8, sp=True, recompute="full", zero=1)

    assert layout == Layout.parse(str(layout))
    assert str(Layout()) == "dp=1"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fsdp=8,xp=2", "no axis 'xp' in 'xp=2'; known: dp, fsdp"),
        ("fsdp", "'fsdp' needs a whole number written in digits alone, as in fsdp=8"),
        ("tp=2,tp=4", "tp is given twice"),
        ("tp=0", "at least 1: tp=0"),
        ("tp=-2", "'tp=-2' needs a whole number"),
        ("mbs=1e11", "'mbs=1e11' needs a whole number written in digits alone, as in mbs=8"),
        ("tp=two", "'tp=two' needs a whole number"),
        ("tp=٢", "needs a whole number"),
        ("fsdp=6,ep=4", "must divide the data ranks dp × fsdp × cp = 1 × 6 × 1 = 6"),
        ("pp=4,schedule=zigzag", "unknown pipeline schedule"),
        ("pp=4,microbatches=6,chunks=2,schedule=gpipe", "one chunk a rank"),
        ("chunks=2", "needs a pipeline"),
        ("sp=1", "tp is 1"),
        ("sp=maybe,tp=2", "'sp=maybe,?' must be 0 or 1, as in sp=1"),
        ("recompute=some", "one of none, selective, full"),
        ("zero=4", "zero=4 must be"),
        ("tp=9999999999", "is too large; no degree or size is above 999,999,999"),
    ],
)
def test_nonsense_is_refused_by_name(text: str, sentence: str) -> None:
    """Every wrong part is named, with what would be right."""
    with pytest.raises(UsageError, match=sentence):
        Layout.parse(text)


def test_groups_follow_pytorchs_rank_order() -> None:
    """tp is innermost, pp outermost; FSDP spreads over fsdp × cp; experts over the data ranks."""
    layout = Layout(dp=2, fsdp=4, cp=2, tp=8, pp=2, ep=4)

    assert layout.ranks == 256
    assert Span(8, 1, 32) == layout.span("tp")
    assert Span(2, 8, 128) == layout.span("cp")
    assert Span(4, 16, 64) == layout.span("fsdp")
    assert Span(2, 64, 128) == layout.span("dp")
    assert Span(2, 128, 128) == layout.span("pp")
    assert Span(8, 8, 32) == layout.span("shard")
    assert Span(8, 16, 32) == layout.span("data")
    assert Span(4, 16, 64) == layout.span("ep")


def test_groups_equal_those_of_a_device_mesh() -> None:
    """Members along every axis equal the slices of an arange viewed as (pp, dp, fsdp, cp, tp)."""
    import numpy as np

    layout = Layout(dp=2, fsdp=3, cp=2, tp=2, pp=2)
    mesh = np.arange(layout.ranks).reshape(2, 2, 3, 2, 2)
    for rank in (0, 7, 23, 47):
        at = np.argwhere(mesh == rank)[0]
        for axis, dim in (("pp", 0), ("dp", 1), ("fsdp", 2), ("cp", 3), ("tp", 4)):
            index = tuple(slice(None) if d == dim else int(at[d]) for d in range(5))
            expected = mesh[index].tolist()

            assert expected == list(layout.members(axis, rank))


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=5, max_size=5))
def test_coordinates_number_every_rank_once(degrees: list[int]) -> None:
    """The coordinates of all ranks are all combinations, each once."""
    layout = Layout(**dict(zip(MESH, degrees, strict=True)))
    seen = {tuple(layout.coordinates(rank).values()) for rank in range(layout.ranks)}

    assert layout.ranks == len(seen)


def test_what_is_open_is_taken_from_the_measured_layout() -> None:
    """0 means as measured."""
    measured = Layout(fsdp=8, mbs=2, microbatches=4, seq=2048)
    expected = Layout(fsdp=16, mbs=2, microbatches=8, seq=2048)

    assert expected == Layout.parse("fsdp=16,microbatches=8").over(measured)


def test_no_recomputation_is_what_one_writes_and_as_measured_what_one_leaves_out() -> None:
    """recompute=none takes a measured checkpointing away, as does off; without the key it stays."""
    measured = Layout(tp=2, recompute="full")
    written = [Layout.parse(text).over(measured).recompute for text in ("recompute=none", "recompute=off", "tp=4")]
    assert ["off", "off", "full"] == written


def test_a_stated_layout_renames_groups_whose_axis_was_inferred() -> None:
    """All-to-all between context ranks looks like that of experts; an axis that another group has is not given twice."""
    taken, data = GraphGroup("ep", 2, 1), GraphGroup("dp", 4, 2)
    groups, said = renamed((taken, data), Layout(cp=2, dp=4))
    assert ("cp", "dp") == tuple(group.axis for group in groups)
    assert ["Groups of 2 taken for ep are cp, as the layout says."] == said
    assert ((taken, data), []) == renamed((taken, data), Layout(dp=8, ep=2))
    assert (taken, GraphGroup("cp", 2, 4)) == renamed((taken, GraphGroup("cp", 2, 4)), Layout(cp=2, dp=4))[0]


def test_divisors_are_complete() -> None:
    """Divisors come ascending and without gaps."""
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)


def test_every_key_is_explained() -> None:
    """The page on layouts has each key, and each other spelling that is understood."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "layouts.md").read_text(encoding="utf-8")
    table = page.partition("## What a layout says")[2].partition("## Search")[0]

    assert [] == [field.name for field in fields(Layout) if f"`{field.name}`" not in table]
    assert [] == [name for name in (*_ALIASES, *EXCHANGES, *VOCABULARIES, *PRECISIONS) if f"`{name}`" not in table]
