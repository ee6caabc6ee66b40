"""Tensor parallelism with sequence and vocabulary: what the rewrite issues is what PyTorch issues in a fake world."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.vocabulary import measured_vocabulary
from scaletrace.parse.build import build
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from tests.extrapolate.test_fake_world import state_of, structure

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
}
"""Calls of tensor parallelism; FSDP uses others."""
Recorder = Callable[..., Job]

TENSOR_JOB = '''
"""Trains a transformer: run as `job.py TP SEQUENCE_PARALLEL VOCABULARY LAYERS`."""
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module)
from contextlib import nullcontext

tp, sp, vocab, layers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
WIDTH, HEADS, VOCABULARY, BATCH, SEQ = 256, 8, 512, 2, 64

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    def forward(self, x):
        q, k, v = (f(x).view(BATCH, SEQ, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(BATCH, SEQ, -1))

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_m = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
    def forward(self, x):
        x = x + self.attention(self.norm_a(x))
        return x + self.mlp(self.norm_m(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    def forward(self, x):
        x = self.embedding(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = Model()
loss_split = nullcontext
if tp > 1:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    t = mesh["tp"]
    seq = Shard(1) if sp else Replicate()
    plan = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=seq), "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=seq)}
    plan |= {"attention": PrepareModuleInput(input_layouts=seq, desired_input_layouts=Replicate()),
             "mlp": PrepareModuleInput(input_layouts=seq, desired_input_layouts=Replicate())}
    if sp:
        plan |= {"norm_a": SequenceParallel(), "norm_m": SequenceParallel()}
    for b in model.blocks:
        parallelize_module(b, t, plan)
    if vocab != "whole":
        ends = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=seq),
                "head": ColwiseParallel(input_layouts=seq, output_layouts=Shard(-1) if vocab == "loss" else Replicate(),
                                        use_local_output=vocab != "loss")}
        if sp:
            ends["norm"] = SequenceParallel()
        parallelize_module(model, t, ends)
        if vocab == "loss":
            loss_split = loss_parallel
    if world > tp:
        for unit in (model.embedding, *model.blocks, model.norm, model.head):
            fully_shard(unit, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
else:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    if world > 1:
        for unit in (model.embedding, *model.blocks, model.norm, model.head):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
for _ in range(7):
    with loss_split():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
'''


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """record(world, tp, sp, vocab) → the job as rank 0 of a fake world records it; each is recorded once."""
    folder = tmp_path_factory.mktemp("tensor")
    script = folder / "job.py"
    script.write_text(TENSOR_JOB)

    def run(world: int, tp: int, sp: int, vocab: str) -> Job:
        target = folder / f"{world}_{tp}_{sp}_{vocab}"
        if not target.exists():
            command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(target), "--steps", "1",
                       "--fake-world", str(world), "--", sys.executable, str(script), str(tp), str(sp), vocab, "2"]  # fmt: skip
            outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
            assert outcome.returncode == 0, outcome.stderr
        return load(target)

    return run


def issued(job: Job) -> list[tuple[str, int]]:
    """(kind, bytes of the whole vector) of the tensor group, in order."""
    import json
    from math import prod

    events = job.ranks[0].events
    out = []
    for row in range(len(events)):
        kind = KINDS.get(events.name_of(row))
        if kind:
            sides = [entry for entry in json.loads(events.text("Input Dims", row) or "[]") if entry]
            out.append((kind, 4 * max(prod(tensor) for side in sides for tensor in side)))
    return out


def made(state: State, tp: int) -> list[tuple[str, int]]:
    """The same of a rewritten graph."""
    found = structure(state).get((tp, 1), [])
    return [(kind, max(inside, out)) for kind, inside, out in found]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp"), [(8, 4), (64, 8), (1024, 8)])
@pytest.mark.parametrize("sp", [0, 1])
@pytest.mark.parametrize("vocab", ["gathered", "loss"])
def test_a_split_vocabulary_issues_what_pytorch_does(
    record: Recorder, world: int, tp: int, sp: int, vocab: str
) -> None:
    """From FSDP on 8 ranks: embedding, layers, norms, head and loss of the target, call for call."""
    base = state_of(record(8, 1, 0, "whole"), Layout(fsdp=8), mesh_dp_shard="fsdp", default_pg="fsdp")
    target = Layout(fsdp=world // tp, tp=tp, sp=bool(sp), vocab=vocab)

    assert issued(record(world, tp, sp, vocab)) == made(relayout(base, target), tp)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [0, 1])
@pytest.mark.parametrize(("target_sp", "target_vocab"), [(0, "gathered"), (1, "gathered"), (0, "loss"), (1, "loss")])
def test_a_recorded_split_is_recognised_and_changed(
    record: Recorder, sp: int, target_sp: int, target_vocab: str
) -> None:
    """From two tensor ranks with gathered logits to four with any split: what PyTorch issues there."""
    job = record(8, 2, sp, "gathered")
    base = state_of(job, Layout(fsdp=4, tp=2, sp=bool(sp)))
    target = Layout(fsdp=2, tp=4, sp=bool(target_sp), vocab=target_vocab)
    found = relayout(base, target)

    assert issued(job) == made(base, 2)
    assert "gathered" == measured_vocabulary(base)
    assert issued(record(8, 4, target_sp, target_vocab)) == made(found, 4)
    assert any("split of embedding and head (gathered)" in guess for guess in found.health.guessed)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("vocab", ["whole", "gathered", "loss"])
def test_an_inserted_split_is_recognised_and_lies_in_its_units(record: Recorder, sp: bool, vocab: str) -> None:
    """What the rewrite inserts tells the split again, and every tensor collective belongs to a unit's pass."""
    base = state_of(record(8, 1, 0, "whole"), Layout(fsdp=8), mesh_dp_shard="fsdp", default_pg="fsdp")
    found = relayout(base, Layout(fsdp=4, tp=2, sp=sp, vocab=vocab))
    graph, anatomy = found.graph, found.anatomy
    own = np.array([graph.groups[item.group].axis == "tp" for item in graph.collectives] + [False])[graph.instance]

    assert ("" if vocab == "whole" else vocab) == measured_vocabulary(found)
    assert (anatomy.unit[own] >= 0).all()
    assert np.isin(anatomy.phase[own], [int(Phase.FORWARD), int(Phase.BACKWARD)]).all()


@pytest.mark.slow
def test_a_loss_on_slices_of_megatron_is_recognised(shared_data: Path) -> None:
    """Three reductions behind the last layer are those of a loss on slices of the logits."""
    built = build(load(shared_data / "traces" / "megatron_tp2_v100"))
    network = Network(Cluster.load("dgx_h100"))

    assert "loss" == measured_vocabulary(open_state(built, Layout(tp=2), network, Ceilings(1e12, 1e12)))
