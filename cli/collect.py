"""Turns `scaletrace collect [options] -- COMMAND…` into the job run as it is, and a capture of it."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, print_json
from scaletrace.errors import UsageError

if TYPE_CHECKING:
    from scaletrace.collect.settings import Settings

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""How this command is to be registered: what follows `--` belongs to the job."""


def collect(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND…", help="The job, as you start it today, after `--`.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", "--out", help="Capture folder.", show_default="capture-JOB or capture-DATE-TIME"
        ),
    ] = None,
    start_step: Annotated[int, typer.Option(help="First step to record, counted from 0.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps to record.")] = 3,
    every: Annotated[int, typer.Option(help="Record again every N steps, each time into a sub-folder; 0: once.")] = 0,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Record when FOLDER/record is touched or SIGUSR1 comes, not by step.")
    ] = False,
    after: Annotated[float, typer.Option(help="Time window: begin N seconds after the first step.")] = 0.0,
    duration: Annotated[
        float, typer.Option("--for", help="Time window: record N seconds, for jobs without steps.")
    ] = 0.0,
    ranks: Annotated[str, typer.Option(help="Ranks to trace: all, classes, or a list as 0,4-7.")] = "all",
    shapes: Annotated[bool, typer.Option(help="Record shapes of tensors.")] = True,
    stacks: Annotated[bool, typer.Option(help="Record Python stacks: slow and large.")] = False,
    memory: Annotated[bool, typer.Option(help="Record allocations.")] = False,
    tokens_per_step: Annotated[int | None, typer.Option(help="Tokens of one step of the whole job.")] = None,
    samples_per_step: Annotated[int | None, typer.Option(help="Samples of one step of the whole job.")] = None,
    flops_per_step: Annotated[float | None, typer.Option(help="Model FLOPs of one step of the whole job.")] = None,
    compression: Annotated[str, typer.Option(help="zstd, gzip, or auto.")] = "auto",
    upload: Annotated[str, typer.Option(help="URL to copy the capture to, such as s3://bucket/run.")] = "",
    fake_world: Annotated[int, typer.Option(help="Run one process as if the job had N ranks, without a network.")] = 0,
    rank: Annotated[int, typer.Option(help="The rank to be in the fake world.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a capture that is there already.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout; the job's stdout goes to stderr.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of our own.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of our own.")] = False,
) -> None:
    """Run COMMAND unchanged and record it.

    The job's code, output and exit code stay as they are. Example:

    scaletrace collect --steps 3 -- torchrun --nproc-per-node 8 train.py --config big.yaml
    """
    options = dict(locals())
    with exit_codes(debug):
        if command[0].startswith("-"):
            raise UsageError(f"no such option: {command[0]} (the job goes behind `--`; see scaletrace collect --help)")
        from scaletrace.collect.launch import leave_as, run

        outcome = run(_settings(options), overwrite=overwrite, stdout_to_stderr=as_json)
        if as_json:
            answer = {"returncode": outcome.returncode, "captures": outcome.captures}
            print_json(document("scaletrace.collect/1", outcome.folder, {"notes": list(outcome.notes)}, **answer))
        elif not quiet:
            say(outcome.captures, outcome.folder, outcome.notes)
    sys.exit(leave_as(outcome.returncode))


def _settings(options: dict[str, Any]) -> Settings:
    """What was asked for on the command line, as the recorder takes it."""
    from scaletrace.collect.launch import default_folder
    from scaletrace.collect.settings import Settings

    asked = {field.name: options[field.name] for field in fields(Settings) if field.name in options}
    asked |= {"folder": str(options["out"] or default_folder()), "command": tuple(options["command"])}
    asked |= {"fake_rank": options["rank"], "after_s": options["after"], "for_s": options["duration"]}
    return Settings(**asked | {"start_step": None if options["on_demand"] else options["start_step"]})


def say(captures: dict[str, list[int]], folder: str, notes: tuple[str, ...]) -> None:
    """One line a capture on stderr, and the notes."""
    for path, ranks in sorted(captures.items()):
        err.print(f"recorded {len(ranks)} rank{'s' * (len(ranks) != 1)} in {path}", markup=False, soft_wrap=True)
    if not captures:
        hint = "see collect.log there" if (Path(folder) / "collect.log").exists() else "did it run fewer steps?"
        err.print(f"nothing was recorded in {folder}: no rank reached the window; {hint}", markup=False, soft_wrap=True)
    for note in notes:
        err.print(note, markup=False, soft_wrap=True)
