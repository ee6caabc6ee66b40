"""Small jobs by hand for the tests of matching: events as Kineto writes them, one file a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrace.parse.job import KINDS, Job
from scaletrace.parse.load import load

Event = dict[str, Any]
BASE_NS = 1_790_857_026_000_000_000


def host(name: str, ts: float, dur: float, tid: int = 100, cat: str = "cpu_op", **args: Any) -> Event:
    """An operator or annotation on a thread."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float) -> Event:
    """A ProfilerStep range."""
    return host(f"ProfilerStep#{number}", ts, dur, cat="user_annotation")


def record(kind: str, ts: float, dur: float = 5, elements: int | tuple[int, int] = 256, **more: Any) -> Event:
    """A record_param_comms of Float elements in group "0" of ranks 0 and 1, unless `more` says otherwise."""
    n_in, n_out = elements if isinstance(elements, tuple) else (elements, elements)
    args: dict[str, Any] = {
        "Collective name": kind,
        "In msg nelems": n_in,
        "Out msg nelems": n_out,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
    }
    return host("record_param_comms", ts, dur, **{**args, **more})


def launch(ts: float, correlation: int, dur: float = 2) -> Event:
    """The runtime call that launches a kernel."""
    return host("cudaLaunchKernelExC", ts, dur, cat="cuda_runtime", correlation=correlation)


def kernel(name: str, ts: float, dur: float, correlation: int = -1, stream: int = 20) -> Event:
    """A kernel on a stream."""
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def nccl(kind: str, at: float, start: float, end: float, correlation: int, **more: Any) -> list[Event]:
    """A record with its launch inside (at `at`) and its kernel."""
    name = f"ncclDevKernel_{kind}"
    return [record(kind, at, 5, **more), launch(at + 1, correlation), kernel(name, start, end - start, correlation)]


def write(
    folder: Path,
    ranks: Mapping[int, Sequence[Event]],
    world: int | None = None,
    backend: str = "nccl",
    groups: Sequence[tuple[str, str, Sequence[int]]] | None = None,
    hosts: Mapping[int, str] | None = None,
    entries: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write the files of a job; `groups` (name, description, members) default to one of all ranks."""
    size = world or len(ranks)
    told = groups if groups is not None else [("0", "default_pg", range(size))]
    folder.mkdir(parents=True, exist_ok=True)
    for rank, events in ranks.items():
        config = [
            {"pg_name": name, "pg_desc": text, "pg_size": len(members), "ranks": list(members)}
            for name, text, members in told
            if rank in members
        ]
        header = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": backend, "rank": rank, "world_size": size, "pg_config": config},
            "host_name": (hosts or {}).get(rank, "one"),
            "baseTimeNanoseconds": BASE_NS,
        }
        (folder / f"rank{rank}.json").write_text(json.dumps({**header, "traceEvents": list(events)}))
        if entries is not None and rank in entries:
            dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": list(entries[rank])}
            (folder / f"fr_rank{rank}.json").write_text(json.dumps(dump))
    return folder


def loaded(folder: Path, ranks: Mapping[int, Sequence[Event]], **more: Any) -> Job:
    """The job of these events."""
    return load(write(folder, ranks, **more))


def instances(job: Job) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, ranks) of each instance in order."""
    c = job.collectives
    found: dict[int, list[int]] = {}
    for i in range(len(c)):
        found.setdefault(int(c.instance[i]), []).append(i)
    return [(KINDS[c.kind[rows[0]]], tuple(int(c.rank[row]) for row in rows)) for rows in found.values()]
