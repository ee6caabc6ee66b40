"""Rows are linked by correlation and containment, with tolerance only where the trace explains it."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.parse import intervals, links
from scaletrace.parse.events import Events
from scaletrace.parse.reader import read_file


def table(*rows: dict[str, Any]) -> Events:
    """A table of spans; what is not given is a host op on thread 2 of process 1."""
    events = [{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 2, "dur": 1, **row} for row in rows]
    return read_file(io.BytesIO(json.dumps({"traceEvents": events}).encode())).events


def op(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "args": {key.replace("_", " "): value for key, value in args.items()}}


def call(name: str, ts: float, dur: float, correlation: int, cat: str = "cuda_runtime", **args: Any) -> dict[str, Any]:
    return {**op(name, ts, dur, correlation=correlation, **args), "cat": cat}


def kernel(name: str, ts: float, dur: float, correlation: int, **args: Any) -> dict[str, Any]:
    return {**op(name, ts, dur, correlation=correlation, stream=7, **args), "cat": "kernel", "pid": 0, "tid": 7}


def named(events: Events, rows: Any) -> dict[str, str | None]:
    """{name: name of the row it is linked to}."""
    return {events.name_of(k): (events.name_of(row) if row >= 0 else None) for k, row in enumerate(rows.tolist())}


def test_one_launch_may_have_many_kernels() -> None:
    """All kernels of a graph launch lead to it; an unknown correlation leads nowhere."""
    events = table(
        call("cudaGraphLaunch", 0, 5, 9), kernel("k0", 6, 1, 9), kernel("k1", 7, 1, 9), kernel("k2", 8, 1, 4)
    )

    found = named(events, links.launch_of(events))
    assert {"cudaGraphLaunch": None, "k0": "cudaGraphLaunch", "k1": "cudaGraphLaunch", "k2": None} == found


def test_external_ids_are_never_looked_up_as_correlations() -> None:
    """An op whose External id equals a correlation is no launch."""
    events = table(op("aten::mm", 0, 9, External_id=11), kernel("k", 20, 1, 11))

    assert {"aten::mm": None, "k": None} == named(events, links.launch_of(events))


def test_driver_calls_launch_too_and_the_inner_call_wins() -> None:
    """Triton launches by cuLaunchKernel; of nested calls with one correlation the inner one counts."""
    events = table(
        op("outer", 0, 20),
        call("cudaLaunchKernel", 1, 9, 5),
        call("cuLaunchKernel", 2, 3, 5, "cuda_driver"),
        kernel("k", 20, 1, 5),
    )

    assert "cuLaunchKernel" == named(events, links.launch_of(events))["k"]
    assert "outer" == named(events, links.op_of(events))["k"]


def test_nesting_is_by_containment_on_one_thread() -> None:
    """The innermost containing span is the parent; touching spans are siblings."""
    events = table(op("a", 0, 10), op("b", 1, 4), op("c", 2, 1), op("d", 5, 2.5), {**op("e", 2, 1), "tid": 3})

    assert {"a": None, "b": "a", "c": "b", "d": "a", "e": None} == named(events, links.parent_of(events))


def test_a_tick_of_overhang_is_rounding_in_a_microsecond_trace_only() -> None:
    """Integer microseconds may cross by one; nanosecond traces may not."""
    rounded = table(op("p", 1, 5), op("c", 2, 5))
    exact = table(op("p", 1, 5.5), op("c", 2, 5.5))

    assert {"p": None, "c": "p"} == named(rounded, links.parent_of(rounded))
    assert {"p": None, "c": None} == named(exact, links.parent_of(exact))


def test_a_clock_inversion_is_forgiven_where_the_external_id_agrees() -> None:
    """ROCm calls may end after their op; another id is no confirmation."""
    rows = [op("p", 0, 20.5, External_id=7), call("hipLaunchKernel", 19, 3.25, 1, External_id=7)]
    other = [op("p", 0, 20.5, External_id=7), call("hipLaunchKernel", 19, 3.25, 1, External_id=8)]

    assert "p" == named(events := table(*rows), links.op_of(events))["hipLaunchKernel"]
    assert named(events := table(*other), links.op_of(events))["hipLaunchKernel"] is None


def test_crossing_spans_are_siblings_and_are_counted() -> None:
    """Neither contains the other; a span inside both belongs to the one that started last."""
    events = table(op("a", 0, 10.5), op("b", 5, 10.5), op("c", 7, 1.5), op("d", 12, 1.5))

    assert {"a": None, "b": None, "c": "b", "d": "b"} == named(events, links.parent_of(events))
    assert [[0, 1]] == links.crossings(events).tolist()


def test_asynchronous_spans_are_never_parents() -> None:
    """gloo:send on the caller's thread lasts until the wait; what runs meanwhile is not its child."""
    rows = [{**op("gloo:send", 0, 100.5), "cat": "user_annotation"}, op("aten::mm", 10, 5)]
    events = table(*rows)

    assert {"gloo:send": None, "aten::mm": None} == named(events, links.parent_of(events))


def test_self_time_is_what_children_do_not_cover() -> None:
    """Overlapping children are not subtracted twice and a child is clipped to its parent."""
    events = table(op("p", 0, 100.5), op("a", 10, 20.5), op("b", 20, 20.5), op("c", 90, 10.5))

    own = dict(zip([events.name_of(k) for k in range(4)], links.self_ns(events, links.parent_of(events)), strict=True))
    assert {"p": 59500, "a": 20500, "b": 20500, "c": 10500} == {key: int(value) for key, value in own.items()}


def test_sync_rows_belong_to_a_stream_and_are_no_work() -> None:
    """Since 2026 they stand a million tids further on."""
    rows = [kernel("k", 0, 9, 1), {**op("Stream Sync", 0, 5), "cat": "cuda_sync", "pid": 0, "tid": 1000007}]
    events = table(*rows)

    assert ["k"] == [events.name_of(k) for k in links.gpu_rows(events)]
    assert 7 == links.stream_of_sync(events)[[events.name_of(k) for k in range(2)].index("Stream Sync")]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=30)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    """The unit cells that spans (start, length) cover."""
    return {cell for start, length in spans for cell in range(start, start + length)}


def as_arrays(spans: list[tuple[int, int]]) -> intervals.Spans:
    start = np.array([start for start, _ in spans], np.int64)
    return start, start + np.array([length for _, length in spans], np.int64)


@given(SPANS, SPANS)
@settings(deadline=None, max_examples=200)
def test_interval_sets_agree_with_cells(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    """Union, intersection and difference have the sizes of the sets of cells."""
    one, two = intervals.union(*as_arrays(a)), intervals.union(*as_arrays(b))

    assert len(covered(a)) == intervals.length_ns(one) == intervals.busy_ns(*as_arrays(a))
    assert len(covered(a) & covered(b)) == intervals.length_ns(intervals.intersection(one, two))
    assert len(covered(a) - covered(b)) == intervals.difference_ns(one, two)
    assert sum(length for _, length in a) - len(covered(a)) == intervals.overlap_ns(*as_arrays(a))
    assert (one[0][1:] > one[1][:-1]).all()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=25))
@settings(deadline=None, max_examples=60)
def test_parents_are_the_innermost_containers(spans: list[tuple[int, int]]) -> None:
    """Against the definition, span by span, in a trace with nanosecond times."""
    events = table(*[op(f"s{k}", start + 0.001, length) for k, (start, length) in enumerate(spans)])
    parents = links.parent_of(events)
    start, end = events.ts_ns, events.end_ns
    for row in range(len(events)):
        inside = [k for k in range(row) if start[k] <= start[row] < end[k] and end[row] <= end[k]]

        assert (inside[-1] if inside else -1) == parents[row]
    assert (links.self_ns(events, parents) >= 0).all()


@pytest.mark.parametrize("count", [0, 1])
def test_empty_tables_have_no_links(count: int) -> None:
    """No rows, no error."""
    events = table(*[op("a", 0, 1)] * count)

    assert [-1] * count == links.launch_of(events).tolist() == links.parent_of(events).tolist()
    assert [] == links.gpu_rows(events).tolist()
    assert 0 == intervals.busy_ns(events.ts_ns[:0], events.ts_ns[:0])
