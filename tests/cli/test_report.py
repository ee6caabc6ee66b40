"""`scaletrace report`: answers or captures in, one page and its plots out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.report import report
from tests.view.answers import curve_answer, replay_answer

app = typer.Typer()
app.command()(report)
RUNNER = CliRunner()


@pytest.fixture
def answers(tmp_path: Path) -> list[str]:
    files = []
    for name, answer in (("replay.json", replay_answer()), ("curve.json", curve_answer())):
        (tmp_path / name).write_text(json.dumps(answer, indent=1), encoding="utf-8")
        files.append(str(tmp_path / name))
    return files


def test_answers_become_a_page_and_plot_files(tmp_path: Path, answers: list[str]) -> None:
    """The command says what it wrote, as JSON where asked."""
    page, folder = tmp_path / "r.html", tmp_path / "figures"
    result = RUNNER.invoke(app, [*answers, "-o", str(page), "--plots", str(folder), "--title", "My <job>", "--json"])
    said = json.loads(result.stdout)

    expected = {"sections": 3, "plots": 9, "output": str(page), "size_bytes": page.stat().st_size}
    assert expected == {key: said[key] for key in expected}
    assert sorted(said["files"]) == sorted(str(file) for file in folder.iterdir())
    assert "<h1>My &lt;job&gt;</h1>" in page.read_text(encoding="utf-8")


def test_a_capture_is_replayed_first(tmp_path: Path, samples: Path) -> None:
    """A folder of traces gives the same page as its replay answer."""
    page = tmp_path / "r.html"
    result = RUNNER.invoke(app, [str(samples / "ddp_w2"), "-o", str(page), "--quiet"])

    assert (result.exit_code, result.stdout) == (0, "")
    assert "Where time went" in page.read_text(encoding="utf-8")


def test_a_page_of_a_capture_says_layers_memory_and_mfu(tmp_path: Path, samples: Path) -> None:
    """They come from the answers of inspect and of extrapolate at the measured size; what is not known says why."""
    page = tmp_path / "r.html"
    result = RUNNER.invoke(app, [str(samples / "ddp_w2"), "-o", str(page), "--quiet"])
    text = page.read_text(encoding="utf-8")

    assert 0 == result.exit_code
    assert "Layers, time a step (found by" in text and "<td>optimizer</td>" in text
    assert "<dt>memory</dt>" in text and "<dt>at measured size</dt><dd>MFU " in text
    assert "<dt>not known</dt><dd>power a GPU (W) " in text


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ('{"schema": "scaletrace.replay/1", "steps": [', 1, "not a whole JSON document"),
        ('{"about": "scaletrace.", "schema": "other"}', 2, "no answer of scaletrace"),
        ('["scaletrace.replay/1"]', 2, "no answer of scaletrace"),
    ],
)
def test_files_that_are_no_answers_are_refused(tmp_path: Path, content: str, code: int, words: str) -> None:
    """A cut document and a foreign one get a sentence that names the file."""
    file = tmp_path / "x.json"
    file.write_text(content, encoding="utf-8")
    result = RUNNER.invoke(app, [str(file), "-o", str(tmp_path / "r.html")])

    assert code == result.exit_code
    assert words in result.output
    assert "x.json" in result.output


def test_an_unknown_format_and_an_unwritable_place_are_said(tmp_path: Path, answers: list[str]) -> None:
    """Wrong usage is exit code 2, a place that can't be written is 1."""
    wrong = RUNNER.invoke(app, [*answers, "-o", str(tmp_path / "r.html"), "--plots", str(tmp_path), "--format", "pdf"])
    nowhere = RUNNER.invoke(app, [*answers, "-o", str(tmp_path / "no" / "such" / "r.html")])

    assert (wrong.exit_code, nowhere.exit_code) == (2, 1)
    assert "can't be written" in nowhere.output
