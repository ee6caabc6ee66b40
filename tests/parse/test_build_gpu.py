"""The graph of a rank with a device: launches, streams, waits, blocking calls, external work and stalls."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaletrace.parse.build import BuildOptions
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.replay.engine import replay
from tests.parse.traces import Event, built_of, call, edges, kernel, named, op


def _launch(name: str, ts: float, start: float, dur: float, corr: int, stream: int = 7, **args: object) -> list[Event]:
    """A launch call of 4 us and its kernel."""
    return [call("cudaLaunchKernel", ts, 4, corr), kernel(name, start, dur, corr, stream, **args)]


def test_launch_and_stream_order(tmp_path: Path) -> None:
    """Each launch leads to its kernel, each kernel to the next of its stream, the host keeps its order."""
    built = built_of(tmp_path, _launch("a", 0, 6, 50, 1) + _launch("b", 10, 57, 20, 2))

    assert {
        ("cudaLaunchKernel", "between operators"),
        ("between operators", "cudaLaunchKernel"),
        ("cudaLaunchKernel", "a"),
        ("cudaLaunchKernel", "b"),
        ("a", "b"),
    } == edges(built)
    assert [0, 6_000, 57_000] == [
        int(replay(built.graph).start_ns[node] - replay(built.graph).start_ns.min())
        for node in (0, named(built, "a")[0], named(built, "b")[0])
    ]


def test_host_time_is_a_node_with_the_name_of_the_operator(tmp_path: Path) -> None:
    """The time before a launch belongs to the operator that prepares it, not to an anonymous gap."""
    built = built_of(tmp_path, [op("aten::mm", 10, 30), *_launch("a", 0, 6, 5, 1), *_launch("b", 30, 36, 5, 2)])

    (node,) = named(built, "aten::mm")
    assert (26_000, NodeKind.HOST) == (int(built.graph.dur_ns[node]), built.graph.kind[node])


def test_launch_bound_step_stays_launch_bound(tmp_path: Path) -> None:
    """When kernels shrink to nothing the host still takes its time."""
    events = [e for at in range(10) for e in _launch(f"k{at}", 20 * at, 20 * at + 6, 10, at + 1)]
    built = built_of(tmp_path, events)
    kernels = built.graph.nodes(NodeKind.KERNEL)

    fast = replay(built.graph, np.where(kernels, 0, built.graph.dur_ns))

    assert replay(built.graph).makespan_ns - 10_000 == fast.makespan_ns


def test_blocking_call_waits_for_the_device(tmp_path: Path) -> None:
    """A device synchronisation never keeps its own duration: it ends a constant after the work that it awaits."""
    events = [*_launch("a", 0, 6, 500, 1), call("cudaDeviceSynchronize", 10, 504, 2), *_launch("b", 520, 526, 5, 3)]
    built = built_of(tmp_path, events)
    graph = built.graph
    (wait,) = np.flatnonzero(graph.nodes(NodeKind.WAIT))
    shorter = graph.dur_ns.copy()
    shorter[named(built, "a")] = 100_000

    assert EdgeKind.HOST_SYNC in graph.edge_kind[graph.pred_ptr[wait] : graph.pred_ptr[wait + 1]]
    assert replay(graph).makespan_ns - 400_000 == replay(graph, shorter).makespan_ns


def test_cuda_free_waits_and_then_unmaps(tmp_path: Path) -> None:
    """Of a cudaFree of 700 us behind a kernel the first part is waiting, the rest its own work."""
    events = [*_launch("a", 0, 6, 500, 1), call("cudaFree", 10, 700, 2), *_launch("b", 720, 726, 5, 3)]
    built = built_of(tmp_path, events)
    own = [node for node in named(built, "cudaFree") if built.graph.kind[node] == NodeKind.HOST]

    assert [204_000] == built.graph.dur_ns[own].tolist()
    assert 1 == int(built.graph.nodes(NodeKind.WAIT).sum())


def test_sync_that_nothing_explains_leaves_a_stall(tmp_path: Path) -> None:
    """While work is outstanding a long call isn't taken at its word: what no kernel explains is a labelled stall."""
    events = [*_launch("a", 0, 6, 900, 1), call("cudaStreamSynchronize", 10, 400, 2), *_launch("b", 420, 907, 5, 3)]
    built = built_of(tmp_path, events)
    stalls = np.flatnonzero(built.graph.nodes(NodeKind.STALL))

    assert ["stall: late return of a blocking call"] == [built.graph.name_of(int(node)) for node in stalls]
    assert built.graph.dur_ns[stalls].sum() == built.quality.unexplained_stall_ns[0]


def test_late_start_is_a_stall_and_can_be_left_out(tmp_path: Path) -> None:
    """A kernel 300 us later than launch and stream explain waits in a STALL node, which only the option leaves out."""
    events = [e for at in range(6) for e in _launch(f"k{at}", 20 * at, 20 * at + 6, 5, at + 1)]
    events += _launch("late", 200, 506, 5, 9)

    with_stalls = built_of(tmp_path, events)
    strict = built_of(tmp_path, events, options=BuildOptions(stalls=False))

    assert [300_000] == with_stalls.graph.dur_ns[with_stalls.graph.nodes(NodeKind.STALL)].tolist()
    assert replay(with_stalls.graph).makespan_ns - 300_000 == replay(strict.graph).makespan_ns


def test_work_from_before_the_window_is_an_external_arrival(tmp_path: Path) -> None:
    """A kernel without a launch keeps its start; one right behind it follows in stream order."""
    events = [kernel("old", 1000, 40, 90), kernel("older", 1041, 40, 91), kernel("far", 1200, 10, 92)]
    built = built_of(tmp_path, [*events, *_launch("a", 1150, 1211, 5, 1)])
    released = {built.graph.name_of(int(node)) for node in np.flatnonzero(built.graph.release_ns > 0)}

    assert {"old", "far", "cudaLaunchKernel"} == released
    assert ("old", "older") in edges(built)


def test_touching_kernels_of_dependent_launch_keep_a_negative_lag(tmp_path: Path) -> None:
    """A kernel that starts before its neighbour's end (programmatic dependent launch) overlaps in the replay too."""
    built = built_of(tmp_path, _launch("a", 0, 6, 50, 1) + _launch("b", 10, 46, 20, 2))
    timeline = replay(built.graph)

    assert -10_000 == int(timeline.start_ns[named(built, "b")[0]] - timeline.end_ns[named(built, "a")[0]])


def test_collective_waits_for_the_current_stream_and_is_awaited(tmp_path: Path) -> None:
    """Entry: after the last kernel of the current stream. Work wait: the next kernel of that stream after the transfer."""
    events = [
        *_launch("gemm", 0, 6, 100, 1),
        op("record_param_comms", 10, 12),
        call("cudaStreamWaitEvent", 12, 1),
        *_launch("ncclDevKernel_AllReduce", 14, 108, 200, 2, 20),
        op("record_param_comms", 30, 5),
        call("cudaStreamWaitEvent", 31, 1),
        *_launch("add", 40, 310, 10, 3),
    ]
    graph = (built := built_of(tmp_path, events)).graph
    found = {
        (graph.name_of(int(a)), graph.name_of(int(b)), EdgeSource(s).name)
        for a, b, s, k in zip(graph.pred, graph.edge_dst, graph.edge_source, graph.edge_kind, strict=True)
        if k == EdgeKind.EVENT_WAIT
    }

    assert {
        ("gemm", "ncclDevKernel_AllReduce", "ENTRY"),
        ("ncclDevKernel_AllReduce", "add", "WORK_WAIT"),
    } == found
    assert {"entry": 1, "work_wait": 1} == {
        k: v for k, v in built.quality.offered.items() if k in ("entry", "work_wait")
    }


def test_dropping_a_source_changes_the_graph(tmp_path: Path) -> None:
    """An experiment can leave out what a rule infers."""
    events = [
        *_launch("gemm", 0, 6, 100, 1),
        op("record_param_comms", 10, 12),
        *_launch("ncclDevKernel_AllReduce", 14, 108, 200, 2, 20),
    ]
    options = BuildOptions(drop=frozenset({EdgeSource.ENTRY}), stalls=False)

    assert ("gemm", "ncclDevKernel_AllReduce") in edges(built_of(tmp_path, events))
    assert ("gemm", "ncclDevKernel_AllReduce") not in edges(built_of(tmp_path, events, options=options))


def test_full_device_holds_back_a_ready_kernel(tmp_path: Path) -> None:
    """A kernel of another stream that is ready while one with 500 blocks runs starts at its tail: occupancy."""
    events = [
        *_launch("warm", 0, 6, 5, 1, 9),
        *_launch("big", 10, 16, 400, 2, 7, grid=[500, 1, 1]),
        *_launch("small", 30, 450, 5, 3, 9, grid=[1, 1, 1]),
    ]
    events[3]["dur"] = 440
    built = built_of(tmp_path, events)

    assert ("big", "small") in edges(built)
    assert 1 == built.quality.offered.get("occupancy", 0) + built.quality.offered.get("tight_end", 0)


def test_threads_that_take_turns_are_one_thread_of_control(tmp_path: Path) -> None:
    """Main and autograd thread hand over to each other; a thread that runs beside them has a chain of its own."""
    turns = [call("cudaLaunchKernel", 20 * at, 4, at + 1, tid=100 if at % 2 else 200) for at in range(8)]
    turns += [kernel("k", 20 * at + 6, 2, at + 1) for at in range(8)]
    beside = [call("cudaLaunchKernel", 20 * at - 3, 8, 100 + at, tid=300) for at in range(1, 4)]
    beside += [kernel("x", 20 * at + 9, 2, 100 + at, 9) for at in range(1, 4)]

    alone, both = built_of(tmp_path, turns), built_of(tmp_path, turns + beside)

    assert 7 == int((alone.graph.edge_kind == EdgeKind.HAND_OVER).sum())
    assert 7 == int((both.graph.edge_kind == EdgeKind.HAND_OVER).sum())
    assert 1 == both.health.guessed["host threads taken as independent (they overlap the main thread)"]


def test_wait_that_names_its_collective_joins_exactly(tmp_path: Path) -> None:
    """With recorded inputs the wait awaits the work of that sequence number, not the oldest outstanding one."""
    events = []
    for number, at in ((3, 10), (4, 30)):
        inputs = ["", f"[{number}, 0]"]
        events.append(op("record_param_comms", at, 12, **{"Concrete Inputs": inputs}))
        events += _launch(f"nccl_AllReduce_{number}", at + 4, 50 * number, 40, number, 20)
    events += [op("record_param_comms", 50, 5, **{"Concrete Inputs": ["4", ""]}), call("cudaStreamWaitEvent", 51, 1)]
    built = built_of(tmp_path, [*_launch("gemm", 0, 6, 5, 1), *events, *_launch("add", 60, 242, 10, 9)])
    graph = built.graph
    work = {
        graph.name_of(int(a))
        for a, source in zip(graph.pred, graph.edge_source, strict=True)
        if source == EdgeSource.WORK_WAIT
    }

    assert {"nccl_AllReduce_4"} == work


def test_launch_into_a_full_queue_waits_for_the_device(tmp_path: Path) -> None:
    """A launch that blocks for 500 us with a thousand kernels outstanding waits for the one that makes room."""
    events = [e for at in range(1010) for e in _launch(f"k{at % 3}", 5 * at, 6 + 100 * at, 99, at + 1)]
    blocked_at = 5 * 1010
    room = next(at for at in range(1010) if 105 + 100 * at > blocked_at + 400)
    events += [call("cudaLaunchKernel", blocked_at, 106 + 100 * room - blocked_at, 5000)]
    events += [kernel("last", 6 + 101_000, 10, 5000)]
    built = built_of(tmp_path, events)
    graph = built.graph
    awaited = [
        graph.name_of(int(a)) for a, kind in zip(graph.pred, graph.edge_kind, strict=True) if kind == EdgeKind.HOST_SYNC
    ]

    assert [f"k{room % 3}"] == awaited


def _stream_wait(stream: int, corr: int, on: int, record: int) -> Event:
    """A recorded Stream Wait Event, as CUPTI writes it."""
    kind = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": on, "wait_on_cuda_event_record_corr_id": record}
    return {**kernel("Stream Wait Event", 24, 1, corr, stream, cat="cuda_sync", **kind)}


def test_recorded_wait_without_its_event_takes_the_last_work_of_its_stream(tmp_path: Path) -> None:
    """The awaited stream is known, the event record is not: counted as a guess, and the other stream is left alone."""
    events = [*_launch("a", 0, 6, 100, 1, 20), *_launch("b", 10, 16, 50, 2, 28), call("cudaStreamWaitEvent", 20, 1, 3)]
    built = built_of(tmp_path, [*events, _stream_wait(24, 3, 20, -1), *_launch("c", 30, 107, 5, 4, 24)])

    assert ("a", "c") in edges(built)
    assert ("b", "c") not in edges(built)
    assert 1 == sum(n for what, n in built.health.guessed.items() if "without their event record" in what)


def test_unresolved_wait_is_counted_and_inferred(tmp_path: Path) -> None:
    """wait_on_stream -1 (CUDA 12.9 and later) is no dependency on stream -1: the rules infer it, and it is counted."""
    events = [*_launch("a", 0, 6, 100, 1, 20), call("cudaStreamWaitEvent", 20, 1, 3)]
    built = built_of(tmp_path, [*events, _stream_wait(24, 3, -1, -1), *_launch("c", 30, 107, 5, 4, 24)])

    assert ("a", "c") in edges(built)
    assert (
        1
        == built.health.unmatched["recorded stream waits whose event is not in the trace (the graph is a lower bound)"]
    )


def test_lost_record_of_a_collective_is_still_outstanding(tmp_path: Path) -> None:
    """Of two collectives the first has no kernel in the trace: the first wait is for it, the second for the other."""
    events = _launch("gemm", 0, 6, 5, 1)
    for at, corr in ((10, 2), (30, 3)):
        events += [op("record_param_comms", at, 12), call("cudaStreamWaitEvent", at + 1, 1)]
        events += [call("cudaLaunchKernelExC", at + 4, 4, corr)]
    events += [kernel("nccl_AllReduce", 40, 60, 3, 20)]
    for at, name, start in ((50, "first", 110), (120, "second", 130)):
        events += [op("record_param_comms", at, 5), call("cudaStreamWaitEvent", at + 1, 1)]
        events += _launch(name, at + 6, start, 5, at)
    built = built_of(tmp_path, events)
    graph = built.graph
    awaited = {
        (graph.name_of(int(a)), graph.name_of(int(b)))
        for a, b, source in zip(graph.pred, graph.edge_dst, graph.edge_source, strict=True)
        if source == EdgeSource.WORK_WAIT
    }

    assert {("nccl_AllReduce", "second")} == awaited
    assert 1 == sum(n for what, n in built.health.unmatched.items() if "no rule resolves" in what)
