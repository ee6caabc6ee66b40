"""Trains a small causal transformer on random tokens under one parallel strategy, over gloo, as an ordinary user script.

It knows nothing of scaletrace: `torchrun --nproc-per-node 4 transformer.py --strategy fsdp2` runs it as it is.
Rank 0 prints the loss of every step (bit-identical from run to run), so a recorder that disturbs the job is noticed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

STRATEGIES = ("plain", "ddp", "ddp_compile", "fsdp2", "hsdp", "tp", "pp_1f1b", "pp_gpipe")
VOCABULARY = 256
HEAD_DIM = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model and of one rank's batch."""

    layers: int = 2
    width: int = 128
    sequence: int = 64
    batch: int = 4


class Block(nn.Module):
    """Pre-norm transformer block without biases, over rows of tokens (tokens, width).

    Query, key and value of one head lie side by side in `qkv`, so sharding its columns gives every rank whole heads.
    """

    def __init__(self, width: int, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(x).view(len(x) // self.sequence, self.sequence, -1, 3, HEAD_DIM).transpose(1, 2).unbind(3)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(len(x), -1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Transformer(nn.Module):
    """Token embedding, blocks, head; a pipeline stage keeps a slice of the blocks and drops what others own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.sequence) for _ in range(shape.layers))
        self.head: nn.Module | None = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x.flatten())
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits, target.flatten())


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over embedding, every block and head, on all axes of `mesh` (two axes make it HSDP)."""
    from torch.distributed.fsdp import fully_shard

    for unit in (model.embedding, *model.blocks, model.head):
        if unit is not None:
            fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallelism: columns of the first matrices, rows of the second ones, one all-reduce a half block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def parallelize(model: Transformer, strategy: str, tp_size: int) -> nn.Module:
    """`model` under the strategy, with the mesh axes named as torchtitan names them."""
    world = dist.get_world_size()
    if strategy in ("ddp", "ddp_compile"):
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        return torch.compile(wrapped) if strategy == "ddp_compile" else wrapped  # type: ignore[return-value]
    if strategy == "fsdp2":
        shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)))
    elif strategy == "hsdp":
        shard(model, init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    elif strategy == "tp":
        mesh = init_device_mesh("cpu", (world // tp_size, tp_size), mesh_dim_names=("dp_shard", "tp"))
        split_tensors(model, mesh["tp"])
        if world > tp_size:
            shard(model, mesh["dp_shard"])
    return model


def pipeline_step(
    model: Transformer, strategy: str, shape: Shape, microbatches: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Cut `model` into one stage a rank; the returned function runs one schedule and gives the last stage's loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    per_stage = -(-shape.layers // world)
    model.blocks = nn.ModuleList(list(model.blocks)[rank * per_stage : (rank + 1) * per_stage])
    if rank:
        model.embedding = None
    if rank < world - 1:
        model.head = None
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    kind = Schedule1F1B if strategy == "pp_1f1b" else ScheduleGPipe
    schedule = kind(stage, n_microbatches=microbatches, loss_fn=loss_of)

    def step(tokens: Tensor, target: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = rank == world - 1
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, target=target if last else None, losses=losses if last else None)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def train(options: argparse.Namespace, after_step: Callable[[], None] = lambda: None) -> None:
    """Train for `options.steps` steps; `after_step` is called after each, as a hand-written training loop would."""
    torch.manual_seed(0)
    shape = Shape(options.layers, options.width, options.sequence, options.batch)
    model = Transformer(shape)
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.strategy.startswith("pp_"):
        forward_backward = pipeline_step(model, options.strategy, shape, options.microbatches)
    else:
        network = parallelize(model, options.strategy, options.tp_size)

        def forward_backward(tokens: Tensor, target: Tensor) -> Tensor:
            loss = loss_of(network(tokens), target)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

    # a fused or foreach step takes no mix of sharded and plain parameters, which tensor parallelism alone leaves
    fused = options.strategy != "tp"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=None if fused else False)
    seed = 0 if options.strategy.startswith(("tp", "pp_")) else rank
    source = torch.Generator().manual_seed(seed)
    for number in range(options.steps):
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.sequence + 1), generator=source)
        if rank == world - 1 and options.delay_ms:
            time.sleep(options.delay_ms / 1e3)
        loss = forward_backward(tokens[:, :-1], tokens[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if rank == (world - 1 if options.strategy.startswith("pp_") else 0):
            print(f"step {number} loss {loss.item():.9f}", flush=True)
        after_step()


def parser() -> argparse.ArgumentParser:
    """The options of the script."""
    options = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    options.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--sequence", type=int, default=64)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--tp-size", type=int, default=2)
    options.add_argument("--delay-ms", type=float, default=0.0, help="sleep on the last rank before each forward pass")
    return options


def main() -> None:
    """Join the job that the launcher describes, train, leave."""
    options = parser().parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.barrier()  # gloo's threads let go of the last tensors before the interpreter ends (pytorch issue 190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
