"""Turns a public job, as recorded and repeated to a million nodes, into the speed of build, replay and critical path.

HTA's critical path and a plain networkx sweep stand beside it, measured in the same run.
Run from the root: python benchmarks/replay.py [FOLDER OF THE PUBLIC DATA]
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from benchmarks.tiled import tile
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph
from scaletrace.parse.load import load
from scaletrace.replay.compress import compress
from scaletrace.replay.critical_path import critical_path, slack
from scaletrace.replay.engine import replay, replay_columns

TIMES = 11
COLUMNS = 64


def cpu_s(call: Callable[[], object], times: int = 3) -> float:
    """Least CPU seconds of several calls."""
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def networkx_sweep(graph: Graph) -> Callable[[], object]:
    """The same max-plus sweep over a networkx graph."""
    import networkx

    net = graph.to_networkx()

    def sweep() -> dict[int, int]:
        end: dict[int, int] = {}
        for node in networkx.topological_sort(net):
            start = max((end[p] + edge["lag_ns"] for p, edge in net.pred[node].items()), default=0)
            end[node] = start + net.nodes[node]["dur_ns"]
        return end

    return sweep


def hta(path: Path) -> tuple[int, float]:
    """Nodes of HTA's graph of one rank and the CPU seconds that it takes to build it and find the path."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="")
    start = time.process_time()
    graph, _ = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=(0, 3))
    return len(graph.nodes), time.process_time() - start


def main() -> None:
    """Print the table and write it to results/replay.md."""
    default = os.environ.get("SCALETRACE_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    data = Path(sys.argv[1] if len(sys.argv) > 1 else default) / "traces" / "nanogpt8_h100"
    job = load(data)
    small = build(job).graph
    rows: list[tuple[object, ...]] = []
    took = cpu_s(lambda: build(job))
    rows.append(("build, as recorded", len(small), f"{took:.2f}", f"{took / len(small) * 1e6:.2f} µs a node", "≤ 3"))
    large_job = tile(job, TIMES)
    start, cpu = time.perf_counter(), time.process_time()
    graph = build(large_job).graph
    cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    n = len(graph)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows.append(
        (
            "build, eight ranks, a million nodes",
            n,
            f"{cpu:.2f}",
            f"{cpu / n * 1e6:.2f} µs a node; {wall:.1f} s wall; {memory:.2f} GB peak",
            "≤ 3; < 5 s; < 2 GB",
        )
    )
    timeline = replay(graph)
    took = cpu_s(lambda: replay(graph))
    rows.append(("replay, one column", n, f"{took:.4f}", f"{n / took / 1e6:.0f} million nodes/s", "≥ 10"))
    columns = np.repeat(graph.dur_ns[:, None], COLUMNS, axis=1)
    replay_columns(graph, columns)
    took = cpu_s(lambda: replay_columns(graph, columns))
    rows.append(
        (
            f"replay, {COLUMNS} columns",
            n,
            f"{took:.3f}",
            f"{n * COLUMNS / took / 1e6:.0f} million node-columns/s",
            "≥ 100",
        )
    )
    compressed = compress(graph)
    took = cpu_s(lambda: replay(compressed.graph))
    share = f"{len(compressed.graph):,} nodes left"
    rows.append(("replay, chains compressed", n, f"{took:.4f}", f"{n / took / 1e6:.0f} million nodes/s; {share}", ""))
    critical_path(timeline)
    took = cpu_s(lambda: critical_path(timeline))
    rows.append(("critical path", n, f"{took:.4f}", f"{took / n * 1e6:.3f} µs a node", "≤ 1"))
    slack(timeline)
    took = cpu_s(lambda: slack(timeline))
    rows.append(("slack of every node", n, f"{took:.4f}", f"{took / n * 1e6:.3f} µs a node", ""))
    took = cpu_s(networkx_sweep(small), 1)
    rows.append(
        ("networkx sweep, as recorded", len(small), f"{took:.2f}", f"{len(small) / took / 1e6:.2f} million nodes/s", "")
    )
    first = min(data.glob("*.gz"))
    count, took = hta(first)
    rows.append(
        ("HTA graph and critical path, one rank", count, f"{took:.2f}", f"{took / count * 1e6:.0f} µs a node", "")
    )
    body = table(("what", "nodes", "CPU s", "speed", "wanted"), rows)
    packages = ("numpy", "numba", "networkx", "holistictraceanalysis")
    print(write_result("replay", "Speed of build, replay and critical path", body, *packages))


if __name__ == "__main__":
    main()
