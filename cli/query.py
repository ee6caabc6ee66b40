"""Turns `scaletrace query` into a question to Perfetto's trace processor, and its rows into a table, CSV or JSON."""

from __future__ import annotations

import csv
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrace.cli.common import document, err, exit_codes, in_range, out, print_json
from scaletrace.errors import UsageError

if TYPE_CHECKING:
    from scaletrace.view.sql import Answer
    from scaletrace.view.wasm import Cell


class Ask(StrEnum):
    """The prepared questions."""

    PATH = "critical-path"
    EXPOSED = "exposed-communication"
    STRAGGLERS = "stragglers"


def query(
    file: Annotated[Path, typer.Argument(help="A .pftrace of ours, or any trace that Perfetto reads.")],
    sql: Annotated[str, typer.Argument(help="SQL; `-` reads it from stdin.")] = "",
    ask: Annotated[Ask | None, typer.Option(help="A prepared question instead of SQL.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values on stdout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    limit: Annotated[int, typer.Option(help="Rows of the table on the terminal; CSV and JSON have all.", min=1)] = 100,
    timeout: Annotated[float, typer.Option(help="Seconds that the question may take; 0: as long as it wants.")] = 0.0,
    binary: Annotated[Path | None, typer.Option(help="A trace_processor_shell to use instead.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No remarks on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Ask a trace in SQL, offline, through Perfetto's trace processor.

    Beside Perfetto's tables (slice, flow, counter, args, …) there are the views st_slice, st_comm, st_counter and st_path.

    Example: scaletrace query replay.pftrace "SELECT rank, SUM(wait_ns)/1e6 AS ms FROM st_comm GROUP BY rank"
    """
    with exit_codes(debug):
        from scaletrace.view import sql as engine

        question = _question(sql, ask)
        in_range("--timeout", timeout, 0, 1e7)
        answer = engine.query(file, question, binary, timeout or None)
        if as_json:
            rows = [[_plain(cell) for cell in row] for row in answer.rows]
            print_json(
                document("scaletrace.query/1", str(file), {}, sql=question, columns=list(answer.columns), rows=rows)
            )
        elif as_csv:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(answer.columns)
            writer.writerows([_plain(cell) for cell in row] for row in answer.rows)
        else:
            _print(answer, limit, quiet)


def _question(sql: str, ask: Ask | None) -> str:
    from scaletrace.view.sql import PREPARED

    if (ask is None) == (not sql):
        raise UsageError('give either SQL or --ask, for example: scaletrace query FILE "SELECT COUNT(*) FROM slice"')
    if ask is not None:
        return PREPARED[ask.value.replace("-", " ")]
    return sys.stdin.read() if sql == "-" else sql


def _plain(cell: Cell) -> int | float | str | None:
    return cell.hex() if isinstance(cell, bytes) else cell


def _print(answer: Answer, limit: int, quiet: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from scaletrace.view.units import MISSING, clean

    if not answer.columns:
        if not quiet:
            err.print("done; the statement gives no rows")
        return
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(answer.columns):
        first = answer.rows[0][index] if answer.rows else None
        table.add_column(
            Text(clean(column)), justify="right" if isinstance(first, int | float) else "left", overflow="fold"
        )
    for row in answer.rows[:limit]:
        table.add_row(*(Text(MISSING if cell is None else clean(_plain(cell))) for cell in row))
    out.print(table)
    if len(answer.rows) > limit and not quiet:
        err.print(f"{limit} of {len(answer.rows)} rows shown; --limit, --csv or --json give more")
