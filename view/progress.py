"""Turns "how much is done" into a progress bar with an estimate, on stderr, for work that takes longer than two seconds.

Where stderr is not a terminal nothing is drawn, so that logs stay plain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE_S = 2.0
"""Work that ends sooner shows no bar."""


class Advance(Protocol):
    """Says that `done` of `total` parts are done, and what comes next."""

    def __call__(self, done: int, total: int, words: str = "") -> None: ...


@contextmanager
def progress(words: str, console: Console | None = None, patience_s: float = PATIENCE_S) -> Iterator[Advance]:
    """A bar that appears after `patience_s`, also while a single part takes long, and goes away at the end.

    with progress("reading") as advance:
        job = load(path)
        advance(1, 2, "replaying")
        result = replay_job(job)
    """
    target = console or Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )
    task = bar.add_task(escape(words), total=None)
    appear = threading.Timer(patience_s, bar.start)
    appear.daemon = True
    if target.is_terminal:
        appear.start()
    try:
        yield _advance(bar, task)
    finally:
        appear.cancel()
        if appear.is_alive():
            appear.join()
        bar.stop()


def _advance(bar: Progress, task: TaskID) -> Advance:
    def advance(done: int, total: int, words: str = "") -> None:
        bar.update(task, completed=done, total=total, description=escape(words) if words else None)

    return advance
