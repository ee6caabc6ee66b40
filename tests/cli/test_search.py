"""The search command: a model or a capture in, the best layouts out."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from scaletrace.cli.search import search

app = Typer()
app.command()(search)


def call(*words: str) -> tuple[int, str]:
    """(exit code, output) of the command."""
    outcome = CliRunner().invoke(app, list(words))
    return outcome.exit_code, outcome.output


def test_a_models_layouts_as_json() -> None:
    """One document with the frame of all answers, the best layout, the next ones and what became of the rest."""
    code, text = call("llama2-7b", "--gpus", "16", "--batch", "64", "--cluster", "dgx_h100", "--json")
    answer = json.loads(text)

    assert (0, "scaletrace.search/1") == (code, answer["schema"])
    assert {"best", "next", "candidates", "evaluated", "discarded", "health", "model", "cluster"} <= set(answer)
    assert 9 == len(answer["next"])
    assert answer["best"]["memory_bytes"] < 80e9
    assert answer["best"]["step_time_s"] == pytest.approx(sum(answer["best"]["terms_s"].values()))
    assert "modelled" == answer["compute"]


def test_the_table_says_why_the_next_ones_lose() -> None:
    """The first row is the best, the others name what costs them more."""
    code, text = call("llama2-7b", "--gpus", "8", "--batch", "32", "--best", "3")

    assert 0 == code
    assert "Why they lose, beside the best" in text
    assert "candidates" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_quiet_prints_the_layout_alone() -> None:
    """With --quiet the answer can be given to another command as it is."""
    from scaletrace.extrapolate.layout import Layout

    code, text = call("llama2-7b", "--gpus", "8", "--batch", "32", "--quiet")

    assert 0 == code
    assert 8 == Layout.parse("".join(text.split())).ranks


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("llama2-7b", "--gpus", "0"), 2, "at least 1"),
        (("llama3-70b", "--gpus", "1", "--batch", "1"), 2, "no layout of 1 GPUs fits"),
        (("/nowhere/at/all", "--gpus", "8"), 1, "no such file"),
        (("llama2-7b", "--gpus", "8", "--cluster", "toaster"), 2, "toaster"),
    ],
)
def test_what_can_not_be_is_one_sentence(words: tuple[str, ...], code: int, sentence: str) -> None:
    """Wrong sizes, models that do not fit, missing captures and unknown clusters have their exit code and reason."""
    actual, text = call(*words)

    assert code == actual
    assert sentence in " ".join(text.split())


def test_a_capture_is_searched_from_its_measured_layers(shared_data: Path) -> None:
    """Model and times come from the trace, and the answer says so."""
    code, text = call(str(shared_data / "gloo" / "pp_1f1b_w2"), "--gpus", "4", "--batch", "32", "--seq", "8", "--json")
    answer = json.loads(text)

    assert 0 == code
    assert "measured and stretched" == answer["compute"]
    assert any("Model read from shapes: 4 layers of width 64" in note for note in answer["health"]["notes"])


@pytest.mark.parametrize("name", ["ddp_w2", "tp_w2", "fsdp2_w2", "pp_1f1b_w2", "pp_1f1b_w4", "tp_dp_w4"])
def test_the_estimate_of_a_capture_is_its_measured_step(shared_data: Path, name: str) -> None:
    """Whatever the job spends its time on, at the measured layout the estimate is the measurement, and says how."""
    code, text = call(str(shared_data / "gloo" / name), "--gpus", "4", "--confirm", "0", "--json")
    answer = json.loads(text)

    assert 0 == code
    assert abs(answer["fit"]["residual"]) < 0.01 < abs(answer["fit"]["unfitted"])
    assert any("Fitted to the measured step" in note for note in answer["health"]["notes"])


def test_the_best_are_rewritten_and_replayed(shared_data: Path) -> None:
    """Beside the estimate of the first ones stands the step of the capture's own graph in that layout."""
    path = str(shared_data / "gloo" / "fsdp2_w2")
    code, text = call(path, "--gpus", "4", "--confirm", "2", "--best", "4", "--json")
    answer = json.loads(text)
    rows = [answer["best"], *answer["next"]]

    assert 0 == code
    assert all(row["rewritten_step_time_s"] or row["why_not_rewritten"] for row in rows[:2])
    assert [None, None] == [row["rewritten_step_time_s"] for row in rows[2:]]
    table = " ".join(call(path, "--gpus", "4", "--confirm", "2", "--best", "4")[1].split())
    assert "rewritten: the measured graph made into that layout and replayed" in table


def test_a_job_of_one_layer_is_searched(samples: Path) -> None:
    """The shipped sample has a single block, which is enough to compare layouts that keep it whole."""
    code, text = call(str(samples / "ddp_w2"), "--gpus", "4", "--confirm", "0", "--quiet")

    assert (0, True) == (code, "dp=" in text)


def test_missing_shapes_are_said_only_where_they_are_missing(shared_data: Path) -> None:
    """A trace without shapes is asked for them; one without layers is told why none were found."""
    shapeless, layerless = (
        " ".join(call(str(shared_data / "traces" / name), "--gpus", "8")[1].split())
        for name in ("megatron_tp2_v100", "dlrm8_v100")
    )

    assert "record_shapes=True" in shapeless and "no recorded shapes" in shapeless
    assert "no layers were found" in layerless and "record_shapes" not in layerless
