"""Turns "how much is done" into a progress bar with an estimate, on stderr, for work that takes longer than two seconds.

Where stderr is not a terminal nothing is drawn, so that logs stay plain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE_S = 2.0
"""Work that ends sooner shows no bar."""

Advance = Callable[[int, int], None]
"""Called with (done, total); the total may grow."""


@contextmanager
def progress(
    words: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Advance]:
    """A bar that appears after two seconds and goes away at the end."""
    target = console or Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )
    task = bar.add_task(words, total=None)
    began = clock()
    shown = False

    def advance(done: int, total: int) -> None:
        nonlocal shown
        bar.update(task, completed=done, total=total)
        if not shown and clock() - began > PATIENCE_S:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
