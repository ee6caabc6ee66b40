"""Ends that can't be are clipped and counted; real overlaps stay."""

from __future__ import annotations

import io
import json
from typing import Any

from scaletrace.parse.links import parent_of
from scaletrace.parse.reader import TraceFile, read_file


def read(*rows: dict[str, Any]) -> TraceFile:
    """The trace of these spans."""
    events = [{"ph": "X", "pid": 1, "tid": 2, **row} for row in rows]
    return read_file(io.BytesIO(json.dumps({"traceEvents": events}).encode()))


def frame(name: str, ts: float, dur: float, number: int, parent: int | None) -> dict[str, Any]:
    args = {"Python id": number, "Python parent id": parent}
    return {"cat": "python_function", "name": name, "ts": ts, "dur": dur, "args": args}


def kernel(ts: float, dur: float, stream: int = 7) -> dict[str, Any]:
    return {"cat": "kernel", "name": "gemm", "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": {"stream": stream}}


def test_a_python_frame_ends_with_its_caller() -> None:
    """A frame closed at profiler stop is clipped, through several levels, and swallows no later sibling."""
    trace = read(
        frame("main", 0, 1000, 1, None),
        frame("step", 10, 100.5, 2, 1),
        frame("inner", 20, 980, 3, 2),
        frame("leaf", 30, 970, 4, 3),
        frame("next step", 200, 100.5, 5, 1),
    )
    events = trace.events

    assert [1000.0, 100.5, 90.5, 80.5, 100.5] == (events.dur_ns / 1000).tolist()
    assert {"Python frames clipped to their caller": 2} == trace.health.clipped
    assert ["main"] == [events.name_of(row) for row in parent_of(events)[4:]]


def test_a_record_that_runs_past_many_successors_is_clipped() -> None:
    """It ends where its next successor starts, whatever length it claims."""
    trace = read(kernel(0, 60_000), *[kernel(10 + 20 * k, 15) for k in range(1000)])

    assert 10_000 == int(trace.events.dur_ns[0])
    assert {"GPU records that ran past their successors": 1} == trace.health.clipped


def test_short_or_single_overlaps_stay() -> None:
    """Dependent launch overlaps one successor; a long kernel beside another stream's short ones is real."""
    trace = read(
        *[kernel(20 * k, 21) for k in range(20)],
        kernel(0, 60_000, 9),
        *[kernel(10 + 20 * k, 15, 11) for k in range(1000)],
    )

    assert {} == trace.health.clipped
