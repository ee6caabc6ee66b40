"""Recorded pipelines of sharded stages: what other stages of them gather and scatter is what PyTorch's do in a fake world."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.loom import reopen
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.job import Job, RankTrace
from scaletrace.parse.load import load
from tests.extrapolate import test_fake_world as fake

Recorder = Callable[..., Job]
record, record_stage = fake.record, fake.record_stage
AXES = {"default_pg": "world", "mesh_dp_shard": "fsdp", "mesh_pp": "pp"}


def joined(folder: Path, jobs: Sequence[Job]) -> Job:
    """One job of ranks that were recorded one by one."""
    for job in jobs:
        for path in Path(job.source).glob("*rank*"):
            (folder / path.name).write_bytes(path.read_bytes())
    return load(folder)


def issued(trace: RankTrace) -> list[dict[str, Any]]:
    """What a rank issued in its first step."""
    assert trace.sidecar is not None
    step = trace.steps[0]
    return [e for e in trace.sidecar["entries"] if step.start_ns <= e["time_created_ns"] < step.end_ns]


def graph_of(job: Job) -> Built:
    """The graph of all ranks with the collectives of their sidecars, each behind the host call that issued it."""
    built = build(job)
    loom = reopen(built.graph, built.graph.dur_ns.astype(float))
    loom.groups, loom.collectives = [], []
    loom.columns["instance"][:] = -1
    host = built.graph.kind == int(NodeKind.HOST)
    for trace in job.ranks:
        mine = np.flatnonzero(host & (built.graph.rank == trace.rank))
        assert trace.sidecar is not None
        for e in issued(trace):
            ranks = json.loads(trace.sidecar["pg_config"][e["process_group"][0]]["ranks"])
            axis = AXES[e["process_group"][1]]
            group = GraphGroup(axis, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, 1, axis)
            if group not in loom.groups:
                loom.groups.append(group)
            kind = str(e["profiling_name"]).removeprefix("fake:")
            sides = [fake.payload(e[f"{side}_sizes"], e[f"{side}_dtypes"]) for side in ("input", "output")]
            loom.collectives.append(GraphCollective(kind, loom.groups.index(group), *sides))
            at = int(mine[np.searchsorted(built.measured.start_ns[mine], e["time_created_ns"], side="right") - 1])
            columns = {"rank": trace.rank, "lane": loom.lane(trace.rank, "fake", True), "name": loom.name(kind),
                       "instance": len(loom.collectives) - 1, "key": at, "step": int(built.graph.step[at])}  # fmt: skip
            arrive = loom.node(NodeKind.ARRIVE, **columns)
            loom.edge(at, arrive, EdgeKind.HAND_OVER)
            loom.edge(arrive, loom.node(NodeKind.TRANSFER, dur_ns=1000, **columns), EdgeKind.STREAM)
    woven = loom.finish()
    start, end = (
        np.where(woven.origin >= 0, times[woven.origin], 0)
        for times in (built.measured.start_ns, built.measured.end_ns)
    )
    measured = replace(built.measured, start_ns=start, end_ns=end, known=woven.origin >= 0)
    return replace(built, graph=woven.graph, measured=measured)


@pytest.fixture(scope="module")
def four_stages(record_stage: Recorder, tmp_path_factory: pytest.TempPathFactory) -> State:
    """Four stages of two layers under 1F1B with eight micro batches, each sharded over two ranks."""
    jobs = [record_stage(8, rank, "1F1B", 4, 1, 8, 8) for rank in (0, 2, 4, 6)]
    job = joined(tmp_path_factory.mktemp("joined"), jobs)
    layout = Layout(fsdp=2, pp=4, schedule="1F1B")
    return open_state(graph_of(job), layout, Network(Cluster.load("dgx_h100")), Ceilings(1e12, 1e12))


def shards(state: State, home: int) -> list[tuple[str, int, int, int]]:
    """Gathers and scatters of one pipeline rank (column 0) in order of issue: kind, size of the group, bytes."""
    graph, out = state.graph, []
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == state.columns[0][home])).tolist():
        item = graph.collectives[int(graph.instance[node])]
        if item.kind in ("all_gather", "reduce_scatter"):
            out.append((item.kind, graph.groups[item.group].size, item.bytes_in, item.bytes_out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "schedule", "chunks", "home"),
    [(8, 4, "1F1B", 1, 0), (8, 4, "GPipe", 1, 1), (8, 2, "1F1B", 1, 0), (8, 2, "GPipe", 1, 1), (64, 8, "1F1B", 1, 0),
     (64, 8, "GPipe", 1, 7), (8, 4, "LoopedBFS", 2, 2), (8, 4, "Interleaved1F1B", 2, 1), (1024, 8, "1F1B", 1, 3)],
)  # fmt: skip
def test_other_stages_gather_and_scatter_what_pytorch_does(
    record_stage: Recorder, four_stages: State, world: int, ranks: int, schedule: str, chunks: int, home: int
) -> None:
    """Each stage has those of its own layers: counts, bytes and order."""
    target = Layout(fsdp=world // ranks, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    recorded = record_stage(world, home * (world // ranks), schedule, ranks, chunks, 8, 8)

    assert expected_of(recorded) == shards(relayout(four_stages, target), home)


def expected_of(job: Job) -> list[tuple[Any, ...]]:
    """Gathers and scatters of a recorded rank, as `shards` gives them."""
    return [
        (kind, size, *sides)
        for (size, _), calls in fake.issued(job).items()
        for kind, *sides in calls
        if kind in ("all_gather", "reduce_scatter")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks", "home"),
    [("1F1B", 1, 0), ("1F1B", 1, 3), ("GPipe", 1, 1), ("LoopedBFS", 2, 2), ("Interleaved1F1B", 2, 1)],
)
def test_stages_of_a_sharded_job_scatter_in_the_order_of_pytorch(
    record: Recorder, record_stage: Recorder, schedule: str, chunks: int, home: int
) -> None:
    """From FSDP alone, whose backward pass scatters the last layer first, to stages, which scatter the first one first."""
    base = record(2, "--strategy", "fsdp2", "--layers", "8", "--batch", "1")
    state = fake.state_of(base, Layout(fsdp=2), default_pg="fsdp")
    target = Layout(fsdp=2, pp=4, microbatches=8, schedule=schedule, chunks=chunks)
    recorded = record_stage(8, 2 * home, schedule, 4, chunks, 8, 8)

    assert expected_of(recorded) == shards(relayout(state, target), home)
