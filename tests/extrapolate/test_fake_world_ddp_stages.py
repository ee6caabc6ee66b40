"""Pipelines of DDP modules: the buckets of each stage are those that PyTorch makes of its module in a fake world."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from tests.extrapolate import test_fake_world as fake

Recorder = Callable[..., Job]
JOB = '''
"""One rank of a pipeline of DDP modules: job.py JOBS SCHEDULE RANKS CHUNKS MICRO_BATCHES LAYERS WIDTH CAP_MB."""
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from transformer import Shape, Transformer, loss_of
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class, PipelineScheduleSingle
from torch.distributed.device_mesh import init_device_mesh

# Stages vote on whether shapes are known; here they are, and no neighbour can say so.
PipelineStage._warmup_forward_vote = PipelineStage._warmup_backward_result = (
    lambda *_, **__: torch.ones(1, dtype=torch.int32)
)
name, ranks, chunks, m, layers, width, cap = sys.argv[2], *map(int, sys.argv[3:])
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks, world // ranks), mesh_dim_names=("pp", "dp_replicate"))
pp, home, stages = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), ranks * chunks
shape = Shape(layers=layers, batch=m, width=width)
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
        model = torch.nn.parallel.DistributedDataParallel(
            model, process_group=mesh["dp_replicate"].get_group(), bucket_cap_mb=cap or None, gradient_as_bucket_view=True
        )
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


@pytest.fixture(scope="module")
def record_ddp(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record_ddp(world, rank, schedule, ranks, chunks, m, layers, width, cap) → what that rank records."""
    folder = tmp_path_factory.mktemp("ddp_stages")
    script = folder / "job.py"
    script.write_text(JOB)

    def run(world: int, rank: int, *arguments: object) -> Job:
        target = folder / "_".join(str(part) for part in (world, rank, *arguments))
        if not target.exists():
            command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(target), "--steps", "1",
                       "--fake-world", str(world), "--rank", str(rank), "--", sys.executable, str(script),
                       str(fake.ROOT / "traces/jobs"), *map(str, arguments)]  # fmt: skip
            outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
            assert outcome.returncode == 0, outcome.stderr
        return load(target)

    return run


def reduced(state: State, home: int) -> fake.Structure:
    """Collectives of one pipeline rank (column 0) of a rewritten graph in order of issue, without its messages."""
    graph, out = state.graph, {}
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == state.columns[0][home])).tolist():
        item = graph.collectives[int(graph.instance[node])]
        group = graph.groups[item.group]
        if group.axis != "pp":
            out.setdefault((group.size, group.stride), []).append((item.kind, item.bytes_in, item.bytes_out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "schedule", "chunks", "home", "cap"),
    [(8, 4, "1F1B", 1, 0, 0), (8, 4, "1F1B", 1, 1, 0), (8, 4, "1F1B", 1, 3, 0), (8, 4, "GPipe", 1, 3, 1),
     (8, 4, "1F1B", 1, 0, 1), (8, 2, "1F1B", 1, 1, 2), (8, 2, "Interleaved1F1B", 2, 1, 0), (8, 4, "LoopedBFS", 2, 0, 1),
     (64, 8, "1F1B", 1, 7, 0), (64, 4, "GPipe", 1, 2, 1), (1024, 8, "1F1B", 1, 0, 0), (1024, 4, "1F1B", 1, 3, 1)],
)  # fmt: skip
def test_buckets_of_stages_are_those_of_pytorch(
    record_ddp: Recorder, world: int, ranks: int, schedule: str, chunks: int, home: int, cap: int
) -> None:
    """From DDP over two ranks to DDP of each stage's module: groups, counts, bytes and order of all reductions."""
    base = record_ddp(2, 0, "1F1B", 1, 1, 8, 8, 128, cap)
    state = fake.state_of(base, Layout(dp=2), mesh_dp_replicate="dp")
    target = Layout(dp=world // ranks, pp=ranks, microbatches=8, schedule=schedule, chunks=chunks)
    recorded = fake.issued(record_ddp(world, home * (world // ranks), schedule, ranks, chunks, 8, 8, 128, cap))
    expected = {
        group: kept for group, calls in recorded.items() if (kept := [c for c in calls if c[0] not in ("send", "recv")])
    }

    assert expected == reduced(relayout(state, target), home)
