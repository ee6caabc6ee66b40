"""Parts of the report that say what is not known, and what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaletrace.view.report import curve, page
from scaletrace.view.report.curve import beside
from scaletrace.view.report.html import Table
from scaletrace.view.report.recorded import layers
from scaletrace.view.report.sections import sections_of
from scaletrace.view.report.words import named, shown_value
from tests.view.answers import curve_answer


def test_a_band_that_tells_nothing_is_neither_drawn_nor_listed() -> None:
    """The step stays; low and high are question marks in the table, and the CSV keeps what the answer holds."""
    answer = curve_answer()
    known = curve.curve(answer)
    for point in answer["points"]:
        point["unknown"] = {"step_time_band": "no data axis"}
    untold = curve.curve(answer)

    assert known is not None and untold is not None
    assert ("f0 band" in known.drawing, "f0 band" in untold.drawing) == (True, False)
    low = list(untold.table.columns).index("low s")
    assert ["?", "?"] == list(untold.table.shown[0][low : low + 2])
    assert known.table.rows == untold.table.rows


def test_layers_are_a_table_or_the_reason_why_there_are_none() -> None:
    """Times have units, a part without a backward pass shows a dash, and other answers show nothing."""
    part = {"name": "layer", "count": 10, "forward_ns": 6_793_386, "backward_ns": 0, "other_ns": 0, "share": 0.69}
    table = "".join(layers({"layers": {"found": True, "rule": "repeated kernels", "parts": [part]}}))
    reason = "".join(layers({"layers": {"found": False, "why_not": "<one> layer", "parts": []}}))

    assert "found by repeated kernels" in table and ">6.79 ms<" in table and ">69.0 %<" in table and ">–<" in table
    assert "No layers were found: &lt;one&gt; layer" in reason
    assert [] == layers({"points": []})


def test_long_inputs_wrap_in_the_table_of_origins() -> None:
    """A path has no space to break at, so its cells may break anywhere and the table keeps to the page."""
    style = (Path(page.__file__).parent / "style.css").read_text(encoding="utf-8")

    assert "#origins td:not(.n) { white-space: normal; overflow-wrap: anywhere;" in style


@pytest.mark.parametrize(
    ("at", "others", "side"),
    [
        (228.0, [235.0], "end"),  # words behind the knee would cross the line of the other mark
        (235.0, [228.0], "start"),
        (300.0, [], "end"),
        (200.0, [], "start"),
        (100.0, [110.0], "start"),  # before it there is no room
        (470.0, [460.0], "end"),
    ],
)
def test_words_of_a_mark_cross_no_other_line(at: float, others: list[float], side: str) -> None:
    """They stand where they stay in the plot and cross the fewest lines."""
    assert side == beside(at, 100.0, others)


@pytest.mark.parametrize(
    ("group", "key", "value", "expected"),
    [
        ("noise", "residual_cv", 0.020054022930906086, ("scatter from step to step", "2.0 %")),
        ("overlap_slowdown", "transfers", 0.2265548893330372, ("transfers beside kernels: slower by", "22.7 %")),
        ("step_time_ns", "measured", 44_029_664, ("measured", "44.0 ms")),
        ("benchmark_next_narrows", "64", 0.709, ("64", "70.9 %")),
        ("", "exposed_comm_ns", 1500, ("exposed communication", "1.50 µs")),
        ("", "axis_certainty", 0.7, ("certainty of the axes", "70.0 %")),
        ("", "ideal overlap s", 0.09, ("ideal overlap", "90 ms")),
        ("", "data_axis_seen", True, ("gradients are seen to be reduced", "yes")),
        ("", "flop", 3.1622776601683796e24, ("FLOP", "3.16e+24")),
        ("", "drift", None, ("drift", "–")),
    ],
)
def test_keys_and_numbers_are_words_with_units(group: str, key: str, value: Any, expected: tuple[str, str]) -> None:
    """The end of a key says the unit, which stands beside three digits; the words are those of a reader."""
    assert expected == (named(key, group), shown_value(key, value, group))


def test_a_table_shows_words_and_its_csv_keeps_keys() -> None:
    """Readers see units, other programs the numbers."""
    table = Table(["rank", "wall_ns", "memory_bytes"], [["0", 245_126_354, None]])
    text = table.to_html("Ranks")

    assert ">wall<" in text and ">245 ms<" in text and ">memory a GPU<" in text and ">–<" in text
    assert "rank,wall_ns,memory_bytes\n0,245126354,\n" == table.to_csv()


def test_fastest_layouts_by_size_stand_only_where_several_were_tried() -> None:
    """One layout a size is no choice: the page says instead how to compare others."""
    answer = curve_answer()
    answer["best_layout_by_gpus"] = {"8": {"fsdp": 8}}
    answer["points"] = answer["points"][:1]
    one = "".join(sections_of([answer])[0].after)
    answer["points"] = [answer["points"][0], {**answer["points"][0], "layout": {"dp": 8}}]
    several = "".join(sections_of([answer])[0].after)

    assert ("Fastest layout by size" in one, "scaletrace search CAPTURE" in one) == (False, True)
    assert ("Fastest layout by size" in several, "scaletrace search CAPTURE" in several) == (True, False)


@pytest.mark.parametrize(
    ("memory_bytes", "shown"), [(16e9, (">limit 80 GB<", ">80 GB<")), (13e6, (">memory a GPU, of 80 GB<", ">15 MB<"))]
)
def test_memory_is_drawn_beside_its_limit_unless_it_would_look_like_nothing(
    memory_bytes: float, shown: tuple[str, str]
) -> None:
    """A few megabytes have an axis of their own that names the limit."""
    answer = curve_answer() | {"memory_limit_bytes": 80e9}
    for point in answer["points"]:
        point["memory_bytes"] = memory_bytes
    plot = curve.memory(answer)

    assert plot is not None
    assert [True, True] == [words in plot.drawing for words in shown]
