"""Turns `scaletrace report` into one HTML page (and plot files) from answers on disk, or from captures it replays first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, out, print_json
from scaletrace.cli.reading import read_job, reads_captures
from scaletrace.cli.targets import spare
from scaletrace.errors import InputError, UsageError

if TYPE_CHECKING:
    from scaletrace.parse.build import Built


@reads_captures
def report(
    paths: Annotated[list[str], typer.Argument(help="JSON answers (--json of any command, curve.json), or captures.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    plots: Annotated[Path | None, typer.Option(help="Write every plot into this folder too.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Plot files as svg, png or svg,png.")] = "svg",
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write one self-contained HTML page: curve, breakdown, collectives, stragglers, critical path, provenance.

    Example: scaletrace report runs/8gpu curve.json -o report.html --plots figures --format svg,png
    """
    with exit_codes(debug):
        from scaletrace.view.progress import progress
        from scaletrace.view.report import write_plots, write_report

        spare(paths, output)
        answers = []
        with progress("reading", err) as advance:
            for done, path in enumerate(paths):
                advance(done, len(paths), f"reading {Path(path).name}")
                answers += read_answers(path)
        try:
            page = write_report(output, answers, title)
            kinds = [kind.strip() for kind in formats.split(",") if kind.strip()]
            files = write_plots(plots, answers, kinds) if plots is not None else []
        except OSError as error:
            raise InputError(f"{error.filename}: can't be written ({error.strerror})") from error
        if as_json:
            parts = {
                "output": str(page.path),
                "sections": page.sections,
                "plots": page.plots,
                "files": [str(f) for f in files],
            }
            print_json(document("scaletrace.report/1", ", ".join(paths), {}, **parts, size_bytes=page.size_bytes))
        elif not quiet:
            out.print(f"{page.path}: {page.sections} sections, {page.plots} plots", markup=False, soft_wrap=True)
            if files:
                err.print(f"{len(files)} plot files in {plots}", markup=False)


def read_answers(path: str) -> list[dict[str, Any]]:
    """The JSON answer in a file; a capture is replayed to get one, beside what was recorded and how well it ran."""
    answer = _json_answer(Path(path))
    if answer is not None:
        return [answer]
    from scaletrace.parse.build import build
    from scaletrace.replay.result import replay_job

    built = build(read_job(path))
    result = replay_job(built)
    replayed = document("scaletrace.replay/1", path, result.health.to_json(), **result.to_json_parts())
    return [replayed, _recorded(path, built)]


_RECORDED = ("backend", "ranks", "steps", "layers", "memory")
"""Parts of `inspect` that no plot of a replay shows."""
_MEASURED = ("mfu", "memory_bytes", "power_W_per_gpu")
"""Numbers of the measured size, as the first point of `extrapolate` has them."""


def _recorded(path: str, built: Built) -> dict[str, Any]:
    """What `inspect` says of layers and memory, and what `extrapolate` says of the measured size; null with its reason."""
    from scaletrace.cli.inspect import describe
    from scaletrace.errors import ScaletraceError
    from scaletrace.extrapolate.base import prepare
    from scaletrace.extrapolate.point import Options, evaluate

    job = built.job
    found = describe(job, built)
    parts = {key: found[key] for key in _RECORDED}
    parts["memory"] = {key: value for key, value in parts["memory"].items() if value is not None}
    try:
        base = prepare(built)
        point = evaluate(base, base.ranks, Options()).to_json()
        parts["at_measured_size"] = {key: point[key] for key in _MEASURED if point[key] is not None}
        parts["not_known"] = {key: point["unknown"].get(key) for key in _MEASURED if point[key] is None}
    except ScaletraceError as error:
        parts["not_known"] = {"measured size": str(error)}
    return document("scaletrace.inspect/1", path, job.health.to_json(), **parts)


def _json_answer(file: Path) -> dict[str, Any] | None:
    """An answer of ours, or None where the file is none (a trace, a folder, a URL)."""
    if not file.is_file() or file.suffix != ".json":
        return None
    with file.open(encoding="utf-8", errors="replace") as stream:
        if "scaletrace." not in stream.read(4096):
            return None
        stream.seek(0)
        try:
            answer = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: not a whole JSON document ({error}); write it again with --json") from error
    if not isinstance(answer, dict) or not str(answer.get("schema", "")).startswith("scaletrace."):
        raise UsageError(f"{file}: no answer of scaletrace; give what a command printed with --json, or a capture")
    return answer
