"""Gives every command that reads captures the same options, and reads captures with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from scaletrace.cli.common import err

if TYPE_CHECKING:
    from scaletrace.parse.job import Job

_PANEL = "Reading"
_GIVEN: ContextVar[dict[str, Any]] = ContextVar("reading options", default={})  # noqa: B039 (never changed in place)


def _option(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=_PANEL, **more)


OPTIONS: dict[str, Any] = {
    "strict": Annotated[bool, typer.Option("--strict", help="Refuse damaged files.", rich_help_panel=_PANEL)],
    "capture": Annotated[str | None, _option("Which capture, where there are several; default: the newest whole one.")],
    "rank_regex": Annotated[str | None, _option("How file names tell the rank, as r'rank(\\d+)', if files do not.")],
    "axes": Annotated[Path | None, _option("YAML file that names the axes of process groups.")],
    "pattern": Annotated[list[str] | None, _option("Regular expression of further kernels that communicate.")],
    "kernel_rules": Annotated[
        list[Path] | None, _option("YAML file of kernel classes that go before those that ship; repeatable.")
    ],
    "step": Annotated[str | None, _option("Regular expression of the annotation of a step, if not ProfilerStep.")],
    "workers": Annotated[int | None, _option("Files read at a time; default: one a core.", min=1)],
    "read_memory": Annotated[int | None, _option("MiB that the files being read may take together.", min=1)],
    "scheduler": Annotated[str | None, _option("Dask cluster whose workers read the files, as tcp://host:8786.")],
    "max_bytes": Annotated[int | None, _option("Most bytes of one file after decompression.", min=1)],
    "max_ratio": Annotated[int | None, _option("Most bytes out per byte in, against decompression bombs.", min=1)],
    "max_event_bytes": Annotated[int | None, _option("Most bytes of one event.", min=1)],
    "max_depth": Annotated[int | None, _option("Deepest nesting inside an event.", min=1)],
}
_LIMITS = ("max_bytes", "max_ratio", "max_event_bytes", "max_depth")
_RENAMED = {"pattern": "patterns", "step": "step_annotation"}


def reads_captures(command: Callable[..., None]) -> Callable[..., None]:
    """The command with OPTIONS behind its own; `read_job` inside it uses what was given."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        token = _GIVEN.set({name: arguments.pop(name) for name in OPTIONS})
        try:
            command(**arguments)
        finally:
            _GIVEN.reset(token)

    hints = get_type_hints(command, include_extras=True)
    own = [one.replace(annotation=hints[name]) for name, one in inspect.signature(command).parameters.items()]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "strict" else None, annotation=kind
        )
        for name, kind in OPTIONS.items()
    ]
    wrapper.__annotations__ = hints | OPTIONS
    wrapper.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return wrapper


def also_read() -> list[str]:
    """The files that reading options of the running command name: axes and kernel rules."""
    given = _GIVEN.get()
    return [str(path) for path in (given.get("axes"), *(given.get("kernel_rules") or ())) if path is not None]


def read_job(path: str) -> Job:
    """The job at `path`, read with the options of the running command; a progress bar shows after two seconds."""
    from scaletrace.parse.limits import Limits
    from scaletrace.parse.load import load
    from scaletrace.view.progress import progress

    given = {name: value for name, value in _GIVEN.get().items() if value is not None}
    limits = Limits(**{name: given.pop(name) for name in _LIMITS if name in given})
    if "read_memory" in given:
        given["memory_bytes"] = given.pop("read_memory") << 20
    options = {_RENAMED.get(name, name): value for name, value in given.items()}
    with progress(f"reading {path}", err):
        return load(path, limits=limits, **options)
