"""Structure: what a rewrite communicates equals what PyTorch issues at the target layout in a world of fake ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.rewrite.loom import reopen
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, GraphCollective, NodeKind
from scaletrace.parse.job import Job
from scaletrace.parse.load import load

ROOT = Path(__file__).resolve().parents[2]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
Structure = dict[tuple[int, int], list[tuple[str, int, int]]]
"""(group size, stride) → (kind, bytes in, bytes out) in order of issue."""
Recorder = Callable[..., Job]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record(world, *arguments of the job) → the job as one fake rank records it; each is recorded once."""
    folder = tmp_path_factory.mktemp("fake")
    done: dict[tuple[int, tuple[str, ...]], Job] = {}

    def run(world: int, *arguments: str) -> Job:
        if (world, arguments) not in done:
            target = folder / f"{world}_{len(done)}"
            command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(target), "--steps", "1",
                       "--fake-world", str(world), "--", sys.executable, "-P", str(ROOT / "traces/jobs/transformer.py"),
                       "--steps", "7", "--layers", "3", *arguments]  # fmt: skip
            outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
            assert outcome.returncode == 0, outcome.stderr
            done[world, arguments] = load(target)
        return done[world, arguments]

    return run


def entries(job: Job) -> list[dict[str, object]]:
    """What the recorded rank issued in its first step, in order."""
    sidecar = job.ranks[0].sidecar
    assert sidecar is not None
    step = job.ranks[0].steps[0]
    return [e for e in sidecar["entries"] if step.start_ns <= e["time_created_ns"] < step.end_ns]


def payload(sizes: list[list[int]], dtypes: list[str]) -> int:
    """Bytes of the tensors of one side."""
    return sum(int(np.prod(size)) * BYTES[dtype] for size, dtype in zip(sizes, dtypes, strict=True))


def issued(job: Job) -> Structure:
    """The structure of a recording."""
    shape = {group.name: (group.size, group.stride) for group in job.groups}
    out: Structure = {}
    for e in entries(job):
        kind = str(e["profiling_name"]).removeprefix("fake:")
        sides = payload(e["input_sizes"], e["input_dtypes"]), payload(e["output_sizes"], e["output_dtypes"])
        out.setdefault(shape[e["process_group"][0]], []).append((kind, *sides))
    return {key: value for key, value in out.items() if key[0] > 1}


def structure(state: State) -> Structure:
    """The structure of a rewritten graph's rank, by the nodes that issue its collectives."""
    graph = state.graph
    out: Structure = {}
    arrive = np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.instance >= 0))
    issuer = [int(graph.pred[graph.pred_ptr[node]]) if graph.pred_ptr[node + 1] > graph.pred_ptr[node] else node
              for node in arrive.tolist()]  # fmt: skip
    for node in arrive[np.argsort(issuer, kind="stable")].tolist():
        item = graph.collectives[int(graph.instance[node])]
        group = graph.groups[item.group]
        out.setdefault((group.size, group.stride), []).append((item.kind, item.bytes_in, item.bytes_out))
    return {key: value for key, value in out.items() if key[0] > 1}


def graph_of(job: Job, axis_of: dict[str, str]) -> Built:
    """The recording's graph with the collectives of its sidecar; `axis_of` names the axes of groups by description."""
    built = build(job)
    loom = reopen(built.graph, built.graph.dur_ns.astype(float))
    names = [group.name for group in job.groups]
    for index, group in enumerate(loom.groups):
        loom.groups[index] = replace(group, axis=axis_of.get(group.description, group.axis))
    host = np.flatnonzero(built.graph.kind == int(NodeKind.HOST))
    for e in entries(job):
        at = int(host[np.searchsorted(built.measured.start_ns[host], e["time_created_ns"], side="right") - 1])
        sides = payload(e["input_sizes"], e["input_dtypes"]), payload(e["output_sizes"], e["output_dtypes"])
        kind = str(e["profiling_name"]).removeprefix("fake:")
        loom.collectives.append(GraphCollective(kind, names.index(e["process_group"][0]), *sides))
        columns = {"rank": 0, "lane": loom.lane(0, "fake", True), "instance": len(loom.collectives) - 1, "key": at,
                   "name": loom.name(kind), "step": int(built.graph.step[at])}  # fmt: skip
        arrive = loom.node(NodeKind.ARRIVE, **columns)
        loom.edge(at, arrive, EdgeKind.HAND_OVER)
        loom.edge(arrive, loom.node(NodeKind.TRANSFER, dur_ns=1000, **columns), EdgeKind.STREAM)
    woven = loom.finish()
    start = np.where(woven.origin >= 0, built.measured.start_ns[woven.origin], 0)
    measured = replace(built.measured, start_ns=start, end_ns=start, known=woven.origin >= 0)
    return replace(built, graph=woven.graph, measured=measured)


def state_of(job: Job, layout: Layout, **axes: str) -> State:
    """The recording ready to be rewritten, on a cluster of H100s."""
    named = {"default_pg": "dp", "mesh_dp_shard": "fsdp", "mesh_dp_replicate": "dp", "mesh_tp": "tp", **axes}
    return open_state(graph_of(job, named), layout, Network(Cluster.load("dgx_h100")), Ceilings(1e12, 1e12))


def stretched(state: State, new: Layout) -> State:
    """The data axes of `new`, with exact padding from the units' weights."""
    units = [[weight.dims for weight in unit] for unit in state.work.weights]
    old = replace(state.layout, mbs=0, microbatches=0, seq=0)
    return replace(state, graph=resize(state.graph, old, new, units))


@pytest.mark.slow
@pytest.mark.parametrize("world", [64, 1024])
def test_fsdp_at_any_size_is_what_pytorch_issues(record: Recorder, world: int) -> None:
    """From 8 ranks: the same gathers and scatters over the larger group, with FSDP2's padding to the byte."""
    state = state_of(record(8, "--strategy", "fsdp2"), Layout(fsdp=8), default_pg="fsdp")

    assert issued(record(8, "--strategy", "fsdp2")) == structure(state)
    assert issued(record(world, "--strategy", "fsdp2")) == structure(stretched(state, Layout(fsdp=world)))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "world"), [(2, 8), (4, 64), (2, 1024)])
def test_tensor_parallelism_inserted_into_fsdp_is_what_pytorch_issues(record: Recorder, tp: int, world: int) -> None:
    """From FSDP over 8 ranks: groups, counts, bytes and order of the tensor and the sharded axis."""
    state = state_of(record(8, "--strategy", "fsdp2"), Layout(fsdp=8), default_pg="fsdp")
    split = tensor(state, tp)
    made = stretched(split, Layout(fsdp=world // tp, tp=tp))

    assert issued(record(world, "--strategy", "tp", "--tp-size", str(tp))) == structure(made)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "world"), [(4, 8), (8, 64)])
def test_another_tensor_degree_is_what_pytorch_issues(record: Recorder, tp: int, world: int) -> None:
    """From TP2 with FSDP: another degree of both."""
    state = state_of(record(8, "--strategy", "tp", "--tp-size", "2", "--width", "256"), Layout(fsdp=4, tp=2))
    made = stretched(tensor(state, tp), Layout(fsdp=world // tp, tp=tp))

    assert issued(record(world, "--strategy", "tp", "--tp-size", str(tp), "--width", "256")) == structure(made)


@pytest.mark.slow
def test_removed_tensor_parallelism_is_plain_fsdp(record: Recorder) -> None:
    """From TP2 with FSDP 4 to FSDP alone: no tensor collective is left, and the gathers have the whole weights."""
    state = state_of(record(8, "--strategy", "tp", "--tp-size", "2"), Layout(fsdp=4, tp=2))
    made = stretched(tensor(state, 1), Layout(fsdp=64))

    assert issued(record(64, "--strategy", "fsdp2")) == structure(made)
