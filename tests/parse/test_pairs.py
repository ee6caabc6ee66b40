"""Begin and end events: joined by nesting on each thread, or counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletrace.parse.events import Events
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from tests.parse.traces import Event, op, write

Tree = tuple[int, tuple["Tree", ...]]


def read(folder: Path, events: Sequence[Event]) -> Job:
    """The job of one rank with these events."""
    folder.mkdir(exist_ok=True)
    return load(write(folder, [events]), workers=1)


def mark(ph: str, name: str, ts: float, tid: int = 100, **args: int) -> Event:
    """One half of an operator; without a name where it is empty."""
    named = {"name": name, "cat": "cpu_op"} if name else {}
    return {"ph": ph, **named, "pid": 100, "tid": tid, "ts": ts, "args": args}


def spans(events: Events) -> list[tuple[str, int, int]]:
    """(name, start, length in us) of the complete events; times count from the first one."""
    first = int(events.ts_ns.min())
    rows = np.flatnonzero(events.ph == ord("X")).tolist()
    return [
        (events.name_of(at), (int(events.ts_ns[at]) - first) // 1000, int(events.dur_ns[at]) // 1000) for at in rows
    ]


def test_ends_close_what_began_last_on_their_thread(tmp_path: Path) -> None:
    """Nested spans of two threads, written as they ran, and one that begins and ends at once."""
    found = read(tmp_path, [
        mark("B", "step", 0), mark("B", "other", 1, tid=7), mark("B", "a", 2), mark("E", "", 5),
        mark("B", "b", 5), mark("E", "", 5), mark("E", "", 8, tid=7), mark("E", "", 9),
    ])  # fmt: skip
    expected = [("step", 0, 9), ("other", 1, 7), ("a", 2, 3), ("b", 5, 0)]

    assert expected == spans(found.ranks[0].events)
    assert 4 == len(found.ranks[0].events)
    assert {} == {reason: n for reason, n in found.health.unmatched.items() if "begin" in reason}


def test_an_end_that_says_a_name_ends_the_innermost_of_it(tmp_path: Path) -> None:
    """What is still open inside has no end; an end of nothing has no begin; both are counted and left out."""
    found = read(tmp_path, [
        mark("B", "step", 0), mark("B", "lost", 2), mark("E", "step", 9), mark("E", "step", 10), mark("E", "", 11),
        mark("B", "open", 12),
    ])  # fmt: skip

    assert [("step", 0, 9)] == spans(found.ranks[0].events)
    assert 1 == len(found.ranks[0].events)
    assert (2, 2) == (
        found.health.unmatched["begin events without an end, left out"],
        found.health.unmatched["end events without a begin, left out"],
    )


def test_arguments_of_both_halves_are_kept(tmp_path: Path) -> None:
    """Those of the end come behind those of the begin, of which they take the place where both say one."""
    begin, end = mark("B", "a", 0, correlation=7, bytes=1), mark("E", "a", 4, bytes=2, stream=3)
    events = read(tmp_path, [begin, op("x", 1, 1), end]).ranks[0].events

    assert (["a", "x"], [7, -1], [3, -1]) == (
        [events.name_of(row) for row in range(2)], events.correlation.tolist(), events.stream.tolist(),
    )  # fmt: skip
    assert ([0], [2]) == (events.args["bytes"].rows.tolist(), events.args["bytes"].values.tolist())


trees = st.recursive(
    st.tuples(st.integers(0, 3), st.just(())),
    lambda children: st.tuples(st.integers(0, 3), st.lists(children, max_size=3).map(tuple)),
    max_leaves=12,
)


def laid(tree: Tree, at: int, tid: int) -> tuple[list[Event], list[Event], int]:
    """(complete events, halves in order, end) of a tree of spans that starts at a time."""
    number, children = tree
    name, inner, halves, end = f"op{number}", [], [], at + 1
    for child in children:
        whole, parts, end = laid(child, end, tid)
        inner, halves, end = inner + whole, halves + parts, end + 1
    own = op(name, at, end - at, tid, bytes=number)
    return [own, *inner], [mark("B", name, at, tid, bytes=number), *halves, mark("E", name, end, tid)], end + 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(trees, min_size=1, max_size=4))
def test_halves_read_as_the_whole(tmp_path: Path, threads: list[Tree]) -> None:
    """However spans nest on their threads, begin and end give the table that complete events give."""
    whole: list[Event] = []
    halves: list[Event] = []
    for tid, tree in enumerate(threads):
        one, other, _ = laid(tree, 3 * tid, tid)
        whole, halves = whole + one, halves + other
    a, b = (read(tmp_path / name, events).ranks[0].events for name, events in (("whole", whole), ("halves", halves)))

    for column in ("ph", "cat", "name", "lane", "ts_ns", "dur_ns"):
        assert getattr(a, column).tolist() == getattr(b, column).tolist()
    assert (a.strings, a.lanes) == (b.strings, b.lanes)
    assert a.args["bytes"].values.tolist() == b.args["bytes"].values.tolist()
