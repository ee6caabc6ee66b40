"""On HTA's own test traces the graph has the dependencies that HTA's tests ask for, and paths without holes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay

SETS = (
    "event_sync_trace.json.gz",
    "cuda_event_sync_multi_stream__event_sync_trace.json.gz",
    "benchmark_result_2869224_1695835535_trace.json.gz",
    "benchmark_result_493459_1694039959_trace.json.gz",
)


def _built(shared_data: Path, name: str) -> Built:
    return build(load(shared_data / "traces" / "hta_critical_path" / name))


def _correlated(built: Built, kind: EdgeKind) -> set[tuple[int, int]]:
    """(correlation, correlation) of the device records that edges of a kind lead between, stalls passed over."""
    graph, events = built.graph, built.job.ranks[0].events
    after = {int(a): int(b) for a, b in zip(graph.pred, graph.edge_dst, strict=True) if graph.kind[a] == NodeKind.STALL}
    out = set()
    for a, b in zip(graph.pred[graph.edge_kind == kind], graph.edge_dst[graph.edge_kind == kind], strict=True):
        ends = (graph.event[a], graph.event[after.get(int(b), int(b))])
        out.add(tuple(int(events.correlation[row]) for row in ends))
    return out  # type: ignore[return-value]


def test_event_between_streams_alexnet(shared_data: Path) -> None:
    """The inverse FFT on stream 20 (5606) is awaited by the elementwise kernel on stream 7 (5629)."""
    built = _built(shared_data, "benchmark_result_2869224_1695835535_trace.json.gz")

    assert (5606, 5629) in _correlated(built, EdgeKind.EVENT_WAIT)


def test_event_leads_to_its_own_stream(shared_data: Path) -> None:
    """The event recorded on stream 20 awaits kernel 27 there, not the later launch on stream 28 (57)."""
    built = _built(shared_data, "cuda_event_sync_multi_stream__event_sync_trace.json.gz")

    assert {(27, 1411)} == _correlated(built, EdgeKind.EVENT_WAIT)
    assert {"recorded": 1} == {k: v for k, v in built.quality.offered.items() if k == EdgeSource.RECORDED.name.lower()}


def test_event_and_device_synchronisation(shared_data: Path) -> None:
    """cudaEventSynchronize and cudaDeviceSynchronize both wait for the spin kernel."""
    graph = _built(shared_data, "event_sync_trace.json.gz").graph
    syncs = {
        (graph.name_of(int(a)).split("::")[-1], graph.name_of(int(b)))
        for a, b, kind in zip(graph.pred, graph.edge_dst, graph.edge_kind, strict=True)
        if kind == EdgeKind.HOST_SYNC
    }

    assert {("spin_kernel(long)", "cudaEventSynchronize"), ("spin_kernel(long)", "cudaDeviceSynchronize")} <= syncs


def test_simple_add_ends_with_its_last_kernel(shared_data: Path) -> None:
    """The device synchronisation at the end waits for the last kernel of the forward pass."""
    graph = _built(shared_data, "benchmark_result_493459_1694039959_trace.json.gz").graph
    before = {
        node: set(graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]].tolist()) for node in range(len(graph))
    }
    awaited = set()
    for wait in np.flatnonzero(graph.nodes(NodeKind.WAIT)).tolist():
        if graph.name_of(wait) == "cudaDeviceSynchronize":
            behind = {
                p for node in before[wait] for p in (before[node] if graph.kind[node] == NodeKind.STALL else {node})
            }
            awaited |= {graph.name_of(node) for node in behind}

    assert any("epilogue" in name for name in awaited)


@pytest.mark.parametrize("name", SETS)
def test_path_covers_the_whole_span(shared_data: Path, name: str) -> None:
    """Where HTA's path covers between 4 % and 100 % of the span, ours covers all of it."""
    timeline = replay(_built(shared_data, name).graph)

    assert timeline.makespan_ns == critical_path(timeline).length_ns
