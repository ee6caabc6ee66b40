"""Pace of kernels: compared where nothing communicates, so that waiting does not look like being slow."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import Arg, Events, IntArray, Lane
from scaletrace.parse.health import Health
from scaletrace.parse.job import Clock, Collectives, Job, RankTrace
from scaletrace.parse.pace import slower_ns

GEMM, NCCL = 0, 1


def trace_of(rank: int, rows: list[tuple[int, int, int]]) -> RankTrace:
    """A rank's kernels: (which, start, duration)."""
    n = len(rows)
    rows = sorted(rows, key=lambda row: row[1])
    strings = ("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "[8,1,1]")
    minus = np.full(n, -1, np.int64)
    events = Events(
        np.full(n, ord("X"), np.uint8), np.zeros(n, np.int32), np.array([row[0] for row in rows], np.int32),
        np.zeros(n, np.int32), np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], np.int64),
        minus, minus, minus, minus, strings, ("kernel",), (Lane(0, 7),),
        {"grid": Arg(np.arange(n, dtype=np.int32), np.full(n, 2, np.int32), is_text=True)},
    )  # fmt: skip
    return RankTrace(rank, 2, events, "test")


def job_of(*traces: RankTrace) -> Job:
    """A job without collectives matched."""
    i64: IntArray = np.zeros(0, np.int64)
    i32 = np.zeros(0, np.int32)
    none = Collectives(
        i64, i32, i32, i32, np.zeros(0, np.uint8), i32, i64, i64, i64, i64, i64, i64, i64, np.zeros(0, np.bool_)
    )
    return Job(traces, len(traces), (), none, {t.rank: Clock(0, 0, 0) for t in traces}, Health())


def test_kernels_beside_a_collective_do_not_count() -> None:
    """A rank whose kernels are long only while it waits is not slow; one whose kernels are long alone is."""
    waits = trace_of(0, [(GEMM, 0, 100), (GEMM, 200, 200), (NCCL, 190, 300), (GEMM, 600, 100)])
    slow = trace_of(1, [(GEMM, 0, 120), (GEMM, 200, 120), (GEMM, 600, 120), (NCCL, 800, 10)])
    found = slower_ns(job_of(waits, slow))

    assert 60 == found[1]
    assert found[0] < 0


def test_nothing_to_compare_is_no_difference() -> None:
    """A lone rank, and ranks without kernels of their own, are neither fast nor slow."""
    assert {0: 0} == slower_ns(job_of(trace_of(0, [(GEMM, 0, 100)])))
    assert {0: 0, 1: 0} == slower_ns(job_of(trace_of(0, [(NCCL, 0, 9)]), trace_of(1, [(NCCL, 0, 9)])))
