"""Clocks, meanings of calls, chains of threads and blocking calls: what the device side is inferred from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.build_gpu import grid_blocks
from scaletrace.parse.build_host import RankInput
from scaletrace.parse.build_rank import read_rank
from scaletrace.parse.gpu_clock import device_shift
from scaletrace.parse.health import Health
from scaletrace.parse.host import Call, call_type, find_calls, op_spans
from scaletrace.parse.syncs import EXPLAINED, NOTHING_AWAITED, UNEXPLAINED
from tests.parse.traces import Event, call, job_of, kernel, op


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("cudaLaunchKernel", Call.LAUNCH),
        ("cudaLaunchKernelExC", Call.LAUNCH),
        ("cuLaunchKernelEx", Call.LAUNCH),
        ("hipExtModuleLaunchKernel", Call.LAUNCH),
        ("hipModuleLaunchKernel", Call.LAUNCH),
        ("cudaLaunchCooperativeKernel", Call.LAUNCH),
        ("cudaGraphLaunch", Call.GRAPH_LAUNCH),
        ("hipGraphLaunch", Call.GRAPH_LAUNCH),
        ("cudaMemcpyAsync", Call.COPY),
        ("hipMemsetAsync", Call.COPY),
        ("cudaDeviceSynchronize", Call.DEVICE_SYNC),
        ("cuStreamSynchronize", Call.STREAM_SYNC),
        ("cudaEventSynchronize", Call.EVENT_SYNC),
        ("cudaFree", Call.FREE),
        ("cudaFreeHost", Call.OTHER),
        ("cudaStreamWaitEvent", Call.STREAM_WAIT),
        ("cudaEventRecordWithFlags", Call.EVENT_RECORD),
        ("cudaEventQuery", Call.IGNORED),
        ("cudaStreamIsCapturing", Call.IGNORED),
        ("cudaMalloc", Call.OTHER),
    ],
)
def test_meaning_of_calls(name: str, meaning: Call) -> None:
    """CUDA, HIP and driver names mean the same."""
    assert meaning is call_type(name)


def test_device_clock_is_shifted_where_it_is_impossible() -> None:
    """Kernels up to 40 us before their launch, drifting: after the shift none starts before its launch."""
    launch = np.arange(0, 1_000_000, 10_000, dtype=np.int64)
    latency = 6_000 - 30_000 - launch // 50 + np.where(np.arange(100) % 3, 9_000, 0)
    start = launch + latency

    shift = device_shift(launch, latency, start)

    assert int((start + shift - launch).min()) >= 4_000
    assert int((start + shift - launch).max()) <= 16_000


def test_sane_clock_is_left_alone() -> None:
    """Latencies of 5 us and more need no correction."""
    launch = np.arange(0, 100_000, 1_000, dtype=np.int64)

    assert 0 == int(np.abs(device_shift(launch, np.full(100, 5_000), launch + 5_000)).max())


def test_touching_calls_do_not_nest(tmp_path: Path) -> None:
    """A call of no length at another's end follows it; one inside another belongs to it."""
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        call("cudaLaunchKernel", 5, 0, 2),
        call("cuLaunchKernel", 1, 2, 3, cat="cuda_driver"),
    ]
    trace = job_of(tmp_path, events).ranks[0]
    calls = find_calls(trace.events, Health())

    assert [(0, 5_000), (5_000, 5_000)] == list(zip(calls.start_ns.tolist(), calls.end_ns.tolist(), strict=True))


def _syncs(folder: Path, events: list[Event]) -> list[int]:
    job = job_of(folder, events)
    parts = read_rank(job, RankInput(job.ranks[0], 0, np.zeros(0, np.int64)), Health())
    return parts.syncs.status[parts.syncs.is_sync].tolist()


def test_status_of_blocking_calls(tmp_path: Path) -> None:
    """Nothing outstanding; a kernel whose end fits; outstanding work of which none fits."""
    launch = [call("cudaLaunchKernel", 0, 4, 1), kernel("k", 6.5, 500, 1)]

    for name, events, expected in (
        ("idle", [*launch, call("cudaDeviceSynchronize", 600.5, 30, 2)], NOTHING_AWAITED),
        ("fits", [*launch, call("cudaStreamSynchronize", 10.5, 500, 2)], EXPLAINED),
        ("wrong", [*launch, call("cudaStreamSynchronize", 10.5, 100, 2)], UNEXPLAINED),
    ):
        (tmp_path / name).mkdir()
        assert [expected] == _syncs(tmp_path / name, events)


def test_operators_are_found_by_thread_and_time(tmp_path: Path) -> None:
    """The outermost operator counts, on its own thread only, and not after its end."""
    events = job_of(tmp_path, [op("outer", 0, 10), op("inner", 2, 3), op("other", 0, 10, tid=200)]).ranks[0].events
    lane = int(events.lane[np.flatnonzero(events.named("outer"))[0]])

    rows = op_spans(events).at(np.array([lane, lane], np.int32), np.array([3_000, 10_000]))

    assert ["outer", None] == [events.name_of(int(row)) if row >= 0 else None for row in rows]


def test_blocks_of_a_grid(tmp_path: Path) -> None:
    """The product of the grid's dimensions, 0 where the trace does not say."""
    events = job_of(tmp_path, [kernel("a", 0, 1, 1, grid=[4, 5, 6]), kernel("b", 2, 1, 2)]).ranks[0].events

    assert [120, 0] == grid_blocks(events).tolist()
