"""Progress bars appear where somebody waits, and nowhere else."""

from __future__ import annotations

import io
import time

from rich.console import Console

from scaletrace.view.progress import progress


def run(console: Console, patience_s: float, work_s: float) -> str:
    with progress("reading [ranks]", console, patience_s) as advance:
        advance(1, 8)
        time.sleep(work_s)
        advance(2, 8, "building")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_appears_while_a_single_part_takes_long() -> None:
    """The bar needs no call to appear; it shows what is being done and how much is."""
    text = run(Console(file=io.StringIO(), force_terminal=True, width=80), 0.02, 0.4)

    assert "reading [ranks]" in text
    assert "1/8" in text


def test_short_work_shows_nothing() -> None:
    """Work that ends before the patience does draws nothing."""
    assert run(Console(file=io.StringIO(), force_terminal=True, width=80), 30.0, 0.0) == ""


def test_nothing_is_drawn_where_it_is_not_a_terminal() -> None:
    """A log gets no bar, however long the work takes."""
    assert run(Console(file=io.StringIO(), force_terminal=False, width=80), 0.0, 0.1) == ""
