"""`scaletrace extrapolate` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.extrapolate import extrapolate


@pytest.fixture(scope="module")
def answer(run: Callable[..., Any], samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON answer for the DDP sample, 8 to 1,024 ranks."""
    folder = tmp_path_factory.mktemp("extrapolate")
    done = run("extrapolate", samples / "ddp_w4", "-o", folder / "curve.json", "--json", "--timelines", "64")

    assert 0 == done.returncode, done.stderr
    assert (folder / "curve_64.pftrace").stat().st_size > 1_000
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer == json.loads((folder / "curve.json").read_text())
    return answer


def test_json_is_the_documented_document(answer: dict[str, Any]) -> None:
    """Frame, points for all default sizes, and the answers that belong to the whole curve."""
    assert "scaletrace.extrapolate/1" == answer["schema"]
    assert {"input", "health", "points", "knee_gpus", "comm_dominates_gpus", "benchmark_next"} <= set(answer)
    assert [8, 16, 32, 64, 128, 256, 512, 1024] == [point["gpus"] for point in answer["points"]]


def test_every_point_says_how_it_is_known(answer: dict[str, Any]) -> None:
    """Beyond the measured ranks communication is extrapolated, in ranks; compute stays measured."""
    words = {(p["provenance"]["compute"], p["provenance"]["communication"]) for p in answer["points"]}
    assert {("measured", "extrapolated")} == words


def _inside(*arguments: str | Path) -> Any:
    """The command in this process, which spares the imports of a new one."""
    app = typer.Typer()
    app.command("extrapolate")(extrapolate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_table_names_sizes_and_what_was_guessed(samples: Path, tmp_path: Path) -> None:
    """Without --json a table with a row a size, and the note on the guessed cluster."""
    done = _inside(samples / "fsdp2_w2", "--gpus", "16,256", "-o", tmp_path / "curve.json")

    assert 0 == done.exit_code, done.stderr
    assert "256" in done.stdout and "guess" in done.stdout and "Scaling curve" in done.stdout


def test_prices_and_tokens_give_energy_and_money(shared_data: Path, tmp_path: Path) -> None:
    """A table of prices by device in YAML: watts, tokens a joule and the cost of a million tokens, with their columns."""
    table = tmp_path / "prices.yaml"
    table.write_text("gpu_hour: {V100 SXM2: 1.80}\nkwh: 0.10\n")
    place = tmp_path / "curve.json"
    job = shared_data / "traces" / "torchrec2_v100"
    done = _inside(job, "--gpus", "2,16", "--tokens", "1000", "--price", table, "-o", place)
    point = json.loads(place.read_text())["points"][-1]

    assert 0 == done.exit_code, done.stderr
    assert "currency of --price" in done.stdout
    assert "cost of a million tokens" in done.stdout and "W/GPU (modelled)" in done.stdout
    hours = 1.80 / 3600 / point["tokens_per_s_per_gpu"] + 0.10 / 3.6e6 / point["tokens_per_J"]
    assert 1e6 * hours == pytest.approx(point["money_per_million_tokens"])
    assert 0 < point["power_W_per_gpu"] <= 300 and "modelled" == point["provenance"]["power"]


def test_a_price_without_tokens_says_what_to_give(samples: Path, tmp_path: Path) -> None:
    """It is not silently ignored, and nothing of money is printed where there is no price."""
    priced = _inside(samples / "ddp_w4", "--gpus", "8", "--price", "2.5", "-o", tmp_path / "curve.json")
    plain = _inside(samples / "ddp_w4", "--gpus", "8", "--tokens", "100", "-o", tmp_path / "curve.json")

    assert 0 == priced.exit_code == plain.exit_code
    assert "--price gives no cost:" in priced.stdout and "cost of a million" not in priced.stdout
    assert "cost" not in plain.stdout.replace("costs", "")


def test_strong_scaling_says_what_it_leaves_out(samples: Path, tmp_path: Path) -> None:
    """Sizes that the batch does not divide over stand in the answer with their reason, and so does the measured step."""
    place = tmp_path / "curve.json"
    done = _inside(samples / "ddp_w4", "--gpus", "4,8,12", "--strong", "-o", place)
    answer = json.loads(place.read_text())

    assert 0 == done.exit_code, done.stderr
    assert ([4, 8], [12]) == ([p["gpus"] for p in answer["points"]], [each["gpus"] for each in answer["left_out"]])
    assert "left out: 12 GPUs" in done.stdout and "measured at 4" in done.stdout
    assert abs(answer["measured"]["error"]) < 0.01


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--price", "cheap"], 2, "neither a number nor"),
        (["--price", "-1"], 2, "a number from 0 to"),
        (["--price", "nan"], 2, "a number from 0 to"),
        (["--price", "absent.yaml"], 1, "absent.yaml"),
        (["--gpus", "8,many"], 2, "'many'"),
        (["--cluster", "dgx_h1000"], 2, "no cluster 'dgx_h1000'"),
        (["--cluster", "missing.yaml"], 1, "missing.yaml"),
        (["--layout", "dp=3", "--gpus", "8"], 2, "doesn't fit 8"),
        (["--noise", "wild=1"], 2, "no 'wild'"),
        (["--noise", "residual=lots"], 2, "residual=0.02"),
        (["--nccl-tests", "out.txt"], 2, "RANKS:FILE"),
        (["--nccl-tests", "8:absent.txt"], 1, "absent.txt"),
        (["--layout", "fsdp=2", "--gpus", "8"], 2, "no sharded parameters"),
    ],
)
def test_wrong_options_get_one_sentence(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, message: str
) -> None:
    """Exit code 2 for wrong usage, 1 for input that can't be used, never a traceback."""
    monkeypatch.chdir(tmp_path)
    done = _inside(samples / "ddp_w1", *options)

    assert code == done.exit_code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
