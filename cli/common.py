"""What all commands share: where text goes, how JSON is written, and how errors become exit codes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from scaletrace import __version__
from scaletrace.errors import ScaletraceError, UsageError

_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_NO_TEXT = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
"""Characters that a terminal obeys (control, change of direction), and how they are shown: names come from anyone."""


class _Console(Console):
    """A console that shows control characters instead of sending them, and whose reader may stop, as `| head` does."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything printed; what styles and cursors need is kept, since it is no text."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(text.translate(_NO_TEXT), style)

    def on_broken_pipe(self) -> None:
        """End quietly; what was asked for was printed."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


def document(schema: str, source: str, health: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The frame of every JSON answer: schema, version, input and health around `parts`."""
    return {"schema": schema, "scaletrace_version": __version__, "input": source, **parts, "health": health}


def print_json(answer: dict[str, Any]) -> None:
    """One JSON document on stdout and nothing else there."""
    sys.stdout.write(json.dumps(finite(answer), indent=1, allow_nan=False) + "\n")


MOST_GPUS = 10_000_000


def in_range(option: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raise UsageError unless `value` is None or a real number in [low, high]."""
    if value is not None and not (low <= value <= high and value < math.inf):
        upto = f" and at most {high:,g}" if math.isfinite(high) else ""
        raise UsageError(f"{option}: {value} is not possible; at least {low:g}{upto}")


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


LONGEST_LINE = 2000
"""Characters of an error that are shown: reason first, remedy last, and a name of any length between."""
STOPPED = 130
"""What shells say of a program that Ctrl-C ended: 128 and the number of the signal."""


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
    except KeyboardInterrupt as error:
        if debug:
            raise
        err.print("stopped")
        raise typer.Exit(STOPPED) from error
    except BrokenPipeError:
        raise
    except (OSError, RecursionError, MemoryError) as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/] {_plain(_in_words(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def _in_words(error: OSError | RecursionError | MemoryError) -> str:
    """One sentence for what the system refused."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}; check the path and its permissions"
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read"
    return "not enough memory; read fewer ranks, or bound it with --read-memory"


def _plain(text: str) -> str:
    """One line with Rich's markup escaped, since file and event names are untrusted; its middle goes where it is long."""
    from rich.markup import escape

    line = "".join(c if c.isprintable() else " " for c in text)
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE * 2 // 3]} … {line[-LONGEST_LINE // 3 :]}"
    return escape(line)
