"""Threads beside the main one: operators in program order, what woke them, and who waits for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.replay.breakdown import breakdown
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from tests.parse.traces import Event, built_of, call, edges, job_of, kernel, named, op

FETCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def _loaded(device: bool) -> list[Event]:
    """Work, then a fetch of 1.1 ms that ends 100 us after the loader thread's last operator, then work."""
    events = [op("aten::mm", 0, 100), op(FETCH, 110, 1100, cat="user_annotation"), op("aten::mm", 1220, 100)]
    events += [op("aten::pin_memory", 100, 500, tid=400), op("aten::copy_", 620, 490, tid=400)]
    if device:
        events += [call("cudaLaunchKernel", 50, 4, 1), kernel("gemm", 56, 60, 1)]
        events += [call("cudaLaunchKernel", 1250, 4, 2), kernel("gemm", 1256, 60, 2)]
    return events


@pytest.fixture(params=[True, False], ids=["device", "cpu"])
def fetched(request: pytest.FixtureRequest, tmp_path: Path) -> Built:
    """The graph of a fetch, on a rank with a device and on one without."""
    return built_of(tmp_path, _loaded(request.param))


def test_operators_of_other_threads_are_in_program_order(fetched: Built) -> None:
    """Both are there, the second behind the first, the first behind what the main thread had done."""
    graph = fetched.graph
    (pin,), (copy,) = named(fetched, "aten::pin_memory"), named(fetched, "aten::copy_")
    start = replay(graph).start_ns

    assert [500_000, 490_000] == graph.dur_ns[[pin, copy]].tolist()
    assert start[copy] - start[pin] == 520_000
    assert 1 == fetched.health.guessed["operators of other threads, placed after what the main thread had just done"]


def test_fetch_waits_for_the_loader_thread(fetched: Built) -> None:
    """An edge from the thread's last operator, recorded as a data-loader edge; a faster loader shortens the step."""
    graph = fetched.graph
    (edge,) = np.flatnonzero(graph.edge_kind == EdgeKind.DATALOADER)
    faster = np.where(graph.name == graph.names.index("aten::copy_"), 90_000, graph.dur_ns)

    assert ("aten::copy_", "wait for the data loader") == (
        graph.name_of(int(graph.pred[edge])),
        graph.name_of(int(graph.edge_dst[edge])),
    )
    assert EdgeSource.THREAD == graph.edge_source[edge]
    assert replay(graph).makespan_ns - 400_000 == replay(graph, faster).makespan_ns


def test_waiting_for_the_loader_is_a_kind_of_its_own(fetched: Built) -> None:
    """The wait of 1.1 ms is named in the breakdown, as part of the host's time, and on the path."""
    timeline = replay(fetched.graph)
    (part,) = breakdown(timeline)
    by_kind = part.to_json()["host_by_kind_ns"]

    assert 900_000 <= part.loader_ns <= part.host_ns + part.compute_ns
    assert part.host_ns == sum(by_kind.values())
    assert critical_path(timeline).loader_ns() >= 100_000


def test_fetching_by_the_main_thread_itself_is_cut_out(tmp_path: Path) -> None:
    """A loader without workers: of 1,000 us between two launches 300 are its, to the nanosecond."""
    events = [call("cudaLaunchKernel", 0, 4, 1), kernel("gemm", 6, 5, 1), op(FETCH, 200, 300, cat="user_annotation")]
    events += [call("cudaLaunchKernel", 1004, 4, 2), kernel("gemm", 1010, 5, 2)]
    built = built_of(tmp_path, events)
    (part,) = breakdown(replay(built.graph))

    assert 300_000 == part.loader_ns
    assert 1_000_000 == int(built.graph.dur_ns[built.graph.nodes(NodeKind.HOST)].sum())


def test_the_thread_that_fetches_is_the_main_one(tmp_path: Path) -> None:
    """An autograd thread with more launches than the main one does not take the loader's time away."""
    events = [op("ProfilerStep#1", 0, 2000, cat="user_annotation"), op(FETCH, 100, 300, cat="user_annotation")]
    events += [call("cudaLaunchKernel", 500, 4, 1), kernel("gemm", 506, 5, 1)]
    for at in range(6):
        events += [
            call("cudaLaunchKernel", 600 + 20 * at, 4, 2 + at, tid=200),
            kernel("grad", 606 + 20 * at, 5, 2 + at),
        ]
    (part,) = breakdown(replay(built_of(tmp_path, events).graph))

    assert 300_000 == part.loader_ns


def test_measured_times_come_back(fetched: Built) -> None:
    """Identity holds with the other threads in the graph."""
    assert fetched.measured.end_ns.max() == replay(fetched.graph).end_ns.max()


def test_main_thread_that_joins_another_waits_for_it(tmp_path: Path) -> None:
    """Two ms without an operator that end with another thread's: what follows starts after that."""
    events = [op("aten::mm", 0, 100), op("aten::mm", 2130, 50), op("aten::sort", 105, 2000, tid=500)]
    built = built_of(tmp_path, events)
    graph = built.graph
    faster = np.where(graph.name == graph.names.index("aten::sort"), 500_000, graph.dur_ns)

    assert 1 == built.health.guessed["waits of the main thread for another thread, by the end of its operator"]
    assert ("aten::sort", "wait for another thread") in edges(built)
    assert replay(graph).makespan_ns - 1_500_000 == replay(graph, faster).makespan_ns


def test_main_thread_of_a_busy_host_wakes_late(tmp_path: Path) -> None:
    """After 100 ms of waiting it is woken 3 ms late and still waited for the thread; after 2 ms it would not have."""
    found = {}
    for waited in (100_000.0, 4_000.0):
        events = [
            op("aten::mm", 0, 100),
            op("aten::mm", 110 + waited, 50),
            op("aten::sort", 105, waited - 3_000, tid=500),
        ]
        (tmp_path / str(waited)).mkdir()
        built = built_of(tmp_path / str(waited), events)
        found[waited] = int((built.graph.edge_source == EdgeSource.THREAD).sum())

    assert {100_000.0: 2, 4_000.0: 1} == found


def test_thread_that_runs_beside_does_not_hold_the_main_one(tmp_path: Path) -> None:
    """An operator that ends while the main thread works is awaited by nobody."""
    events = [op("aten::mm", 0, 1000), op("aten::add", 1001, 1000), op("aten::sort", 100, 1500, tid=500)]
    built = built_of(tmp_path, events)

    assert ("aten::sort", "aten::add") not in edges(built)
    assert not (built.graph.edge_kind == EdgeKind.DATALOADER).any()
    assert not built.graph.nodes(NodeKind.WAIT).any()


def test_idle_time_of_another_thread_is_not_its_work(tmp_path: Path) -> None:
    """With twice as fast a main thread a logger that wakes up every ms does not keep the job at its measured length."""
    events = [op(f"aten::op{at}", 1000 * at, 999) for at in range(5)]
    events += [op("aten::log", 1000 * at + 500, 20, tid=500) for at in range(5)]
    graph = built_of(tmp_path, events).graph
    main = graph.nodes(NodeKind.HOST) & (graph.dur_ns > 100_000)

    fast = replay(graph, np.where(main, graph.dur_ns // 2, graph.dur_ns))

    assert fast.makespan_ns < 0.62 * replay(graph).makespan_ns


GLOO = {"backend": "cpu:gloo,cuda:nccl"}


def _mixed(compute_us: float) -> list[Event]:
    """A rank with a device: a kernel, an all-reduce of its CPU tensor over gloo, waited for, and another kernel."""
    issue = 20 + compute_us
    return [
        op("aten::mm", 10, compute_us),
        call("cudaLaunchKernel", 12, 4, 1),
        kernel("gemm", 20, 50, 1),
        op("c10d::allreduce_", issue, 20, **{"Input Dims": [[[100]]]}),
        op("gloo:all_reduce", issue + 30, 1240 - issue - 30, tid=300, cat="user_annotation"),
        op("aten::add", 1250, 100),
        call("cudaLaunchKernel", 1260, 4, 2),
        kernel("add", 1268, 50, 2),
    ]


def test_gloo_collectives_of_ranks_with_a_device_are_in_the_graph(tmp_path: Path) -> None:
    """Both kinds of work: kernels and a rendezvous over gloo; the late rank delays the other's second kernel."""
    built = build(job_of(tmp_path, _mixed(200), _mixed(1000)))
    graph = built.graph
    transfer = np.flatnonzero(graph.nodes(NodeKind.TRANSFER))
    slower = graph.dur_ns.copy()
    late = graph.nodes(NodeKind.HOST) & (graph.rank == 1) & (graph.dur_ns > 500_000)
    slower[late] += 300_000
    add = [node for node in named(built, "add") if graph.rank[node] == 0]

    assert ["gloo:all_reduce"] * 2 == [graph.name_of(int(node)) for node in transfer]
    assert 4 == int(graph.nodes(NodeKind.KERNEL).sum())
    assert 2 == int((graph.edge_kind == EdgeKind.RENDEZVOUS).sum())
    assert 1 == int(late.sum())
    assert (replay(graph).start_ns[add] + 300_000).tolist() == replay(graph, slower).start_ns[add].tolist()
    assert built.measured.end_ns.max() == replay(graph).end_ns.max()


def test_wait_for_gloo_is_never_a_duration_of_the_host(tmp_path: Path) -> None:
    """The early rank's 1 ms of waiting is no host time: its host nodes sum to what it did itself."""
    graph = build(job_of(tmp_path, _mixed(200), _mixed(1000))).graph
    host = graph.nodes(NodeKind.HOST, NodeKind.LAUNCH) & (graph.rank == 0)

    assert int(graph.dur_ns[host].sum()) < 450_000
