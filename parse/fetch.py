"""Turns a URL into local files for as long as they are needed; what is local already stays where it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scaletrace.errors import InputError, MissingExtraError
from scaletrace.parse.peek import SUFFIXES

Source = str | Path | Sequence[str | Path]


@contextmanager
def local(source: Source) -> Iterator[Source]:
    """`source` itself, or a temporary folder with the traces behind a URL (a folder, a file or a glob), by fsspec.

    Raises InputError where nothing can be read there, MissingExtraError where a package for the protocol is missing.
    """
    if not isinstance(source, str) or "://" not in source:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="scaletrace-") as folder:
        _download(source, Path(folder))
        yield Path(folder)


def _download(url: str, folder: Path) -> None:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url}: {error}") from error
    except ValueError as error:
        raise InputError(f"{url}: {error}; give a path or a URL that fsspec knows") from error
    try:
        root, names = _names(system, path)
        for name in names:
            target = folder / name.removeprefix(root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(target))
    except OSError as error:
        raise InputError(f"{url}: can't be read ({error}); check the address and your access") from error
    if not names:
        raise InputError(f"{url}: no trace files there; give a folder of Kineto files, one file or a glob")


def _names(system: Any, path: str) -> tuple[str, list[str]]:
    """(common beginning, names of the files with a JSON ending) at a path."""
    found = system.find(path) if system.isdir(path) else system.glob(path)
    names = sorted(name for name in found if name.endswith(SUFFIXES))
    root = path.rstrip("/") if system.isdir(path) else path.rpartition("/")[0]
    while names and not all(name.startswith(root) for name in names):
        root = root.rpartition("/")[0]
    return root, names
