"""What all commands share: where text goes, how JSON is written, and how errors become exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from scaletrace import __version__
from scaletrace.errors import ScaletraceError, UsageError


class _Console(Console):
    """A console whose reader may stop reading, as `| head` does."""

    def on_broken_pipe(self) -> None:
        """End quietly; what was asked for was printed."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


out = _Console(highlight=False)
err = Console(stderr=True, highlight=False)


def document(schema: str, source: str, health: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The frame of every JSON answer: schema, version, input and health around `parts`."""
    return {"schema": schema, "scaletrace_version": __version__, "input": source, **parts, "health": health}


def print_json(answer: dict[str, Any]) -> None:
    """One JSON document on stdout and nothing else there."""
    sys.stdout.write(json.dumps(answer, indent=1, allow_nan=False) + "\n")


@contextmanager
def exit_codes(debug: bool = False) -> Iterator[None]:
    """Turn our own errors into one sentence on stderr and exit code 1 (2 for wrong usage)."""
    try:
        yield
    except ScaletraceError as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/] {_plain(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


def _plain(text: str) -> str:
    """Escape Rich markup and control characters, since file and event names are untrusted."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else " " for c in text))
