"""Turns the command line into calls of the library: one `scaletrace` program, one module a command."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated

import typer

from scaletrace import __version__
from scaletrace.cli.common import err

COMMANDS = (
    "collect",
    "inspect",
    "replay",
    "whatif",
    "diff",
    "extrapolate",
    "search",
    "synth",
    "limits",
    "report",
    "view",
    "query",
    "catalog",
    "demo",
)

app = typer.Typer(
    name="scaletrace",
    help="Replay a distributed PyTorch job from its Kineto traces, and stretch it to clusters that do not exist yet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options before the command."""
    if version:
        sys.stdout.write(f"scaletrace {__version__}\n")
        raise typer.Exit


def _register() -> None:
    for name in COMMANDS:
        module = importlib.import_module(f"scaletrace.cli.{name}")
        settings = getattr(module, "CONTEXT_SETTINGS", {})
        app.command(name, context_settings=settings)(getattr(module, name))


def main() -> None:
    """Entry point of the `scaletrace` script; an unforeseen error is reported without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that the terminal's encoding can't show
    try:
        _register()
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        err.print(
            f"error: {type(error).__name__}: {error}\nThis is a fault of scaletrace; please report it with `--debug`.",
            markup=False,
            soft_wrap=True,
        )
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
