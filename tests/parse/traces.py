"""Small Kineto traces by hand for the tests of the graph builder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrace.parse.build import BuildOptions, Built, build
from scaletrace.parse.job import Job
from scaletrace.parse.load import load

Event = dict[str, Any]


def call(name: str, ts: float, dur: float, corr: int = 0, tid: int = 100, cat: str = "cuda_runtime") -> Event:
    """A runtime call of a host thread."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": corr},
    }


def op(name: str, ts: float, dur: float, tid: int = 100, cat: str = "cpu_op", **args: Any) -> Event:
    """An operator or annotation of a host thread."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, corr: int = 0, stream: int = 7, cat: str = "kernel", **args: Any) -> Event:
    """A device record."""
    where = {"device": 0, "stream": stream, "correlation": corr}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": where | args}


def write(folder: Path, ranks: Sequence[Sequence[Event]], info: Mapping[str, Any] | None = None) -> Path:
    """One file a rank, as torch.profiler writes them."""
    for rank, events in enumerate(ranks):
        header = {"backend": "nccl", "rank": rank, "world_size": len(ranks)} | dict(info or {})
        document = {
            "schemaVersion": 1,
            "host_name": "node1",
            "distributedInfo": header,
            "baseTimeNanoseconds": 0,
            "traceEvents": list(events),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder


def job_of(folder: Path, *ranks: Sequence[Event]) -> Job:
    """The job of these events."""
    return load(write(folder, ranks))


def built_of(folder: Path, *ranks: Sequence[Event], options: BuildOptions | None = None) -> Built:
    """The graph of these events."""
    return build(job_of(folder, *ranks), options)


def named(built: Built, name: str) -> list[int]:
    """Nodes with this name, in order."""
    return [node for node in range(len(built.graph)) if built.graph.name_of(node) == name]


def edges(built: Built) -> set[tuple[str, str]]:
    """(name, name) of every edge."""
    graph = built.graph
    return {(graph.name_of(int(a)), graph.name_of(int(b))) for a, b in zip(graph.pred, graph.edge_dst, strict=True)}
