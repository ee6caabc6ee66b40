"""Several ranks merged into one file come apart again where the ids allow it, else the file is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from scaletrace.errors import NotATraceError
from scaletrace.parse.fused import split_ranks
from scaletrace.parse.links import launch_of
from scaletrace.parse.owners import is_fused
from scaletrace.parse.reader import TraceFile, read_file


def rank_rows(rank: int, device: int, correlations: range, shift: float = 0) -> list[dict[str, Any]]:
    """One rank's op, launches and kernels."""
    pid = 100 + rank
    rows: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{rank}", "pid": pid, "tid": pid, "ts": shift, "dur": 90, "args": {}}
    ]
    for k, correlation in enumerate(correlations):
        args = {"correlation": correlation}
        rows.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": pid,
                     "ts": shift + k, "dur": 0.5, "args": dict(args)})  # fmt: skip
        rows.append({"ph": "X", "cat": "kernel", "name": "gemm", "pid": device, "tid": 7, "ts": shift + 20 + k,
                     "dur": 1, "args": {**args, "stream": 7}})  # fmt: skip
    return rows


def read(rows: list[dict[str, Any]]) -> TraceFile:
    return read_file(io.BytesIO(json.dumps({"traceEvents": rows}).encode()))


def shape(parts: list[TraceFile]) -> list[tuple[int, int, int]]:
    """(rank, events, linked kernels) of each part."""
    return [
        (part.header["distributedInfo"]["rank"], len(part.events), int((launch_of(part.events) >= 0).sum()))
        for part in parts
    ]


def test_an_argument_names_the_rank() -> None:
    """TraceLens puts "rank" on every event and shifts pids and correlations."""
    rows = [
        {**row, "pid": row["pid"] + 1000 * rank, "args": {**row["args"], "rank": rank}}
        for rank in (0, 3)
        for row in rank_rows(rank, 0, range(10 * rank, 10 * rank + 3))
    ]

    assert [(0, 7, 2), (3, 7, 3)] == shape(split_ranks(read(rows)))


def test_a_tag_in_the_pid_names_the_rank() -> None:
    """SGLang makes pids such as "[TP03] 1234"; correlations of ranks collide there."""
    rows = [{**row, "pid": f"[TP{r:02d}] {row['pid']}"} for r in (1, 12) for row in rank_rows(r, 0, range(1, 4))]
    parts = split_ranks(read(rows))

    assert [(1, 7, 3), (12, 7, 3)] == shape(parts)
    assert any("told apart by the tag in the pid" in note for note in parts[0].health.notes)


def test_plain_concatenation_is_split_where_correlations_differ() -> None:
    """Host processes stay apart; a device goes to the process whose launches fit."""
    rows = rank_rows(0, 0, range(1, 5)) + rank_rows(1, 1, range(50, 56))

    assert [(0, 9, 4), (1, 13, 6)] == shape(split_ranks(read(rows)))


def test_colliding_ids_are_refused() -> None:
    """Two ranks with the same correlations and devices can't be told apart; no partial numbers."""
    rows = rank_rows(0, 0, range(1, 5)) + rank_rows(1, 0, range(1, 5), shift=0.25)
    with pytest.raises(NotATraceError, match="give each rank its own file"):
        split_ranks(read(rows))


def test_one_rank_stays_as_it_is() -> None:
    """An ordinary file is not touched, even with several devices in one process."""
    trace = read(rank_rows(0, 0, range(1, 5)) + rank_rows(0, 1, range(5, 9)))

    assert not is_fused(trace.events)
    assert [trace] == split_ranks(trace)
