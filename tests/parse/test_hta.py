"""A job handed to Holistic Trace Analysis gives the answers that HTA finds in the same files."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaletrace.parse.health import Health
from scaletrace.parse.hta import analysis, to_hta
from scaletrace.parse.job import Clock, Collectives, Job, RankTrace
from scaletrace.parse.reader import read_file

pytest.importorskip("hta")
pytestmark = pytest.mark.filterwarnings("ignore")

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "overlap": lambda a: a.get_comm_comp_overlap(visualize=False),
    "temporal": lambda a: a.get_temporal_breakdown(visualize=False),
    "kernel types": lambda a: a.get_gpu_kernel_breakdown(visualize=False)[0],
    "kernels": lambda a: a.get_gpu_kernel_breakdown(visualize=False)[1],
    "idle": lambda a: a.get_idle_time_breakdown(visualize=False)[0],
    "queue": lambda a: a.get_queue_length_summary(),
    "bandwidth": lambda a: a.get_memory_bw_summary(),
    "launches": lambda a: a.get_cuda_kernel_launch_stats(visualize=False)[0].sort_values("correlation"),
}


ROUNDED = {"kernel types": 1.0, "idle": 0.0101}
"""Questions whose answers HTA rounds, with one unit of the last place in microseconds."""


@pytest.fixture(autouse=True)
def quiet_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTA without its rounding and without its log."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    logging.getLogger("hta").setLevel(logging.CRITICAL)


def empty_collectives() -> Collectives:
    i64, i32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Collectives(
        i64, i32, i32, i32, np.zeros(0, np.uint8), i32, i64, i64, i64, i64, i64, i64, i64, np.zeros(0, np.bool_)
    )


def job_of(paths: dict[int, Any]) -> Job:
    """The files as a job, as far as HTA is concerned."""
    ranks = []
    for rank, path in sorted(paths.items()):
        trace = read_file(path)
        ranks.append(RankTrace(rank, len(paths), trace.events, trace.source, trace.header))
    clocks = {rank: Clock(0, 0, 0) for rank in paths}
    return Job(tuple(ranks), len(paths), (), empty_collectives(), clocks, Health())


def theirs(paths: dict[int, Path]) -> Any:
    """HTA's own reading of the same files."""
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    trace = Trace(trace_files={rank: str(path) for rank, path in paths.items()}, trace_dir="/")
    trace.load_traces(use_multiprocessing=False)
    made: Any = TraceAnalysis.__new__(TraceAnalysis)
    made.t = trace
    return made


def compare(paths: dict[int, Path]) -> None:
    """Every question gets the same table, to the 2 ns that HTA's floats of absolute microseconds can hold.

    HTA cuts some answers itself (ROUNDED), so there one unit of its last place may differ.
    """
    ours, reference = analysis(job_of(paths)), theirs(paths)
    for question, ask in QUESTIONS.items():
        expected, actual = ask(reference).reset_index(drop=True), ask(ours).reset_index(drop=True)
        try:
            pd.testing.assert_frame_equal(
                expected, actual, check_dtype=False, rtol=1e-6, atol=ROUNDED.get(question, 2e-3)
            )
        except AssertionError as error:
            raise AssertionError(f"{question}: {error}") from error


def test_hta_finds_the_same_in_eight_ranks(shared_data: Path) -> None:
    """DLRM on 8 V100, integer microseconds: overlap, breakdowns, idle, queue, bandwidth, launches."""
    folder = shared_data / "traces" / "dlrm8_v100" / "kineto"
    paths = {int(path.name.removeprefix("worker")[0]): path for path in sorted(folder.glob("worker*.json.gz"))}

    assert 8 == len(paths)
    compare(paths)


def test_hta_finds_the_same_in_nanosecond_traces(shared_data: Path) -> None:
    """Two ranks of nanoGPT on H100, with times that HTA keeps as large floats."""
    folder = shared_data / "traces" / "nanogpt8_h100"
    compare({rank: next(folder.glob(f"*rank{rank}-*.json.gz")) for rank in range(2)})


def test_the_bridge_keeps_nanoseconds_and_missing_values() -> None:
    """Microseconds from the first event; lists are lists; what is missing has HTA's default."""
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 2, "ts": 10.001, "dur": 50,
         "args": {"External id": 1}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": 20.5, "dur": 1,
         "args": {"correlation": 9}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 70.25, "dur": 2.125,
         "args": {"correlation": 9, "stream": 7, "Input Dims": [[2, 3]]}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 99},
    ]  # fmt: skip
    raw = json.dumps({"baseTimeNanoseconds": 1790857026000000000, "traceEvents": rows}).encode()
    trace = to_hta(job_of({0: io.BytesIO(raw)}))
    frame = trace.get_trace(0)

    assert [0.0, 10.499, 60.249] == frame["ts"].tolist()
    assert [50.0, 1.0, 2.125] == frame["dur"].tolist()
    assert [-1, 3, 2] == frame["index_correlation"].tolist()
    assert [3, 3, 3] == frame["iteration"].tolist()
    assert ["-1", "-1", [[2, 3]]] == frame["input_dims"].tolist()
    assert ["ProfilerStep#3", "cudaLaunchKernel", "gemm"] == [trace.symbol_table.sym_table[k] for k in frame["name"]]
