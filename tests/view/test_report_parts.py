"""Parts of the report that say what is not known, and what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.view.report import curve, page
from scaletrace.view.report.curve import beside
from scaletrace.view.report.recorded import layers
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
