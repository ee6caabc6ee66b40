"""Progress bars appear where somebody waits, and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from scaletrace.view.progress import progress


def run(console: Console, times: list[float]) -> str:
    clock: Iterator[float] = iter(times)
    with progress("reading ranks", console, lambda: next(clock)) as advance:
        for done in range(1, len(times)):
            advance(done, 8)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("times", "expected"), [([0.0, 0.5, 1.9], False), ([0.0, 0.5, 2.5], True)])
def test_a_bar_is_drawn_for_work_longer_than_two_seconds(times: list[float], expected: bool) -> None:
    """Short work draws nothing; long work draws its words and how much is done."""
    text = run(Console(file=io.StringIO(), force_terminal=True, width=80), times)

    assert expected == ("reading ranks" in text and "2/8" in text)


def test_nothing_is_drawn_where_it_is_not_a_terminal() -> None:
    """A log gets no bar, however long the work takes."""
    text = run(Console(file=io.StringIO(), force_terminal=False, width=80), [0.0, 5.0, 10.0])

    assert text == ""
