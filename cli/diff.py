"""Turns two captures into what explains the difference of their steps on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, out, print_json
from scaletrace.cli.reading import read_job, reads_captures

MILLISECOND_NS = 1e6
TITLES = (
    ("path", "on the critical path"),
    ("parts", "mean of all ranks"),
    ("collectives", "collectives, sum of ranks"),
    ("operations", "operations, sum of ranks"),
)


ALIKE = 0.5
"""Runs that share less of their time than this are hardly of one job."""


@reads_captures
def diff(
    before: Annotated[str, typer.Argument(help="Capture of the first run.")],
    after: Annotated[str, typer.Argument(help="Capture of the second run.")],
    most: Annotated[int, typer.Option(help="Lines a table.", min=1)] = 8,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; only the exit code tells.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Compare two runs of a job: which operations and waits explain the difference of a step.

    The lines of the first table sum to the difference of the windows. Times are per step.

    Example: scaletrace diff runs/monday runs/tuesday
    """
    with exit_codes(debug):
        from scaletrace.replay.diff import diff as compare
        from scaletrace.replay.result import replay_job

        first, second = replay_job(read_job(before)), replay_job(read_job(after))
        health = first.health
        health.add(second.health)
        found = compare(first, second)
        if found.common < ALIKE:
            health.note(f"only {found.common:.0%} of the time is in operations of both runs: are they of one job?")
        parts = found.to_json_parts()
        answer = document("scaletrace.diff/1", before, health.to_json(), compared_with=after, **parts)
        if json_:
            print_json(answer)
        elif not quiet:
            show(answer, most)


def show(answer: dict[str, Any], most: int) -> None:
    """Print the difference and the lines that explain most of it."""
    from rich.table import Table
    from rich.text import Text

    from scaletrace.view.terminal import health_lines

    a, b = answer["a_step_ns"], answer["b_step_ns"]
    share = (b - a) / a if a else 0.0
    out.print(
        Text(f"{_ms(a)} ms → {_ms(b)} ms a step: {(b - a) / MILLISECOND_NS:+,.3f} ms ({share:+.1%})", style="bold")
    )
    if any(line["delta_ns"] for line in answer["path"]):
        _say_windows(answer["a_window_ns"], answer["b_window_ns"])
    for key, title in TITLES:
        lines = [line for line in answer[key] if line["delta_ns"]]
        if not lines:
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=34)
        for column in ("kind", "before ms", "after ms", "change ms"):
            table.add_column(column, justify="right" if column != "kind" else "left", no_wrap=True)
        for line in lines[:most]:
            change = f"{line['delta_ns'] / MILLISECOND_NS:+,.3f}"
            name = "".join(c if c.isprintable() else " " for c in line["what"])
            table.add_row(Text(name), Text(line["kind"]), _ms(line["a_ns"]), _ms(line["b_ns"]), change)
        out.print(table)
        left = sum(line["delta_ns"] for line in lines[most:])
        if len(lines) > most:
            out.print(Text(f"{len(lines) - most} further lines: {left / MILLISECOND_NS:+,.3f} ms"))
    for line in health_lines(answer):
        out.print(line)


def _say_windows(was: float, now: float) -> None:
    """What the lines on the critical path sum to, which is not the step time."""
    from rich.text import Text

    out.print(
        Text(
            "From end to end on each rank, as in replay. The whole window divided by its steps, which also holds how far "
            f"ranks and devices were apart as it began: {_ms(was)} ms → {_ms(now)} ms, "
            f"{(now - was) / MILLISECOND_NS:+,.3f} ms, to which the lines on the critical path sum."
        )
    )


def _ms(time_ns: float) -> str:
    return f"{time_ns / MILLISECOND_NS:,.3f}"
