"""What of a kernel's time is waiting, by the operator that launched it."""

import json
from pathlib import Path

import numpy as np

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.parse.build import build
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.load import load

H100 = Ceilings(8e14, 2.8e12, 132, 2e-6)


def state_of(folder: Path, kernels: list[tuple[str, str, list[int], int]]) -> State:
    """A rank whose operators (name, kernel, rows and columns, µs) launch one kernel each."""
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 90_000}
    ]
    for number, (name, kernel, dims, dur) in enumerate(kernels):
        ts = 100 + 10_000 * number
        events += [
            {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 20,
             "args": {"External id": number, "Input Dims": [dims, dims], "Input type": ["c10::BFloat16"] * 2}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": ts + 5, "dur": 5,
             "args": {"correlation": 50 + number, "External id": number}},
            {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": ts + 30, "dur": dur,
             "args": {"correlation": 50 + number, "External id": number, "stream": 7, "device": 0}},
        ]  # fmt: skip
    path = folder / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}}))
    return open_state(build(load(folder)), Layout(mbs=1, seq=8), Network(Cluster.load("dgx_h100")), H100)


def test_waiting_is_held_where_operator_and_kernel_are_of_one_kind(tmp_path: Path) -> None:
    """8 µs of next to no work are mostly waiting, 2 ms of much work hardly are; a copy's operator says nothing of a
    compiled kernel."""
    state = state_of(
        tmp_path,
        [("aten::layer_norm", "vectorized_layer_norm_kernel", [8, 64], 8),
         ("aten::layer_norm", "vectorized_layer_norm_kernel", [131072, 4096], 2_000),
         ("aten::layer_norm", "triton_red_fused_3", [8, 64], 8)],
    )  # fmt: skip
    held = state.work.held_ns[np.flatnonzero(state.graph.kind == int(NodeKind.KERNEL))]

    assert 5_900 < held[0] < 6_000
    assert 0 < held[1] < 5_000
    assert 0 == held[2]
