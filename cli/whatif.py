"""Turns a capture and rules into a step that never ran on the command line: what a change is worth, and `whatif.pftrace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, out, print_json
from scaletrace.cli.reading import read_job, reads_captures
from scaletrace.cli.targets import spare

if TYPE_CHECKING:
    from rich.table import Table

    from scaletrace.parse.build import Built
    from scaletrace.replay.whatif import WhatIf

MILLISECOND_NS = 1e6


@reads_captures
def whatif(
    path: Annotated[str, typer.Argument(help="Capture: a folder, a file, a glob or a URL.")],
    rules: Annotated[
        list[str],
        typer.Option("--set", "-s", help="A change, as TARGET=VALUE; may be given more than once. See below."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the Perfetto trace goes.")] = Path(
        "whatif.pftrace"
    ),
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Write no Perfetto trace.")] = False,
    slowdown: Annotated[
        bool,
        typer.Option(
            "--slowdown", help="Take out what kernels lost to overlapping communication, put in what they lose."
        ),
    ] = False,
    arbitrate: Annotated[
        bool,
        typer.Option(
            "--arbitrate/--measured-order", help="Let kernels that fill the GPU hold back others at run time."
        ),
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Change durations, links or delays, and replay.

    Factors multiply the time of kernels and operators by name (gemm*=0.5), class (compute, comm, memory, host), layer
    (layer:blocks.3=0.5) or rank (rank3.host=0.8); times are added (aten::linear=-5us). bandwidth=2x, bandwidth.nic=2x or
    bandwidth.tp=2x and latency=0.5 change links; rank3.delay=20ms adds to each step, rank3.delay=-20ms takes out of each
    what delays the rank (host time beyond its peers' pace, then stalls, then slow kernels), rank3.delay=none keeps the
    peers' pace; overlap=ideal and drop=all_reduce say what communication costs at most.

    Example: scaletrace whatif runs/8gpu --set 'gemm*=0.5' --set bandwidth.nic=2x
    """
    with exit_codes(debug):
        from scaletrace.parse.build import build
        from scaletrace.replay.answer import whatif_parts
        from scaletrace.replay.rules import parse_rule
        from scaletrace.replay.whatif import whatif as ask

        parsed = [parse_rule(rule) for rule in rules]
        spare([path], None if no_trace else output)
        built = build(read_job(path))
        found = ask(built.graph, parsed, arbitrate=arbitrate, slowdown=slowdown)
        health = built.job.health.to_json()
        answer = document("scaletrace.whatif/1", path, health, **whatif_parts(built, found))
        if not no_trace:
            _write(built, found, output)
        if json_:
            print_json(answer)
        elif not quiet:
            show(answer, None if no_trace else output)


def _write(built: Built, found: WhatIf, output: Path) -> None:
    from scaletrace.errors import InputError
    from scaletrace.replay.critical_path import critical_path
    from scaletrace.view.perfetto import write_timeline

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_timeline(output, found.before, projected=found.after, critical_path=critical_path(found.after))
    except OSError as error:
        raise InputError(
            f"{output}: can't be written ({error.strerror}); choose another place with --output"
        ) from error


def show(answer: dict[str, Any], drawn: Path | None) -> None:
    """Print what the change is worth, step by step and part by part."""
    from rich.text import Text

    bound = answer["is_bound"]
    step, steps = answer["step_time_ns"], sum(one["step"] >= 0 for one in answer["steps"])
    window = _change(answer["before_ns"], answer["after_ns"], bound)
    if steps > 1:
        out.print(Text(f"a step: {_change(step['before'], step['after'], bound)}", style="bold"))
        out.print(Text(f"the window of {steps} steps: {window}"))
    else:
        out.print(Text(window, style="bold"))
    for rule in answer["rules"]:
        count = rule["changed_nodes"]
        out.print(Text(f"  {rule['rule']}: {count:,} {'node' if count == 1 else 'nodes'} changed"))
    out.print(_steps(answer))
    out.print(_parts(answer))
    for note in answer["notes"]:
        out.print(Text(f"note: {note}"), soft_wrap=True)
    if drawn is not None:
        out.print(Text(f"Perfetto trace: {drawn}; open it with: scaletrace view {drawn}"), soft_wrap=True)


def _change(before: int, after: int, bound: bool) -> str:
    """What a time becomes, and by how much; "at most" where the change is a bound."""
    same = _ms(after) == _ms(before)
    word = ("shorter" + " at most" * bound) if after <= before or same else "longer"
    share = abs(after - before) / before if before else 0.0
    change = f"{_ms(abs(after - before))} ms ({share:.1%}) {word}" if not same or bound else "no change"
    return f"{_ms(before)} ms → {_ms(after)} ms: {change}"


def _ms(time_ns: float) -> str:
    return f"{time_ns / MILLISECOND_NS:,.3f}"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right")
    return table


def _steps(answer: dict[str, Any]) -> Table:
    table = _table("step", "measured ms", "before ms", "after ms", "change")
    for step in answer["steps"][:16]:
        label = "window" if step["step"] < 0 else str(step["step"])
        change = step["after_ns"] / step["before_ns"] - 1 if step["before_ns"] else 0.0
        values = (step["measured_ns"], step["before_ns"], step["after_ns"])
        table.add_row(label, *(_ms(value) for value in values), f"{change:+.1%}")
    return table


def _parts(answer: dict[str, Any]) -> Table:
    """Mean over ranks of each breakdown part before and after: of a step, and of the window."""
    several = sum(one["step"] >= 0 for one in answer["steps"]) > 1
    window = ("window", "after", "change") if several else ("before", "after", "change")
    table = _table("ms, mean of ranks", *(("a step", "after", "change") if several else ()), *window)
    ranks = list(answer["breakdown"])
    for key in [k for k, v in answer["breakdown"][ranks[0]].items() if isinstance(v, int)] if ranks else []:
        whole = (sum(answer[name][r][key] for r in ranks) / len(ranks) for name in ("breakdown_before", "breakdown"))
        step = (answer[f"step_{name}"][key] for name in ("breakdown_before", "breakdown"))
        cells = (_before_after(*step) if several else []) + _before_after(*whole)
        table.add_row(key.removesuffix("_ns").replace("_", " "), *cells)
    return table


def _before_after(was: float, now: float) -> list[str]:
    return [_ms(was), _ms(now), f"{(now - was) / MILLISECOND_NS:+,.3f}"]
