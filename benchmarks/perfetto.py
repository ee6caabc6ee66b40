"""Turns a million slices into a trace by our writer, by the official builder and as JSON, and compares cost and size.

Our route is the whole of `write_timeline`: choosing, sorting and splitting slices, arrows from edges, arguments and
encoding. The others get their columns ready-made and only write (100,000 slices, scaled up).

    python -P benchmarks/perfetto.py [SLICES]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

if not __package__:  # run as a script, `python -P benchmarks/perfetto.py`
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    GraphLane,
    NodeKind,
    edges_by_destination,
)
from scaletrace.replay.engine import replay
from scaletrace.replay.timeline import Timeline
from scaletrace.view.perfetto import write_timeline

RANKS = 8
OTHERS = 100_000
LIMIT_CPU_S, LIMIT_BYTES = 2.0, 80.0
NAMES = [
    f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<{i}ul>)"
    if i % 3 == 0
    else f"void at::native::vectorized_elementwise_kernel<{i}, at::native::AddFunctor>"
    for i in range(64)
]


def job(slices: int) -> Timeline:
    """A replayed job of `slices` nodes: on each rank a thread launches kernels to a stream; every 50th is a collective."""
    pairs = slices // RANKS // 2
    nodes = pairs * 2 * RANKS
    rng = np.random.default_rng(0)
    number = np.arange(nodes)
    rank, within = (number // (2 * pairs)).astype(np.int32), number % (2 * pairs)
    is_kernel = within % 2 == 1
    launch = np.flatnonzero(~is_kernel)
    src = np.concatenate([launch, launch[:-1]])
    dst = np.concatenate([launch + 1, launch[1:]])
    kind = np.repeat([int(EdgeKind.LAUNCH), int(EdgeKind.PROGRAM)], [len(launch), len(launch) - 1])
    same = rank[src] == rank[dst]
    columns = edges_by_destination(
        nodes,
        src[same],
        dst[same],
        np.zeros(int(same.sum())),
        kind[same],
        np.full(int(same.sum()), int(EdgeSource.RECORDED)),
    )
    collective = is_kernel & (within // 2 % 50 == 0)
    graph = Graph(
        np.where(is_kernel, rng.integers(1_000, 200_000, nodes), 2_000),
        np.where(within == 0, 1_700_000_000_000_000_000, NO_RELEASE),
        np.where(collective, NodeKind.TRANSFER, np.where(is_kernel, NodeKind.KERNEL, NodeKind.LAUNCH)).astype(np.uint8),
        rank,
        (2 * rank + is_kernel).astype(np.int32),
        np.where(is_kernel, rng.integers(1, 65, nodes), 0).astype(np.int32),
        np.zeros(nodes, np.int32),
        number.astype(np.int32),
        np.where(collective, within // 100, -1).astype(np.int32),
        *columns,
        ("cudaLaunchKernel", *NAMES),
        tuple(GraphLane(r, name, name != "thread 1") for r in range(RANKS) for name in ("thread 1", "stream 7")),
        (GraphGroup("dp", RANKS, 1, 1, "data parallel"),),
        tuple(GraphCollective("all_reduce", 0, 1 << 20, 1 << 20) for _ in range(pairs // 50 + 1)),
    )
    return replay(graph)


def columns_of(timeline: Timeline) -> list[tuple[str, int, int, int, int]]:
    """(name, lane, start, duration, node) of the first slices, for the routes that take objects."""
    graph = timeline.graph
    part = slice(0, OTHERS)
    dur = timeline.end_ns[part] - timeline.start_ns[part]
    names = [graph.names[code] for code in graph.name[part].tolist()]
    return list(
        zip(
            names, graph.lane[part].tolist(), timeline.start_ns[part].tolist(), dur.tolist(), range(OTHERS), strict=True
        )
    )


def json_dump(rows: list[tuple[str, int, int, int, int]], target: Path) -> None:
    """json.dump of dictionaries, as HTA, TraceLens and dPRO write."""
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "pid": 0, "tid": k, "ts": t / 1e3, "dur": d / 1e3, "args": {"node": i}}
        for n, k, t, d, i in rows
    ]
    with target.open("w", encoding="utf-8") as out:
        json.dump({"traceEvents": events}, out)


def json_text(rows: list[tuple[str, int, int, int, int]], target: Path) -> None:
    """JSON put together from pieces of text, the fastest form of it."""
    names = {n: json.dumps(n) for n, *_ in rows}
    with target.open("w", encoding="utf-8", buffering=1 << 20) as out:
        out.write('{"traceEvents":[\n')
        for n, k, t, d, i in rows:
            out.write(
                f'{{"ph":"X","cat":"kernel","name":{names[n]},"pid":0,"tid":{k},"ts":{t // 1000}.{t % 1000:03d},'
                f'"dur":{d // 1000}.{d % 1000:03d},"args":{{"node":{i}}}}},\n'
            )
        out.write("{}]}")


def builder(rows: list[tuple[str, int, int, int, int]], target: Path) -> None:
    """The perfetto package's streaming builder, with interned names."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    with target.open("wb", buffering=1 << 20) as out:
        build = StreamingTraceProtoBuilder(out)
        ids: dict[str, int] = {}
        first = build.create_packet()
        first.trusted_packet_sequence_id, first.sequence_flags = 1, 1
        for name in dict.fromkeys(n for n, *_ in rows):
            entry = first.interned_data.event_names.add()
            entry.iid, entry.name = ids.setdefault(name, len(ids) + 1), name
        build.write_packet(first)
        for name, lane, start, dur, node in rows:
            for kind, at in ((TrackEvent.TYPE_SLICE_BEGIN, start), (TrackEvent.TYPE_SLICE_END, start + dur)):
                packet = build.create_packet()
                packet.timestamp, packet.trusted_packet_sequence_id, packet.sequence_flags = at, 1, 2
                packet.track_event.type, packet.track_event.track_uuid = kind, lane + 100
                if kind == TrackEvent.TYPE_SLICE_BEGIN:
                    packet.track_event.name_iid = ids[name]
                    argument = packet.track_event.debug_annotations.add()
                    argument.name, argument.int_value = "node", node
                build.write_packet(packet)


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main(slices: int = 1_000_000) -> None:
    timeline = job(slices)
    small = job(1_000)
    rows = columns_of(timeline)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_timeline(folder / "warm.pftrace", small)  # compiled code is cached on disk; its loading is not measured
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for label, counters in (("write_timeline, no counters", False), ("write_timeline, counters too", True)):
            target = folder / "ours.pftrace"
            report = None
            begin = time.process_time()
            report = write_timeline(target, timeline, counters=counters)
            cpu_s = time.process_time() - begin
            about = f"{report.flows:,} arrows, {report.counter_steps:,} counter steps"
            results.append((label, report.slices, cpu_s, report.size_bytes / report.slices, about))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for label, write in (
            ("perfetto's builder, interned", builder),
            ("JSON from text", json_text),
            ("json.dump of dicts", json_dump),
        ):
            target = folder / "other"
            cpu_s = timed(lambda write=write, target=target: write(rows, target))  # type: ignore[misc]
            scale = report.slices / len(rows)
            results.append(
                (label, len(rows), cpu_s * scale, target.stat().st_size / len(rows), "one argument, no arrows")
            )
    columns = ["route", "slices written", "CPU s a million", "bytes a slice", "with"]
    shown = [
        (label, f"{n:,}", f"{cpu_s * 1e6 / report.slices:.2f}", f"{size:.1f}", about)
        for label, n, cpu_s, size, about in results
    ]
    cpu_s, size = results[0][2] * 1e6 / report.slices, results[0][3]
    verdict = "reached" if cpu_s <= LIMIT_CPU_S and size <= LIMIT_BYTES else "MISSED"
    body = table(columns, shown)
    body += f"\n\nGate: at most {LIMIT_CPU_S} CPU s and {LIMIT_BYTES:.0f} bytes a slice: {verdict} ({cpu_s:.2f} s, {size:.1f} bytes)."
    body += f"\nPeak memory of the process: {peak:,.0f} MB, {before:,.0f} MB of them before the first write."
    print(write_result("perfetto", "Writing a million slices", body, "perfetto", "numpy", "numba"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
