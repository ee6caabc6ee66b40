"""Turns a capture into the rebuilt step on the command line: errors, where time went, and `replay.pftrace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, out, print_json
from scaletrace.cli.reading import read_job, reads_captures
from scaletrace.cli.targets import spare

if TYPE_CHECKING:
    from scaletrace.replay.result import ReplayResult
    from scaletrace.view.perfetto import WriteReport


@reads_captures
def replay(
    path: Annotated[str, typer.Argument(help="Capture: a folder, a file, a glob or a URL.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the Perfetto trace goes.")] = Path(
        "replay.pftrace"
    ),
    ranks: Annotated[str, typer.Option(help="Ranks to draw, as 0,3,8-15; default: all.")] = "",
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Write no Perfetto trace.")] = False,
    graphml: Annotated[Path | None, typer.Option(help="Write the graph as GraphML too (small jobs).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Rebuild the measured steps: how close, where time went, who made others wait, and the critical path.

    Example: scaletrace replay runs/8gpu -o step.pftrace
    """
    with exit_codes(debug):
        from scaletrace.errors import InputError
        from scaletrace.parse.profiler_cost import profiler_cost
        from scaletrace.replay.result import replay_job

        chosen = parse_ranks(ranks) if ranks else None
        spare([path], None if no_trace else output, graphml)
        result = replay_job(read_job(path))
        if not len(result.built.graph):
            raise InputError(f"{path}: nothing to replay, the trace holds no work; see scaletrace inspect")
        _refuse_absent(chosen, result)
        cost = profiler_cost(result.built.job)
        parts = result.to_json_parts() | {"profiler_cost": cost.to_json() if cost else None}
        answer = document("scaletrace.replay/1", path, result.health.to_json(), **parts)
        drawn = None if no_trace else write(result, output, chosen)
        if graphml is not None:
            _write_graphml(result, graphml)
        if json_:
            print_json(answer)
        elif not quiet:
            show(answer, drawn)


def parse_ranks(text: str) -> list[int]:
    """Ranks from "0,3,8-15"."""
    from scaletrace.errors import UsageError

    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()) or len(part) > 40:
            raise UsageError(f"--ranks: whole numbers and ranges as in 0,3,8-15, got {part!r}")
        first, last = int(low), int(high or low)
        if not first <= last < 1 << 20:
            raise UsageError(f"--ranks: {part!r} is no range of ranks")
        found.extend(range(first, last + 1))
    return found


def _refuse_absent(chosen: list[int] | None, result: ReplayResult) -> None:
    """A trace without a rank that was asked for would look like one in which nothing happened."""
    from scaletrace.errors import UsageError

    present = [rank.rank for rank in result.built.job.ranks]
    absent = sorted(set(chosen or ()) - set(present))
    if absent:
        raise UsageError(f"--ranks: rank {absent[0]} is not in this capture, which holds {len(present)} ranks")


def write(result: ReplayResult, output: Path, ranks: list[int] | None = None) -> WriteReport:
    """Draw measured and replayed steps side by side, with the critical path, into `output`."""
    from scaletrace.errors import InputError
    from scaletrace.view.perfetto import write_timeline

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return write_timeline(
            output, result.timeline, measured=result.built.measured, critical_path=result.path, ranks=ranks
        )
    except OSError as error:
        raise InputError(
            f"{output}: can't be written ({error.strerror}); choose another place with --output"
        ) from error


def _write_graphml(result: ReplayResult, target: Path) -> None:
    import networkx

    networkx.write_graphml(result.built.graph.to_networkx(), target)


def show(answer: dict[str, Any], drawn: WriteReport | None) -> None:
    """Print the tables of an answer, and where the Perfetto trace is."""
    from scaletrace.view.terminal import replay_tables

    for part in replay_tables(answer):
        out.print(part)
    if drawn is not None:
        out.print(
            f"Perfetto trace: {drawn.path} ({drawn.slices:,} slices); open it with: scaletrace view {drawn.path}",
            markup=False,
            soft_wrap=True,
        )
