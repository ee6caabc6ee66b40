"""The survey counts what a trace lacks and contradicts, and changes nothing."""

from __future__ import annotations

import io
import json
from typing import Any

from scaletrace.parse.health import Health
from scaletrace.parse.reader import read_file


def health_of(*rows: dict[str, Any]) -> Health:
    """The health of a trace of these spans."""
    events = [{"ph": "X", "pid": 1, "tid": 2, "dur": 1, **row} for row in rows]
    return read_file(io.BytesIO(json.dumps({"traceEvents": events}).encode())).health


def call(name: str, ts: float, correlation: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "args": {"correlation": correlation}}


def kernel(ts: float, dur: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    return {"cat": "kernel", "name": "gemm", "pid": 0, "tid": stream, "ts": ts, "dur": dur,
            "args": {"correlation": correlation, "stream": stream}}  # fmt: skip


def test_links_that_lead_nowhere_are_counted() -> None:
    """Launches without records and records without launches are normal at the window's edges, and shown."""
    health = health_of(
        call("cudaLaunchKernel", 0, 1), call("cudaLaunchKernel", 2, 2), call("cudaStreamSynchronize", 4, 3),
        call("cudaLaunchHostFunc", 5, 4), kernel(10, 1, 1), kernel(12, 1, 99),
    )  # fmt: skip

    assert {"launches without GPU records": 1, "GPU records without a launch": 1} == health.unmatched


def test_a_trace_without_any_gpu_record_says_so_once() -> None:
    """Then GPU figures are absent; the single launches are not listed as unmatched as well."""
    health = health_of(call("cudaLaunchKernel", 0, 1))

    assert {} == health.unmatched
    assert ["host launches present, no GPU records (out of range, or CUPTI off): GPU figures are absent, not zero"] == (
        health.notes
    )


def test_a_pure_host_trace_is_clean() -> None:
    """No launches, no GPU records, nothing to report."""
    assert health_of({"cat": "cpu_op", "name": "a", "ts": 1}).clean


def test_overlaps_on_a_stream_are_counted_and_other_streams_are_not() -> None:
    """A stream is serial; two streams are not."""
    health = health_of(
        call("cudaLaunchKernel", 0, 1), call("cudaLaunchKernel", 1, 2), call("cudaLaunchKernel", 2, 3),
        kernel(10, 5, 1), kernel(12, 5, 2), kernel(13, 5, 3, stream=9),
    )  # fmt: skip

    assert {"overlapping GPU records on one stream": 1} == health.unmatched


def test_unresolved_waits_are_counted() -> None:
    """CUDA 12.9 leaves the awaited event open, so that dependencies are a lower bound."""
    args = {"cuda_sync_kind": "Stream Wait Event", "stream": 7, "wait_on_stream": -1}
    wait = {"cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 7, "ts": 5}
    health = health_of(
        {**wait, "args": {**args, "wait_on_cuda_event_record_corr_id": -1}},
        {**wait, "args": {**args, "wait_on_cuda_event_record_corr_id": 12}},
    )

    assert {"stream waits whose event is not resolved": 1} == health.unmatched


def test_unknown_categories_are_named() -> None:
    """A category that nobody knows is neither host nor device work."""
    health = health_of({"cat": "quantum_op", "name": "a", "ts": 1})

    assert {"events of unknown categories": 1} == health.guessed
    assert ["unknown categories, used as neither host nor device work: quantum_op"] == health.notes
