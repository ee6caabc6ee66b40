"""Whatever calls, kernels and operators a trace holds: a DAG, a path without holes, parts that sum, and no crash."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletrace.parse.graph import NodeKind
from scaletrace.replay.breakdown import PARTS
from scaletrace.replay.result import replay_job
from tests.parse.traces import Event, call, job_of, kernel, op

CALLS = (
    "cudaLaunchKernel",
    "cudaMemcpyAsync",
    "cudaGraphLaunch",
    "cudaStreamWaitEvent",
    "cudaEventRecord",
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaFree",
    "cudaMalloc",
    "cudaEventQuery",
)
KERNELS = ("gemm", "ncclDevKernel_AllReduce_Sum_f32", "elementwise")
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
time_us, short_us = st.integers(0, 2000), st.integers(0, 400)
correlation, stream, thread = st.integers(0, 12), st.sampled_from((7, 20, 24)), st.sampled_from((100, 200))


@st.composite
def events(draw: st.DrawFn) -> Event:
    """One event of any kind, anywhere in time, with ids that may or may not fit the others'."""
    kind = draw(st.integers(0, 9))
    if kind < 4:
        return call(draw(st.sampled_from(CALLS)), draw(time_us), draw(short_us), draw(correlation), draw(thread))
    if kind < 7:
        grid: dict[str, Any] = {"grid": [draw(st.integers(1, 300)), 1, 1], "block": [draw(st.integers(0, 2048)), 1, 1]}
        name = draw(st.sampled_from(KERNELS))
        return kernel(name, draw(time_us), draw(short_us), draw(correlation), draw(stream), **grid)
    if kind < 8:
        return kernel("Memcpy DtoH", draw(time_us), draw(short_us), draw(correlation), draw(stream), cat="gpu_memcpy")
    name = draw(st.sampled_from(("record_param_comms", "aten::mm", "c10d::allreduce_", "gloo:all_reduce", FETCH)))
    cat = "user_annotation" if name.startswith(("gloo", "enumerate")) else "cpu_op"
    where = draw(st.sampled_from((100, 200, 300, 400)))
    return op(name, draw(time_us), draw(short_us) * draw(st.sampled_from((1, 10))), where, cat)


@given(st.lists(st.lists(events(), min_size=1, max_size=25), min_size=1, max_size=2))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_becomes_a_sound_graph(ranks: list[list[Event]]) -> None:
    """Edges lead forward, every duration is at least zero, path = makespan, breakdown = wall, for every rank."""
    with tempfile.TemporaryDirectory() as folder:
        result = replay_job(job_of(Path(folder), *ranks))
    graph = result.built.graph

    assert graph.is_topological()
    assert bool((graph.dur_ns >= 0).all())
    assert result.timeline.makespan_ns == result.path.length_ns
    for part in result.breakdown:
        assert part.wall_ns == sum(getattr(part, f"{name}_ns") for name in PARTS)
    assert int(graph.nodes(NodeKind.TRANSFER).sum()) == int(graph.nodes(NodeKind.ARRIVE).sum())
