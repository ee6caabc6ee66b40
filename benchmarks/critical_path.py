"""Turns public single-rank traces into how much of the span the critical path covers, ours and HTA's, and at what cost.

Coverage is the sum of what the path's segments weigh over the span from the first to the last event of the graph.
Run from the root: python benchmarks/critical_path.py [FOLDER OF THE PUBLIC DATA]
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.errors import ScaletraceError
from scaletrace.parse.build import build
from scaletrace.parse.cats import DEVICE_CATS
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.links import launch_of
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay

MOST_BYTES = 1_300_000
FOLDERS = (
    "hta_critical_path",
    "misc-facebookresearch_HolisticTraceAnalysis",
    "misc-sidnb13_torch-profiling-tutorial",
    "misc-flashinfer-ai_flashinfer",
    "misc-pytorch_benchmark",
    "misc-ROCm_aorta",
    "misc-pytorch_kineto",
    "dlrm8_v100/kineto",
    "lightllm8_h200-logs-run1",
    "lightllm8_h200-logs_decode_overlap-run1",
    "megatron_tp2_v100",
    "nanogpt8_h100",
    "nanogpt_ab_v1",
    "torchrec2_v100",
    "torchrec4_v100-sst_long_a2a_optimizer_5-run1",
    "triosim_vgg13",
)


def files(data: Path) -> list[Path]:
    """Two traces a folder at most, so that no job counts eight times."""
    out = []
    for folder in FOLDERS:
        found = sorted(p for p in (data / folder).glob("*.json*") if p.stat().st_size < MOST_BYTES)
        out += found[:2] if not folder.startswith(("hta", "misc-face")) else found
    return out


def ours(path: Path) -> tuple[int, float, float, int, int] | None:
    """Nodes, coverage, µs a node for build and path, kernels on the path, kernels in CUDA graphs on it; None unreadable."""
    try:
        job = load(path)
    except ScaletraceError:
        return None
    events = job.ranks[0].events
    if not events.in_cats(*DEVICE_CATS).any():
        return None
    build(job)
    start = time.process_time()
    graph = build(job).graph
    timeline = replay(graph)
    found = critical_path(timeline)
    took = time.process_time() - start
    if not len(graph) or not timeline.makespan_ns:
        return None
    kernels = found.nodes[np.isin(graph.kind[found.nodes], (NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.COPY))]
    launch = launch_of(events)[graph.event[kernels]]
    in_graph = sum(row >= 0 and "GraphLaunch" in events.name_of(row) for row in launch.tolist())
    return len(graph), found.length_ns / timeline.makespan_ns, took / len(graph) * 1e6, len(kernels), in_graph


def hta(path: Path) -> tuple[int, float, float] | None:
    """Nodes, coverage and µs a node of HTA, over the whole trace; None where it fails."""
    from hta.trace_analysis import TraceAnalysis

    try:
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="")
        start = time.process_time()
        graph, done = analysis.critical_path_analysis(rank=0, annotation="", instance_id=None)
        took = time.process_time() - start
        if not done:
            return None
        span = max(n.ts for n in graph.node_list) - min(n.ts for n in graph.node_list)
        weight = sum(edge.weight for edge in graph.critical_path_edges_set)
        return len(graph.nodes), weight / span if span else 0.0, took / len(graph.nodes) * 1e6
    except Exception:  # noqa: BLE001  HTA fails in many ways; the table says that it did
        return None


def main() -> None:
    """Print the table and write it to results/critical_path.md."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    default = os.environ.get("SCALETRACE_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    data = Path(sys.argv[1] if len(sys.argv) > 1 else default) / "traces"
    rows, covered, theirs_covered, speed, theirs_speed = [], [], [], [], []
    for path in files(data):
        mine = ours(path)
        if mine is None:
            continue
        theirs = hta(path)
        nodes, coverage, cost, kernels, in_graph = mine
        covered.append(coverage)
        speed.append(cost)
        cells = ("-", "fails", "-")
        if theirs is not None:
            theirs_covered.append(theirs[1])
            theirs_speed.append(theirs[2])
            cells = (str(theirs[0]), f"{theirs[1]:.2f}", f"{theirs[2]:.0f}")
        name = f"{path.parent.name[:28]}/{path.name[:36]}"
        rows.append((name, nodes, f"{coverage:.2f}", f"{cost:.1f}", f"{kernels} ({in_graph})", *cells))
    columns = (
        "trace",
        "nodes",
        "covered",
        "µs a node",
        "device work on the path (in CUDA graphs)",
        "HTA nodes",
        "HTA covered",
        "HTA µs a node",
    )
    median = (
        f"Median over {len(covered)} traces: covered {np.median(covered):.2f}, {np.median(speed):.1f} µs a node "
        f"(build, replay and path); HTA over its {len(theirs_covered)}: covered {np.median(theirs_covered):.2f}, "
        f"{np.median(theirs_speed):.0f} µs a node."
    )
    body = f"{median}\n\n{table(columns, rows)}"
    print(
        write_result(
            "critical_path", "Coverage and cost of critical paths", body, "numba", "holistictraceanalysis", "pandas"
        )
    )


if __name__ == "__main__":
    main()
