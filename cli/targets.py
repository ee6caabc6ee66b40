"""Turns the files that a command is to write into a refusal where one of them is part of what it reads."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from scaletrace.cli.reading import also_read
from scaletrace.errors import UsageError

_ANSWERS = frozenset({".pftrace", ".html", ".graphml", ".png", ".svg", ".pdf"})
"""Endings of what commands write; such files in a capture's folder were written by one, and may be written again."""
_ANSWER_NAME = "curve.json"
MOST_FILES = 200_000
"""Files of an input folder that are looked at, at most."""


def spare(sources: Iterable[str], *targets: Path | None) -> None:
    """Raise UsageError where a target is one of the sources (or of the files that reading options name), or a file of
    a folder among them that may be a trace.

    Links count as what they lead to. Sources that are no local files (URLs) have nothing to lose.
    """
    kept = [target for target in targets if target is not None and target.is_file()]
    if not kept:
        return
    given = [path for source in (*sources, *also_read()) for path in _local(source)]
    inputs = {_identity(path): path for source in given for path in _files(source)}
    for target in kept:
        if found := inputs.get(_identity(target)):
            same = "" if os.path.abspath(found) == os.path.abspath(target) else f", which is {found}"
            raise UsageError(f"{target}{same} is part of the input and would be overwritten; name another file")


def _local(source: str) -> list[Path]:
    if source and os.path.exists(source):
        return [Path(source)]
    return [] if not source or "://" in source else [Path(found) for found in glob.glob(source, recursive=True)]


def _files(source: Path) -> Iterator[Path]:
    """The file itself, or those of a folder that no command wrote."""
    if source.is_file():
        yield source
        return
    seen = 0
    for folder, _, names in os.walk(source):
        for name in names:
            seen += 1
            if seen > MOST_FILES:
                return
            path = Path(folder, name)
            if path.suffix.lower() not in _ANSWERS and name != _ANSWER_NAME and path.is_file():
                yield path


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
