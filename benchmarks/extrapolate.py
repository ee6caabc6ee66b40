"""Times one what-if at 100,000 GPUs and a curve of ten points on a trace of a million events, and their memory.

    python -P benchmarks/extrapolate.py [EVENTS]

The graph is that of an FSDP job of 8 ranks and 4 steps: a host thread that launches, a compute and a communication
stream a rank, a gather or a scatter every 250 kernels, prefetched by one.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.point import Options, evaluate
from scaletrace.parse.build import Built, Quality
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    GraphLane,
    Measured,
    NodeKind,
    edges_by_destination,
)
from scaletrace.parse.health import Health
from scaletrace.parse.job import Collectives, Job
from scaletrace.replay.engine import replay

RANKS, STEPS, EVERY, KERNEL_NS, TRANSFER_NS = 8, 4, 250, 8_000, 400_000
SIZES = (8, 16, 64, 256, 1024, 4096, 16384, 32768, 65536, 100_000)


def job_graph(events: int) -> Graph:
    """About `events` nodes: launches and kernels in the order issued, ranks side by side, hubs for the collectives."""
    kernels = events // (2 * RANKS)
    blocks = kernels // EVERY
    kernels = blocks * EVERY
    rng = np.random.default_rng(0)
    # Rows of one block: for each rank EVERY launches and kernels, then ARRIVE, one hub, TRANSFER.
    per_rank, size = 2 * EVERY + 1, RANKS * (2 * EVERY + 1) + 1 + RANKS
    base = np.arange(blocks, dtype=np.int64)[:, None] * size
    pair = np.arange(EVERY)
    launch = np.stack([base + r * per_rank + 2 * pair for r in range(RANKS)])
    kernel = launch + 1
    arrive = np.stack([base[:, 0] + r * per_rank + 2 * EVERY for r in range(RANKS)])
    hub = base[:, 0] + RANKS * per_rank
    transfer = np.stack([hub + 1 + r for r in range(RANKS)])
    n = blocks * size
    kind, rank, lane = np.zeros(n, np.uint8), np.zeros(n, np.int32), np.zeros(n, np.int32)
    dur, instance = np.zeros(n, np.int64), np.full(n, -1, np.int32)
    for r in range(RANKS):
        for nodes, node_kind, stream in (
            (launch[r], NodeKind.LAUNCH, 0),
            (kernel[r], NodeKind.KERNEL, 1),
            (arrive[r], NodeKind.ARRIVE, 2),
            (transfer[r], NodeKind.TRANSFER, 2),
        ):
            kind[nodes], rank[nodes], lane[nodes] = int(node_kind), r, 3 * r + stream
    kind[hub], lane[hub] = int(NodeKind.RENDEZVOUS), -1
    dur[launch], dur[kernel] = 4_000, rng.integers(KERNEL_NS // 2, 2 * KERNEL_NS, kernel.shape)
    dur[transfer] = TRANSFER_NS
    for nodes in (arrive, transfer):
        instance[nodes] = np.arange(blocks)
    pieces = []
    for r in range(RANKS):
        hosts, computes = launch[r].ravel(), kernel[r].ravel()
        pieces += [
            (hosts[:-1], hosts[1:], EdgeKind.PROGRAM),
            (hosts, computes, EdgeKind.LAUNCH),
            (computes[:-1], computes[1:], EdgeKind.STREAM),
            (launch[r][:, 0], arrive[r], EdgeKind.LAUNCH),
            (transfer[r][:-1], arrive[r][1:], EdgeKind.STREAM),
            (arrive[r], transfer[r], EdgeKind.STREAM),
            (arrive[r], hub, EdgeKind.RENDEZVOUS),
            (hub, transfer[r], EdgeKind.RENDEZVOUS),
            (transfer[r][:-2], kernel[r][2:, 0], EdgeKind.EVENT_WAIT),
        ]
    src, dst = np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces])
    edge_kind = np.concatenate([np.full(len(p[0]), int(p[2]), np.uint8) for p in pieces])
    ptr, pred, lag, kinds, sources = edges_by_destination(
        n, src, dst, np.zeros(len(src), np.int64), edge_kind, np.full(len(src), int(EdgeSource.RECORDED), np.uint8)
    )
    whole = 256 << 20
    items = [
        GraphCollective("all_gather", 0, whole // RANKS, whole)
        if i % 3
        else GraphCollective("reduce_scatter", 0, whole, whole // RANKS)
        for i in range(blocks)
    ]
    lanes = [GraphLane(r, name, name != "host") for r in range(RANKS) for name in ("host", "stream 7", "stream 21")]
    step = (np.arange(n) // size * STEPS // blocks).astype(np.int32)
    return Graph(
        dur, np.full(n, NO_RELEASE), kind, rank, lane, np.zeros(n, np.int32), step, np.full(n, -1, np.int32), instance,
        ptr, pred, lag, kinds, sources, ("work",), tuple(lanes), (GraphGroup("fsdp", RANKS, 1),), tuple(items),
    )  # fmt: skip


def built(graph: Graph) -> Built:
    """The graph as a built job of 8 ranks without files."""
    timeline = replay(graph)
    no = np.zeros(0, np.int64)
    table_ = Collectives(no, no.astype(np.int32), no.astype(np.int32), no.astype(np.int32), no.astype(np.uint8),
                         no.astype(np.int32), no, no, no, no, no, no, no, no.astype(np.bool_))  # fmt: skip
    job = Job((), RANKS, (), table_, {}, Health())
    measured = Measured(timeline.start_ns, timeline.end_ns, np.ones(len(graph), np.bool_))
    return Built(graph, measured, Quality(1.0, 1.0, {}, timeline.makespan_ns, {}, {}), job)


def main() -> None:
    """Write benchmarks/results/extrapolate.md."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    cluster = Cluster.load("dgx_h100")
    warm = built(job_graph(20_000))
    extrapolate(warm, cluster=cluster, sizes=[8, 64])
    job = built(job_graph(events))
    rows = []

    def timed(name: str, limit_s: float, work: object) -> object:
        wall, cpu = time.perf_counter(), time.process_time()
        answer = work() if callable(work) else None
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append(
            [
                name,
                f"{wall:.2f}",
                f"{cpu:.2f}",
                f"{limit_s:g}" if limit_s else "",
                "yes" if not limit_s or cpu <= limit_s else "NO",
            ]
        )
        return answer

    base = prepare(job, cluster)
    timed("prepare (calibrate, overlap, noise)", 0, lambda: prepare(job, cluster))
    for gpus in (64, 1024, 16384, 100_000):
        timed(f"one what-if at {gpus:,} GPUs", 2, lambda gpus=gpus: evaluate(base, gpus, Options()))
    timed(
        "curve of ten points, 8 to 100,000 GPUs, prepare included",
        10,
        lambda: extrapolate(job, cluster=cluster, sizes=SIZES),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    body = table(["work", "wall s", "CPU s", "limit s", "holds"], rows)
    body += (
        f"\n\n{len(job.graph):,} nodes, {job.graph.edge_count:,} edges; peak memory {peak:,.0f} MiB (limit 2,048); "
        f"load average {os.getloadavg()[0]:.1f} when it ended, limits are checked on CPU seconds.\n"
    )
    body += (
        "The sweep over sampled ranks works on one representative rank, so its cost does not grow with the cluster.\n"
    )
    sys.stdout.write(
        write_result("extrapolate", "Cost of stretching a trace of a million events", body, "numpy", "numba")
    )


if __name__ == "__main__":
    main()
