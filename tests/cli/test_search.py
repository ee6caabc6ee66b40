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


def widest(text: str) -> int:
    """Characters of the longest line but those to be pasted, which must stay whole."""
    return max(len(line) for line in text.splitlines() if not line.startswith(("the first in full", "go on with")))


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
    """The first row is the best, the others name what costs them more by the estimate."""
    code, text = call("llama2-7b", "--gpus", "8", "--batch", "32", "--best", "3")

    assert 0 == code
    assert "Fastest by the estimate" in text and "not replayed" in text
    assert "because of, by the estimate" in text
    assert "steps of described jobs are 7.0 % to 30.0 % longer" in " ".join(text.split())
    assert "candidates" in text
    assert widest(text) <= 80


def test_quiet_prints_the_layout_alone() -> None:
    """With --quiet the answer can be given to another command as it is."""
    from scaletrace.extrapolate.layout import Layout

    code, text = call("llama3-70b", "--gpus", "4096", "--batch", "2048", "--quiet")

    assert (0, 1) == (code, len(text.splitlines()))
    assert len(text) > 80 and 4096 == Layout.parse(text.strip()).ranks


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("llama2-7b", "--gpus", "0"), 2, "at least 1"),
        (("llama3-70b", "--gpus", "1", "--batch", "1"), 2, "no layout of 1 GPUs fits"),
        (("/nowhere/at/all", "--gpus", "8"), 1, "no such file"),
        (("llama9", "--gpus", "8"), 1, "no such file, and no model of that name; models: gpt2-small"),
        (("llama2-7b", "--gpus", "8", "--price", "cheap"), 2, "neither a number nor"),
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
    assert any("agrees there by construction" in note for note in answer["health"]["notes"])


def test_the_best_are_rewritten_and_replayed(shared_data: Path) -> None:
    """Two of the best, what may still be faster (at most two) and the measured layout are replayed; one is first, the
    rest follow on one measure."""
    path = str(shared_data / "gloo" / "fsdp2_w2")
    code, text = call(path, "--gpus", "4", "--confirm", "2", "--best", "4", "--json")
    answer = json.loads(text)
    rows = [answer["best"], *answer["next"]]
    known = [row["rewritten_step_time_s"] for row in rows if row["rewritten_step_time_s"] is not None]
    order = [row["best_known_step_time_s"] for row in rows if row.get("compared_by", "replay") is not None]

    assert (0, "replay") == (code, answer["ordered_by"])
    assert 3 <= len(known) == answer["estimate_error"]["confirmed"] <= 5
    assert rows[0]["rewritten_step_time_s"] is not None and all(
        row.get("behind") is None or row["behind"] >= 0 for row in rows
    )
    assert order[1:] == sorted(order[1:], key=lambda step_s: max(float(f"{step_s:.3g}"), float(f"{order[0]:.3g}")))
    assert known == sorted(known, key=lambda step_s: float(f"{step_s:.3g}"))
    assert {"fsdp": 4} == next(
        {name: row["layout"][name] for name in ("dp", "fsdp", "tp") if row["layout"].get(name, 1) > 1}
        for row in rows
        if row["as_measured"]
    )
    table = " ".join(call(path, "--gpus", "4", "--confirm", "2", "--best", "4")[1].split())
    assert "rewritten: the measured graph made into that layout and replayed" in table
    assert "Fastest by replay: " in table and "error of the estimate: replayed steps are" in table


def test_the_measured_step_is_that_of_replay_and_extrapolate(samples: Path) -> None:
    """One definition of a step: what the estimate is fitted to is what the replay of the capture takes."""
    from scaletrace.parse.build import build
    from scaletrace.parse.load import load
    from scaletrace.replay.engine import replay
    from scaletrace.replay.steps import step_time_s

    graph = build(load(samples / "ddp_w2")).graph
    timeline = replay(graph)
    answer = json.loads(call(str(samples / "ddp_w2"), "--gpus", "2", "--json")[1])
    own = next(row for row in [answer["best"], *answer["next"]] if row["as_measured"])
    expected = step_time_s(graph, timeline.start_ns, timeline.end_ns)

    assert expected == pytest.approx(answer["fit"]["measured_s"])
    assert expected == pytest.approx(own["rewritten_step_time_s"])


def test_the_global_batch_is_stated(samples: Path) -> None:
    """As measured a GPU at any size unless asked for, in samples and tokens, in the headline too."""
    path = str(samples / "ddp_w2")
    kept = json.loads(call(path, "--gpus", "8", "--confirm", "0", "--json")[1])["global_batch"]
    asked = json.loads(call(path, "--gpus", "8", "--confirm", "0", "--batch", "64", "--json")[1])["global_batch"]
    text = " ".join(call(path, "--gpus", "8", "--confirm", "0", "--batch", "64")[1].split())

    assert ("measured", 8 * kept["samples_per_gpu"]) == (kept["source"], kept["samples"])
    assert ("--batch", 64, 64 * asked["tokens_per_sample"]) == (asked["source"], asked["samples"], asked["tokens"])
    assert "Global batch 64 samples of" in text and "as asked (8 a GPU)" in text


def test_throughput_mfu_and_cost_follow_the_step() -> None:
    """Tokens of the global batch a second of one GPU, MFU of the model's FLOP, and a million tokens' share of an hour."""
    answer = json.loads(call("llama2-7b", "--gpus", "8", "--batch", "32", "--price", "3.6", "--json")[1])
    best = answer["best"]
    rate = 32 * answer["global_batch"]["tokens_per_sample"] / 8 / best["step_time_s"]
    table = call("llama2-7b", "--gpus", "8", "--batch", "32", "--price", "3.6")[1]

    assert best["tokens_per_s_per_gpu"] == pytest.approx(rate)
    assert best["money_per_million_tokens"] == pytest.approx(1e6 * 3.6 / 3600 / rate)
    assert 0.2 < best["mfu"] < 0.8
    assert all(name in table for name in ("cost/Mtok", "tok/s/GPU", "MFU"))
    assert widest(table) <= 80


def test_a_cpu_jobs_tokens_cost_nothing_that_is_known(samples: Path) -> None:
    """Compute of a CPU says nothing of a GPU's MFU or money, and the answer says why there is none."""
    answer = json.loads(
        call(
            str(samples / "ddp_w2"), "--gpus", "2", "--cluster", "dgx_h100", "--confirm", "0", "--price", "2", "--json"
        )[1]
    )

    assert (None, None) == (answer["best"]["mfu"], answer["best"]["money_per_million_tokens"])
    assert any("not recorded on H100 SXM" in note for note in answer["health"]["notes"])


def test_what_no_shape_tells_is_unknown(shared_data: Path) -> None:
    """Attention under a name of its own tells no heads and no length; a transposed weight tells the vocabulary."""
    path = str(shared_data / "traces" / "nanogpt8_h100")
    answer = json.loads(call(path, "--gpus", "8", "--confirm", "0", "--json")[1])
    notes = " ".join(answer["health"]["notes"])

    assert ["length", "heads"] == answer["model_unknown"]
    assert 16384 == answer["global_batch"]["tokens_per_sample"]
    assert "unknown heads, vocabulary 50304" in notes and "No shape of attention tells the length" in notes


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


def test_a_measured_layout_of_another_size_is_refused(samples: Path) -> None:
    """--layout says how the capture was laid out, so one with more ranks than it has is a misunderstanding."""
    code, text = call(str(samples / "ddp_w2"), "--gpus", "4", "--layout", "dp=4")

    assert 2 == code
    assert "has 4 ranks, and the capture is of 2" in " ".join(text.split())
