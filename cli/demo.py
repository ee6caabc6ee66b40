"""Runs the whole way through the house on the captures that ship: inspect, replay, critical path, scaling curve."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, out, print_json
from scaletrace.cli.replay import show as show_replay
from scaletrace.cli.replay import write

REPLAYED = "ddp_straggler_w4"
STRETCHED = "ddp_w2"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path("scaletrace-demo"),
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """All of it on real captures that ship with scaletrace, in under a minute.

    Example: scaletrace demo
    """
    with exit_codes(debug):
        began = time.monotonic()
        spoken = not (json_ or quiet)
        samples = Path(str(resources.files("scaletrace.traces") / "samples"))
        replayed = _replay(samples / REPLAYED, output, spoken)
        curve = _extrapolate(samples / STRETCHED, output, spoken)
        report = _report([replayed, curve], output)
        if json_:
            health: dict[str, Any] = {}
            print_json(document("scaletrace.demo/1", str(samples), health, replay=replayed, extrapolate=curve))
        elif spoken:
            _show_files(output, report, time.monotonic() - began)


def _replay(sample: Path, output: Path, spoken: bool) -> dict[str, Any]:
    from scaletrace.parse.load import load
    from scaletrace.replay.result import replay_job

    if spoken:
        out.rule(f"[bold]1  replay[/]  {sample.name}: four ranks, one of them slowed by 50 ms a step")
    result = replay_job(load(str(sample)))
    answer = document("scaletrace.replay/1", sample.name, result.health.to_json(), **result.to_json_parts())
    output.mkdir(parents=True, exist_ok=True)
    drawn = write(result, output / "replay.pftrace")
    (output / "replay.json").write_text(json.dumps(answer, indent=1, allow_nan=False) + "\n")
    if spoken:
        show_replay(answer, drawn)
    return answer


def _extrapolate(sample: Path, output: Path, spoken: bool) -> dict[str, Any]:
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.curve import extrapolate
    from scaletrace.parse.build import build
    from scaletrace.parse.load import load
    from scaletrace.view.terminal import curve_table

    if spoken:
        out.print()
        out.rule(f"[bold]2  extrapolate[/]  {sample.name}: two ranks of the same job, none slowed, on more ranks")
    curve = extrapolate(build(load(str(sample))), cluster=Cluster.load("gloo_10g"), sizes=list(SIZES))
    answer = document("scaletrace.extrapolate/1", sample.name, curve.health.to_json(), **curve.to_json_parts())
    (output / "curve.json").write_text(json.dumps(answer, indent=1, allow_nan=False) + "\n")
    if spoken:
        out.print(curve_table(answer))
    return answer


def _report(answers: list[dict[str, Any]], output: Path) -> Path:
    from scaletrace.view.report import write_report

    target = output / "report.html"
    write_report(target, answers)
    return target


def _show_files(output: Path, report: Path, took_s: float) -> None:
    out.print()
    out.rule("[bold]3  look at it[/]")
    for line in (
        f"timeline   {output / 'replay.pftrace'}   (scaletrace view {output / 'replay.pftrace'})",
        f"curve      {output / 'curve.json'}",
        f"report     {report}   (open it in a browser)",
        f"Done in {took_s:.0f} s. Next: scaletrace replay YOUR_FOLDER; scaletrace extrapolate YOUR_FOLDER --gpus 64,512",
    ):
        out.print(line, markup=False, soft_wrap=True)
