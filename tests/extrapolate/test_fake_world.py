"""Structure: what a rewrite communicates equals what PyTorch issues at the target layout in a world of fake ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
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
from scaletrace.extrapolate.rewrite.replicas import replicate
from scaletrace.extrapolate.rewrite.stages import pipeline
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


PIPELINE_JOB = '''
"""One rank of a pipeline: run as `job.py SCHEDULE RANKS CHUNKS MICRO_BATCHES LAYERS`."""
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from transformer import Shape, Transformer, loss_of
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class, PipelineScheduleSingle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# Stages vote on whether shapes are known; here they are, and no neighbour can say so.
PipelineStage._warmup_forward_vote = PipelineStage._warmup_backward_result = (
    lambda *_, **__: torch.ones(1, dtype=torch.int32)
)
name, ranks, chunks, m, layers = sys.argv[2], *map(int, sys.argv[3:])
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks, world // ranks), mesh_dim_names=("pp", "dp_shard"))
pp, home, stages = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), ranks * chunks
shape = Shape(layers=layers, batch=m)
v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
mine = [home, 2 * ranks - 1 - home] if v_shaped else list(range(home, stages, ranks))
torch.manual_seed(0)

def stage(index):
    model = Transformer(shape)
    each = layers // stages
    model.blocks = torch.nn.ModuleList(list(model.blocks)[index * each : (index + 1) * each])
    if index:
        model.embedding = None
    if index < stages - 1:
        model.head = None
    hidden = torch.zeros(shape.sequence, shape.width, requires_grad=True)
    tokens = torch.zeros(1, shape.sequence, dtype=torch.int64)
    out = torch.zeros(shape.sequence, 256, requires_grad=True) if index == stages - 1 else hidden
    if world > ranks:
        for unit in (model.embedding, *model.blocks, model.head):
            if unit is not None:
                fully_shard(unit, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    given = tokens if index == 0 else hidden
    return PipelineStage(model, index, stages, torch.device("cpu"), input_args=(given,), output_args=(out,), group=pp)

parts = [stage(index) for index in mine]
kind = get_schedule_class(name)
single = issubclass(kind, PipelineScheduleSingle)
schedule = kind(parts[0] if single else parts, n_microbatches=m, loss_fn=loss_of, scale_grads=False)
optimizer = torch.optim.AdamW([p for part in parts for p in part.submod.parameters()])
tokens = torch.zeros(m, shape.sequence, dtype=torch.int64)
first, last = 0 in mine, stages - 1 in mine
for _ in range(7):
    schedule.step(*((tokens,) if first else ()), target=tokens if last else None, losses=[] if last else None)
    optimizer.step()
    optimizer.zero_grad()
'''


def variant(job: str, *changes: tuple[str, str]) -> str:
    """A job with some of its text changed."""
    for old, new in changes:
        assert old in job
        job = job.replace(old, new)
    return job


def stage_recorder(folder: Path, job: str) -> Recorder:
    """record(world, rank, *arguments of the job) → what that rank of a pipeline records; each is recorded once."""
    script = folder / "job.py"
    script.write_text(job)

    def run(world: int, rank: int, *arguments: object) -> Job:
        target = folder / "_".join(str(part) for part in (world, rank, *arguments))
        if not target.exists():
            recorded(target, world, script, ROOT / "traces/jobs", *arguments, rank=rank)
        return load(target)

    return run


def recorded(target: Path, world: int, script: Path, *arguments: object, rank: int = 0) -> Job:
    """What a rank of a fake world records of a job's last steps, left in a folder."""
    command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(target), "--steps", "1",
               "--fake-world", str(world), "--rank", str(rank), "--", sys.executable, "-P", str(script),
               *map(str, arguments)]  # fmt: skip
    outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert outcome.returncode == 0, outcome.stderr
    return load(target)


@pytest.fixture(scope="module")
def record_stage(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record_stage(world, rank, schedule, ranks, chunks, m, layers) → what that rank of a pipeline records."""
    return stage_recorder(tmp_path_factory.mktemp("stages"), PIPELINE_JOB)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record(world, *arguments of the job) → the job as one fake rank records it; each is recorded once."""
    folder = tmp_path_factory.mktemp("fake")
    done: dict[tuple[int, tuple[str, ...]], Job] = {}

    def run(world: int, *arguments: str) -> Job:
        if (world, arguments) not in done:
            sizes = "--steps", "7", "--layers", "3"
            script = ROOT / "traces/jobs/transformer.py"
            done[world, arguments] = recorded(folder / f"{world}_{len(done)}", world, script, *sizes, *arguments)
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
    start, end = (
        np.where(woven.origin >= 0, times[woven.origin], 0)
        for times in (built.measured.start_ns, built.measured.end_ns)
    )
    measured = replace(built.measured, start_ns=start, end_ns=end, known=woven.origin >= 0)
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


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64])
def test_hybrid_sharding_is_what_pytorch_issues(record: Recorder, world: int) -> None:
    """From FSDP over 8 ranks to replicas of two: gathers and scatters in pairs, reductions over the replicas."""
    state = state_of(record(8, "--strategy", "fsdp2"), Layout(fsdp=8), default_pg="fsdp")
    pairs = stretched(state, Layout(fsdp=2))
    pairs = replace(pairs, graph=replicate(pairs.graph), layout=Layout(fsdp=2))
    made = stretched(pairs, Layout(dp=world // 2, fsdp=2))

    assert issued(record(world, "--strategy", "hsdp")) == structure(made)


def messages(job: Job) -> Counter[tuple[str, int]]:
    """Sends and receives of the recorded rank's step, by bytes."""
    out: Counter[tuple[str, int]] = Counter()
    for e in entries(job):
        kind = str(e["profiling_name"]).removeprefix("fake:")
        if kind in ("send", "recv"):
            sizes = e["input_sizes"] or e["output_sizes"]
            out[kind, payload(sizes, e["input_dtypes"] or e["output_dtypes"])] += 1
    return out


def sent(state: State, home: int) -> Counter[tuple[str, int]]:
    """Sends and receives of one pipeline rank (column 0) of a rewritten graph."""
    graph, rank = state.graph, state.columns[0][home]
    out: Counter[tuple[str, int]] = Counter()
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == rank)).tolist():
        item, name = graph.collectives[int(graph.instance[node])], graph.name_of(node)
        if "SEND" in name or "RECV" in name:
            out["send" if "SEND" in name else "recv", item.bytes_in] += 1
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks", "home"),
    [("GPipe", 1, 1), ("1F1B", 1, 0), ("Interleaved1F1B", 2, 3), ("LoopedBFS", 2, 0), ("InterleavedZeroBubble", 2, 1),
     ("ZBVZeroBubble", 2, 2), ("DualPipeV", 2, 0)],
)  # fmt: skip
def test_messages_of_every_schedule_are_what_pytorch_issues(
    record_stage: Recorder, schedule: str, chunks: int, home: int
) -> None:
    """From one rank that runs all eight layers on eight micro batches to four ranks under each schedule."""
    whole = record_stage(1, 0, "1F1B", 1, 1, 8, 8)
    state = open_state(build(whole), Layout(), Network(Cluster.load("dgx_h100")), Ceilings(1e12, 1e12))
    made = pipeline(state, 4, schedule, chunks)

    assert messages(record_stage(4, home, schedule, 4, chunks, 8, 8)) == sent(made, home)


@pytest.mark.slow
@pytest.mark.parametrize("world", [64, 1024])
def test_a_pipeline_of_sharded_stages_sends_what_pytorch_sends(record_stage: Recorder, world: int) -> None:
    """Eight stages with FSDP over the rest: messages do not depend on the data ranks."""
    whole = record_stage(1, 0, "1F1B", 1, 1, 8, 8)
    state = open_state(build(whole), Layout(), Network(Cluster.load("dgx_h100")), Ceilings(1e12, 1e12))
    made = pipeline(state, 8, "1F1B")
    rank = 3 * (world // 8) + 1

    assert messages(record_stage(world, rank, "1F1B", 8, 1, 8, 8)) == sent(made, 3)
