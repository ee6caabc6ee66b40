"""Times the joining of many ranks into one job: groups, matching, clocks, waits, over the size and the rung.

    python -P -m benchmarks.job [ranks] [events a rank]

The traces are made in memory (a tensor-parallel and a data-parallel group a rank, kernels with host records, five
steps, clocks off by milliseconds, windows that begin elsewhere; or a gloo job with sidecars), so the figures hold no reading of files. CPU seconds of one process.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.parse.events import Arg, Events, Flows, Lane
from scaletrace.parse.health import Health
from scaletrace.parse.job import RankTrace, Step
from scaletrace.parse.load import assemble

LIMIT_S = 5.0
_EVERY = 17
_STEPS = 5
_TP = 8
_STRINGS = (
    "aten::mm",
    "cudaLaunchKernel",
    "gemm_kernel",
    "record_param_comms",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "allreduce",
    "_reduce_scatter_base",
    "tp",
    "dp",
    "BFloat16",
    *(f"ProfilerStep#{k}" for k in range(_STEPS)),
)


def rank_trace(rank: int, ranks: int, events: int, rung: str, seed: int = 0) -> RankTrace:
    """One rank with about `events` events; `rung` is "seq", "order" (no Seq) or "names" (no metadata at all)."""
    rng = np.random.default_rng(seed)
    kernels = events // 3
    talks = np.arange(kernels) % _EVERY == _EVERY - 1
    turn = np.cumsum(talks) - 1
    over_tp = turn % 4 != 3
    sizes = 1 << (10 + turn % 7)
    launch = np.cumsum(rng.integers(20_000, 40_000, kernels)) + 1_800_000_000_000_000_000 + rank % 5 * 1_000_000
    job_begin = int(launch[0])
    begin = launch + 10_000 + np.where(talks, np.random.default_rng([seed, rank]).integers(0, 3_000, kernels), 0)
    end = launch + 10_000 + np.where(talks, 8_000, 5_000)
    # every rank's window begins elsewhere; correlations keep counting from the job's start, so truth is known
    first_kept = rank % 5 * 40
    number = np.arange(kernels)[first_kept:]
    kernels = len(number)
    talks, turn, over_tp, sizes, launch, begin, end = (
        column[first_kept:] for column in (talks, turn, over_tp, sizes, launch, begin, end)
    )
    op = np.where(talks, 3, 0)
    kernel = np.where(talks, np.where(over_tp, 4, 5), 2)
    step_at = np.linspace(job_begin - 5_000, launch[-1] + 60_000, _STEPS + 1).astype(np.int64)
    name = np.concatenate([op, np.full(kernels, 1), kernel, np.arange(_STEPS) + 11])
    cat = np.concatenate([np.zeros(kernels), np.ones(kernels), np.full(kernels, 2), np.full(_STEPS, 3)])
    start = np.concatenate([launch - 3_000, launch, begin, step_at[:-1]])
    dur = np.concatenate([np.full(kernels, 9_000), np.full(kernels, 2_000), end - begin, np.diff(step_at)])
    correlation = np.concatenate([np.full(kernels, -1), number, number, np.full(_STEPS, -1)])
    stream = np.concatenate([np.full(2 * kernels, -1), np.where(talks, 20 + over_tp, 7), np.full(_STEPS, -1)])
    lane = np.where(stream == 7, 1, np.where(stream == 20, 2, np.where(stream == 21, 3, 0)))
    order = np.lexsort((-dur, start))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows = np.sort(place[np.flatnonzero(talks)]).astype(np.int32)
    tp = np.where(over_tp[talks], 8, 9).astype(np.int32)
    args = {
        "Collective name": Arg(rows, np.where(over_tp[talks], 6, 7).astype(np.int32), True),
        "Process Group Name": Arg(rows, tp, True),
        "dtype": Arg(rows, np.full(len(rows), 10, np.int32), True),
        "In msg nelems": Arg(rows, sizes[talks]),
        "Out msg nelems": Arg(rows, sizes[talks]),
        "Seq": Arg(rows, turn[talks].astype(np.int64)),
    }
    if rung != "seq":
        del args["Seq"]
    lanes = (Lane(1, 1, "python"), Lane(0, 7), Lane(0, 20), Lane(0, 21))
    columns = (np.full(len(order), ord("X"), np.uint8), cat[order].astype(np.int32), name[order].astype(np.int32))
    table_ = Events(
        *columns,
        lane[order].astype(np.int32),
        start[order],
        dur[order],
        correlation[order],
        np.full(len(order), -1, np.int64),
        stream[order],
        np.zeros(len(order), np.int64),
        _STRINGS,
        ("cpu_op", "cuda_runtime", "kernel", "user_annotation"),
        lanes,
        {} if rung == "names" else args,
        Flows.empty(),
    )
    first = rank // _TP * _TP
    groups = [
        {"pg_name": "tp", "pg_desc": "mesh_tp", "pg_size": _TP, "ranks": list(range(first, first + _TP))},
        {"pg_name": "dp", "pg_desc": "mesh_dp", "pg_size": ranks // _TP, "ranks": list(range(rank % _TP, ranks, _TP))},
    ]
    info = {"rank": rank, "world_size": ranks, "backend": "nccl", "pg_config": [] if rung == "names" else groups}
    steps = tuple(Step(k, int(step_at[k]), int(step_at[k + 1])) for k in range(_STEPS))
    return RankTrace(rank, ranks, table_, f"rank{rank}", {"distributedInfo": info}, steps=steps)


def gloo_trace(rank: int, ranks: int, events: int) -> RankTrace:
    """One rank of a job on gloo: every 200th event a c10d call, a span that serves it, and a flight-recorder entry."""
    calls, filler = events // 200, 198
    at = 1_800_000_000_000_000_000 + np.arange(calls) * 2_000_000
    rest = (at[:, None] + 100_000 + np.arange(filler) * 9_000).ravel()
    start = np.concatenate([at, at + 3_000 + rank * 100, rest])
    dur = np.concatenate([np.full(calls, 5_000), np.full(calls, 60_000), np.full(len(rest), 5_000)])
    name = np.concatenate([np.zeros(calls), np.ones(calls), np.full(len(rest), 2)]).astype(np.int32)
    lane = np.concatenate([np.zeros(calls), 1 + np.arange(calls) % 2, np.zeros(len(rest))]).astype(np.int32)
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    strings = ("c10d::allreduce_", "gloo:all_reduce", "aten::mm", *(f"[[[{64 << k}]]]" for k in range(7)))
    spans = tuple(f"[[{64 << k}]]" for k in range(7))
    rows = np.concatenate([place[:calls], place[calls : 2 * calls]])
    dims = np.concatenate([3 + np.arange(calls) % 7, 10 + np.arange(calls) % 7]).astype(np.int32)
    by_row = np.argsort(rows, kind="stable")
    n, none = len(order), np.full(len(order), -1, np.int64)
    table_ = Events(
        np.full(n, ord("X"), np.uint8),
        np.zeros(n, np.int32),
        name[order],
        lane[order],
        start[order],
        dur[order],
        np.where(name[order] == 0, np.cumsum(name[order] == 0), none),
        none,
        none,
        none,
        (*strings, *spans),
        ("cpu_op",),
        (Lane(1, 1, "python3"), Lane(1, 2, "pt_gloo_runloop"), Lane(1, 3, "pt_gloo_runloop")),
        {"Input Dims": Arg(rows[by_row].astype(np.int32), dims[by_row], True)},
        Flows.empty(),
    )
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": k + 1,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": int(at[k]) + 1_000,
            "input_dtypes": ["Float"],
        }
        for k in range(calls)
    ]
    everyone = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": ranks, "ranks": list(range(ranks))}]
    info = {"rank": rank, "world_size": ranks, "backend": "gloo", "pg_config": everyone}
    return RankTrace(rank, ranks, table_, f"rank{rank}", {"distributedInfo": info}, sidecar={"entries": entries})


def measure(ranks: int, events: int, rung: str) -> tuple[float, int, int, int, int]:
    """(CPU seconds, events, members, members without all partners, members in a wrong instance) of joining one job."""
    make = (
        (lambda r: gloo_trace(r, ranks, events)) if rung == "gloo" else (lambda r: rank_trace(r, ranks, events, rung))
    )
    traces = [make(rank) for rank in range(ranks)]
    begin = time.process_time()
    job = assemble([replace(trace, health=Health()) for trace in traces], Health())
    spent = time.process_time() - begin
    c = job.collectives
    truth = np.empty(len(c), np.int64)
    for trace in job.ranks:
        mine = c.rank == trace.rank
        truth[mine] = trace.events.correlation[(c.host_event if rung == "gloo" else c.event)[mine]]
    wrong = int(np.sum(truth != truth[np.searchsorted(c.instance, c.instance)]))
    return spent, sum(len(trace.events) for trace in traces), len(c), c.unmatched, wrong


def main() -> None:
    """Print and write the table."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    events = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    measure(16, 3_000, "order")  # compiled code is loaded before anything is timed
    rows = []
    for rung in ("seq", "order", "names", "gloo"):
        for count in (events // 4, events // 2, events):
            spent, total, members, unmatched, wrong = measure(ranks, count, rung)
            rate = f"{spent / total * 1e6:.2f}"
            rows.append([rung, ranks, f"{count:,}", f"{members:,}", unmatched, wrong, f"{spent:.2f}", rate])
    columns = ("rung", "ranks", "events a rank", "members", "unmatched", "wrong", "CPU s", "us an event")
    kept = f"Limit: {LIMIT_S:g} s for 64 ranks of 100,000 events on 2 cores; this process used one of {os.cpu_count()}."
    body = f"{table(columns, rows)}\n\n{kept}"
    sys.stdout.write(write_result("job", "Joining the ranks of a job", body, "numpy", "numba"))


if __name__ == "__main__":
    main()
