"""scaletrace synth: a described job becomes a capture that the other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.synth import synth
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import step_errors, without_stalls
from scaletrace.replay.engine import replay

TINY = "family: llama\nlayers: 4\nhidden: 512\nheads: 8\nffn: 1408\nvocab: 1024\nseq: 512\ntied: false\n"
EXPERTS = TINY.replace("llama", "moe") + "experts: 8\nexperts_per_token: 2\n"


@pytest.fixture
def app() -> typer.Typer:
    """The one command, in this process."""
    program = typer.Typer()
    program.command()(synth)
    return program


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model small enough to write whole captures in a second."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def ask(app: typer.Typer, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=4,mbs=2",
        "dp=2,fsdp=2,mbs=2",
        "dp=4",
        "dp=2,zero=1,tp=2",
        "tp=2,sp=1,fsdp=2",
        "pp=2,microbatches=4,dp=2",
        "pp=2,chunks=2,microbatches=4",
        "cp=2,fsdp=2",
        "fsdp=4,recompute=full",
    ],
)
def test_every_axis_gives_a_trace_that_replays(app: typer.Typer, tiny: Path, tmp_path: Path, layout: str) -> None:
    """All ranks of a small world: collectives match, the graph is clean, strict replay is within 1 %."""
    folder = tmp_path / "run"
    code, _, err = ask(app, "--model", tiny, "--layout", layout, "--ranks", "all", "--out", folder, "--steps", "2")
    assert (0, "") == (code, err)

    job = load(folder, workers=1)
    built = build(job)
    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))

    assert not job.health.unmatched
    assert job.collectives.matched.all()
    assert not built.health.unmatched
    assert 0.01 > max(abs(error.error) for error in errors)


def test_experts_exchange_tokens(app: typer.Typer, tmp_path: Path) -> None:
    """A mixture of experts over two expert ranks has all-to-alls on the ep axis."""
    model = tmp_path / "moe.yaml"
    model.write_text(EXPERTS)
    code, _, _ = ask(app, "--model", model, "--layout", "fsdp=2,ep=2", "--ranks", "all", "--out", tmp_path / "run")
    job = load(tmp_path / "run", workers=1)

    assert 0 == code
    assert "ep" in {group.axis for group in job.groups}
    assert "all_to_all" in set(job.collectives.to_frame()["kind"])


def test_a_step_time_or_an_mfu_is_met(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """The written step lasts what was asked for, within 0.1 %, and says that it is calibrated."""
    base = ("--model", tiny, "--layout", "fsdp=8,mbs=4", "--out", tmp_path / "run", "--json")

    timed = json.loads(ask(app, *base, "--step-time", "0.05")[1])
    rated = json.loads(ask(app, *base, "--mfu", "0.02")[1])

    assert timed["step_time_s"] == pytest.approx(0.05, rel=1e-3)
    assert rated["mfu"] == pytest.approx(0.02, rel=1e-3)
    assert "calibrated" == rated["provenance"]
    assert "scaletrace.synth/1" == rated["schema"]


def test_without_an_anchor_the_answer_says_that_times_are_modelled(
    app: typer.Typer, tiny: Path, tmp_path: Path
) -> None:
    """Measured beats modelled, and the reader is told which it is."""
    answer = json.loads(ask(app, "--model", tiny, "--layout", "fsdp=2", "--out", tmp_path / "run", "--json")[1])

    assert "modelled" == answer["provenance"]
    assert {"kernel times without a measured anchor": 1} == answer["health"]["guessed"]
    assert any("not calibrated" in note for note in answer["health"]["notes"])


def test_only_distinct_ranks_are_written_unless_asked(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """A pipeline of two stages over eight ranks has two distinct ones; numbers choose others."""
    layout = "pp=2,dp=4,microbatches=4"
    distinct = json.loads(ask(app, "--model", tiny, "--layout", layout, "--out", tmp_path / "a", "--json")[1])
    chosen = json.loads(
        ask(app, "--model", tiny, "--layout", layout, "--out", tmp_path / "b", "--ranks", "1,5", "--json")[1]
    )

    assert ([0, 4], 8) == (distinct["ranks"], distinct["world_size"])
    assert [1, 5] == chosen["ranks"]


def test_faults_reach_the_files(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """A truncated file is written when asked for."""
    ask(
        app,
        "--model",
        tiny,
        "--layout",
        "fsdp=2",
        "--ranks",
        "all",
        "--out",
        tmp_path / "run",
        "--fault",
        "truncated:1:0.5",
    )

    assert load(tmp_path / "run", workers=1).health.dropped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "fsdp=0"), "at least 1"),
        (("--layout", "tp=3"), "tp=3 does not divide heads 8"),
        (("--layout", "pp=8,microbatches=8"), "8 stages for the 4 layers"),
        (("--layout", "fsdp=2", "--mfu", "1.5"), "--mfu 1.5 must lie between 0 and 1"),
        (("--layout", "fsdp=2", "--mfu", "0.4", "--step-time", "1"), "give one of them"),
        (("--layout", "fsdp=2", "--step-time", "1e-6"), "communication alone takes"),
        (("--layout", "fsdp=2", "--ranks", "5"), "the world has ranks 0 to 1"),
        (("--layout", "fsdp=2", "--ranks", "some"), "write distinct, all, or numbers"),
        (("--layout", "fsdp=2", "--fault", "gremlin"), "no fault 'gremlin'"),
        (("--layout", "fsdp=2", "--cluster", "no-such"), "no-such"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_two(
    app: typer.Typer, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """What is wrong, and no traceback."""
    code, out, err = ask(app, "--model", tiny, "--out", tmp_path / "run", *arguments)

    assert 2 == code
    assert "" == out
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "fsdp=9999999"), "a world of 9,999,999 ranks"),
        (("--layout", "fsdp=1024", "--ranks", "all", "--steps", "1000"), "write fewer ranks"),
        (("--layout", "dp=1,microbatches=99999999"), "write fewer ranks"),
    ],
)
def test_sizes_that_can_not_be_written_are_refused_at_once(
    app: typer.Typer, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A limit is named before memory runs out; exit code 1."""
    code, out, err = ask(app, "--model", tiny, "--out", tmp_path / "run", *arguments)

    assert (1, "") == (code, out)
    assert message in " ".join(err.split())


def test_quiet_prints_nothing(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """The exit code tells."""
    assert (0, "", "") == ask(app, "--model", tiny, "--layout", "fsdp=2", "--out", tmp_path / "run", "--quiet")
