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


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
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
