"""The HTML report and its plots."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from scaletrace.errors import UsageError
from scaletrace.view.report import collectives, curve, replay, write_plots, write_report
from scaletrace.view.report.html import Table, escape, tag
from scaletrace.view.report.read import num
from tests.view.answers import HOSTILE, curve_answer, replay_answer


class Reader(HTMLParser):
    """Collects the tags, attributes and headings of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self._in_heading = False

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes += attrs
        self._in_heading = name in ("h2", "h3")

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def test_every_answer_becomes_a_section_with_its_plots(tmp_path: Path) -> None:
    """Scaling comes first, then the replay, then where the numbers come from."""
    page = write_report(tmp_path / "r.html", [replay_answer(), curve_answer()])

    expected = [
        "Scaling",
        "Step time",
        "Efficiency: tokens/s/GPU",
        "Exposed communication by axis",
        "Memory a GPU",
        "Replay",
        "Where time went",
        "Communication by axis",
        "Who made others wait",
        "Critical path",
        "Collectives: size against bandwidth",
        "Provenance and health",
    ]
    assert expected == read(page.path).headings
    assert (page.sections, page.plots) == (3, 9)


def test_times_of_a_replay_are_durations_a_step(tmp_path: Path) -> None:
    """A group of times carries its unit to its values, and waits are a step's, also for a rank nobody waited for."""
    answer = replay_answer() | {"step_time_ns": {"measured": 44_029_664, "replayed": 44_031_000}}
    answer["steps"] = [{**answer["steps"][0], "step": n} for n in range(4)]
    late = {"rank": 1, "caused_wait_ns": 32_000_000, "each_waited_ns": 8_000_000, "shorter_by_ns": 4_000_000}
    answer["stragglers"] = [
        {**late, "cause": "launches later"},
        {"rank": 0, "caused_wait_ns": 0, "shorter_by_ns": 8000},
    ]
    text = write_report(tmp_path / "r.html", [answer]).path.read_text(encoding="utf-8")

    assert "measured 44.0 ms, replayed 44.0 ms" in text
    assert "A row runs from the end of the step before" in text
    assert "44,029,664" not in text
    assert "the others wait 8 ms a step for rank 1 on average" in text
    assert "32 ms" not in text
    assert "2 µs" in text


def test_the_page_loads_and_runs_nothing(tmp_path: Path) -> None:
    """No script, no event handler, no address but data and anchors, and a policy that forbids the rest."""
    page = read(write_report(tmp_path / "r.html", [replay_answer(), curve_answer()]).path)
    targets = [value or "" for key, value in page.attributes if key in ("href", "src", "action", "data")]

    assert "script" not in page.tags
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    assert all(value.startswith(("#", "data:")) for value in targets)
    assert any(value and "default-src 'none'" in value for _, value in page.attributes)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Names of axes, kernels, lanes, inputs and notes can't add an element or an attribute, however long they are."""
    hostile = write_report(tmp_path / "h.html", [replay_answer(HOSTILE), curve_answer(HOSTILE)])
    plain = write_report(tmp_path / "p.html", [replay_answer("x"), curve_answer("x")])
    pages = [read(hostile.path), read(plain.path)]
    text = hostile.path.read_text(encoding="utf-8")

    assert sorted(set(pages[0].tags)) == sorted(set(pages[1].tags))
    assert {key for key, _ in pages[0].attributes} == {key for key, _ in pages[1].attributes}
    assert "<script" not in text and "<img" not in text
    assert "\x00" not in text and "\x1b" not in text


def test_numbers_can_be_downloaded_as_csv(tmp_path: Path) -> None:
    """Each plot has a link that holds its numbers, unrounded."""
    page = read(write_report(tmp_path / "r.html", [curve_answer()]).path)
    links = [unquote(value or "") for key, value in page.attributes if key == "href"]
    table = next(link for link in links if link.startswith("data:text/csv") and "MFU" in link).split(",", 1)[1]
    rows = list(csv.DictReader(io.StringIO(table)))

    expected = [("8.0", "fsdp=8", "0.1"), ("64.0", "fsdp=64", "0.12"), ("512.0", "fsdp=512", "0.2")]
    assert expected == [(row["GPUs"], row["layout"], row["step s"]) for row in rows]


def test_csv_texts_cannot_become_formulas() -> None:
    """A spreadsheet runs cells that begin with = + - @; an apostrophe keeps them text, numbers stay numbers."""
    table = Table(["name", "n"], [["=cmd()", -1.5], ["@x", 2], ["plain", None]])

    expected = "name,n\n'=cmd(),-1.5\n'@x,2\nplain,\n"
    assert expected == table.to_csv()


def test_text_is_escaped_once_in_elements_and_attributes() -> None:
    """Foreign text can't close a quote or open an element; markup that was built here passes unchanged."""
    expected = '<p title="&quot;&#x27;&amp;&lt;">&lt;b&gt;<b>x</b></p>'

    assert expected == tag("p", "<b>", tag("b", "x"), title="\"'&<")
    assert escape(tag("b", "x")) == "<b>x</b>"


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"schema": "scaletrace.replay/1"},
        {"schema": "scaletrace.extrapolate/1", "points": [{"gpus": 8}, {"gpus": "many"}, 7, None]},
        {
            "schema": "scaletrace.extrapolate/1",
            "points": [{"gpus": 0, "step_time_s": 1}, {"gpus": 8, "step_time_s": {}}],
        },
        {"schema": "scaletrace.replay/1", "breakdown": {"0": {}, "x": None}, "collectives": {}, "stragglers": [{}]},
        {"schema": "scaletrace.replay/1", "critical_path": {"segments": [{"start_ns": 1}], "share": {"a": None}}},
        {"schema": "scaletrace.replay/1", "breakdown": {"0": {"compute_ns": "x", "wall_ns": 5}}},
        {"schema": "unknown/9", "things": [{"a": 1, "b": {"c": 2}}], "n": [1, 2]},
    ],
)
def test_answers_that_lack_parts_still_make_a_page(tmp_path: Path, broken: dict[str, Any]) -> None:
    """What is missing is left out; nothing crashes and nothing is invented."""
    page = write_report(tmp_path / "r.html", [broken])

    assert read(page.path).headings[-1] == "Provenance and health"


def test_missing_values_are_dashes_not_zeros() -> None:
    """A point without power or bubble shows a dash in the table and an empty cell in the CSV."""
    plot = curve.curve(curve_answer())

    assert plot is not None
    assert plot.table.shown[0][plot.table.columns.index("power W/GPU")] == "–"
    assert plot.table.rows[0][list(plot.table.columns).index("bubble")] is None


def test_provenance_is_the_shape_of_a_point() -> None:
    """Measured points are discs, interpolated ones squares, extrapolated ones diamonds, and each says so."""
    plot = curve.curve(curve_answer())

    assert plot is not None
    shapes = re.findall(r"<(circle|rect|polygon)><title>|<(circle|rect|polygon) [^>]*><title>", plot.drawing)
    assert ["circle", "rect", "polygon"] == [a or b for a, b in shapes]
    assert "512 GPUs, fsdp=512: 200 ms (extrapolated)" in plot.drawing


def test_the_fitted_model_finds_latency_and_rate_again() -> None:
    """Collectives that follow 20 µs + size / 100 GB/s are fitted by these numbers."""
    model = collectives.fit(collectives.series_of(replay_answer())[0])

    assert model is not None
    assert model.latency_ns == pytest.approx(20_000, rel=1e-6)
    assert model.rate_Bps == pytest.approx(100e9, rel=1e-6)


def test_no_model_is_fitted_to_two_sizes() -> None:
    """Two sizes can't tell latency from noise."""
    answer = replay_answer()
    answer["collectives"] = answer["collectives"][:2]

    assert collectives.fit(collectives.series_of(answer)[0]) is None


def test_many_ranks_are_drawn_in_part_and_listed_in_full() -> None:
    """Of 500 ranks the plot has the most exposed 32, the table all, and the title says so."""
    plot = replay.breakdown(replay_answer(ranks=500))

    assert plot is not None
    assert plot.title == "Where time went (the 32 most exposed of 500 ranks)"
    assert len(plot.table.rows) == 500


def test_a_path_with_holes_is_drawn_with_holes() -> None:
    """An answer that lists only the longest segments leaves blank what it does not list."""
    answer = replay_answer()
    answer["critical_path"]["segments"][1].update(start_ns=60, dur_ns=40)
    plot = replay.path_strip(answer)

    assert plot is not None
    widths = [
        float(w) for w in re.findall(r'<rect class="f\d edge"[^>]*|width="([\d.]+)" height="44', plot.drawing) if w
    ]
    assert sum(widths) == pytest.approx(444 * 0.7, rel=0.01)


def test_plots_are_written_as_svg_files_of_their_own(tmp_path: Path) -> None:
    """Each file is well-formed XML with its style inside, so that any viewer shows it."""
    files = write_plots(tmp_path / "figures", [replay_answer(HOSTILE), curve_answer()])

    assert len(files) == 9
    for file in files:
        root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(--" not in file.read_text(encoding="utf-8")


def test_plots_are_written_as_png_where_resvg_is_installed(tmp_path: Path) -> None:
    """The picture is a PNG of twice the plot's size with something on it."""
    pytest.importorskip("resvg_py")
    files = write_plots(tmp_path, [curve_answer()], formats=("png",))
    data = next(file for file in files if "curve" in file.name).read_bytes()

    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 960
    assert len(data) > 5_000


def test_unknown_formats_and_empty_reports_are_refused(tmp_path: Path) -> None:
    """Both are wrong usage and say what would do."""
    with pytest.raises(UsageError, match="known formats: svg, png"):
        write_plots(tmp_path, [curve_answer()], formats=("pdf",))
    with pytest.raises(UsageError, match="at least one JSON answer"):
        write_report(tmp_path / "r.html", [])


def test_the_answers_themselves_ride_along(tmp_path: Path) -> None:
    """The page holds each JSON answer for other programs."""
    page = read(write_report(tmp_path / "r.html", [replay_answer()]).path)
    links = [unquote(value or "") for key, value in page.attributes if key == "href"]
    inside = next(link for link in links if link.startswith("data:application/json")).split(",", 1)[1]

    assert replay_answer() == json.loads(inside)


def test_numbers_are_read_from_plain_and_banded_values_only() -> None:
    """Texts, booleans, NaN and missing values are no numbers."""
    expected = [1.0, 2.0, None, None, None, None]
    assert expected == [num(v) for v in (1, {"p50": 2}, "3", True, float("nan"), None)]


def test_a_comparison_says_what_explains_the_difference(tmp_path: Path) -> None:
    """The sentence names the change and its largest part, the plot and the tables have the rest."""
    lines = [
        {"what": "gemm", "kind": "compute", "a_ns": 1000, "b_ns": 900, "delta_ns": -100},
        {"what": "wait <3>", "kind": "gap", "a_ns": 0, "b_ns": 600, "delta_ns": 600},
    ]
    answer = {
        "schema": "scaletrace.diff/1",
        "a_step_ns": 1000,
        "b_step_ns": 1500,
        "delta_ns": 500,
        "path": lines,
        "collectives": [{"what": "dp all_reduce", "a_ns": 5, "b_ns": 6, "delta_ns": 1}],
    }
    page = write_report(tmp_path / "r.html", [answer])
    text = page.path.read_text(encoding="utf-8")

    expected = "A step of the second run is 500 ns (50.0 %) longer; most of it is wait &lt;3&gt; (+600 ns on the critical path)."
    assert expected in text
    assert "What changed on the critical path" in read(page.path).headings
    assert "dp all_reduce" in text


def test_limits_are_drawn_over_compute(tmp_path: Path) -> None:
    """Utilization over FLOP is a plot with the wall marked."""
    points = [{"flop": 10.0**e, "utilization": u, "layout": {"dp": 8}} for e, u in ((24, 0.5), (26, 0.45), (28, 0.1))]
    answer = {
        "schema": "scaletrace.limits/1",
        "device": "h100",
        "linear_until_flop": 1e26,
        "wall_flop": 9e27,
        "curve": points,
    }
    page = write_report(tmp_path / "r.html", [answer])

    assert "Utilization over training compute" in read(page.path).headings
    assert "linear until here" in page.path.read_text(encoding="utf-8")


def test_a_what_if_shows_before_and_after(tmp_path: Path) -> None:
    """The sentence says what the change is worth; steps and parts stand side by side."""
    part = {"compute_ns": 60, "exposed_comm_ns": 40, "exposed_by_axis_ns": {"dp": 40}, "wall_ns": 100}
    answer = {
        "schema": "scaletrace.whatif/1",
        "rules": [{"rule": "comm=0.5", "changed_nodes": 7}],
        "steps": [{"step": 3, "measured_ns": 101, "before_ns": 100, "after_ns": 80}],
        "before_ns": 100,
        "after_ns": 80,
        "breakdown_before": {"0": part},
        "breakdown": {"0": {**part, "exposed_comm_ns": 20, "exposed_by_axis_ns": {"dp": 20}, "wall_ns": 80}},
    }
    page = write_report(tmp_path / "r.html", [answer])
    text = page.path.read_text(encoding="utf-8")

    expected = "With comm=0.5 the run is 20 ns (20.0 %) shorter: 80 ns."
    assert expected in text
    assert ["Before and after", "Where time went", "Exposed communication by axis"] == read(page.path).headings[1:4]
    assert '<th scope="col" class="n">before</th>' in text


def test_the_best_layouts_are_split_into_their_terms(tmp_path: Path) -> None:
    """A search gives a bar a layout, a sentence on the fastest, and why the next ones are behind."""

    def layout(tp: int, compute_s: float, bubble_s: float) -> dict[str, Any]:
        terms = {"compute": compute_s, "bubble": bubble_s, "expert": 0.0}
        return {
            "layout": {"tp": tp, "dp": 1},
            "step_time_s": compute_s + bubble_s,
            "terms_s": terms,
            "memory_bytes": 2**30,
        }

    slower = {**layout(4, 1.0, 0.5), "behind": 0.25, "reasons": ["bubble +300 ms"]}
    answer = {"schema": "scaletrace.search/1", "gpus": 64, "best": layout(8, 1.0, 0.2), "next": [slower]}
    page = write_report(tmp_path / "r.html", [answer])
    text = page.path.read_text(encoding="utf-8")

    expected = "At 64 GPUs tp=8 is fastest with 1.20 s a step; the next layout is 25.0 % behind."
    assert expected in text
    assert "bubble +300 ms" in text
    assert "expert" not in text.split("Provenance")[0]


def test_a_layout_found_by_replay_is_said_with_its_replayed_step(tmp_path: Path) -> None:
    """The step of the headline is the one that the order rests on, and a next one that may be as fast is not behind."""
    best = {"layout": {"dp": 8}, "step_time_s": 0.9, "rewritten_step_time_s": 1.1, "terms_s": {"compute": 0.9}}
    near = {"layout": {"tp": 8}, "step_time_s": 1.0, "terms_s": {"compute": 1.0}, "behind": None, "within_error": True}
    near["behind_range"] = [-0.09, 0.2]
    answer = {"schema": "scaletrace.search/1", "gpus": 8, "best": best, "next": [near]}
    text = write_report(tmp_path / "r.html", [answer]).path.read_text(encoding="utf-8")

    assert (
        "At 8 GPUs dp=8 is fastest with 1.10 s a step by replay of the measured graph; the next layout may be" in text
    )
    assert "-9" not in text.split("is fastest with")[1].split("</p>")[0]
    assert "-9 to +20 %" in text


def test_records_by_name_and_nested_lists_are_shown(tmp_path: Path) -> None:
    """What no plot draws still stands on the page: clocks by rank, lists inside groups of values."""
    answer = {
        "schema": "scaletrace.inspect/1",
        "ranks": {"expected": 4, "present": [0, 1, 3], "missing": [2]},
        "clocks": {"0": {"offset_ns": 1500, "source": "reference"}, "1": {"offset_ns": None, "source": "same host"}},
    }
    text = write_report(tmp_path / "r.html", [answer]).path.read_text(encoding="utf-8")

    assert "expected 4, present 0, 1, 3, missing 2" in text
    assert "1.50 µs" in text and "same host" in text


def test_the_step_without_the_cost_of_overlap_is_a_line_of_its_own() -> None:
    """Where the answer has both numbers, both are drawn and listed."""
    answer = curve_answer()
    plain = curve.curve(answer)
    for point in answer["points"]:
        point["ideal_overlap_step_time_s"] = 0.9 * point["step_time_s"]["p50"]
    both = curve.curve(answer)

    assert plain is not None and both is not None
    assert ("if overlap cost nothing" in plain.drawing, "if overlap cost nothing" in both.drawing) == (False, True)
    assert both.table.rows[0][list(both.table.columns).index("ideal overlap s")] == pytest.approx(0.09)
