"""Trains one rank of a job of benchmarks/layouts.py: times its steps without a profiler, then records some.

Started there with the job's options, RANK, WORLD_SIZE and CORE; with BESIDE set it is part of a copy, which trains until
it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster.priority import ahead, urgent

WIDTH, LAYERS, EXPERTS, HEADS = 256, 8, 4, 4
WARM_UP, STEPS, RECORDED = 4, 20, 5
SWEEP_BYTES, SWEEPS = (4096, 16384, 65536, 262144, 1048576), 20


def train(step: Callable[[], None], out: Path) -> None:
    """Time steps without a profiler, then record some."""
    from scaletrace.collect import record

    for _ in range(WARM_UP):
        step()
    _settle()
    while "BESIDE" in os.environ:
        step()
    times = []
    waited_ns = -waited_for_a_core_ns()
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    waited_ns += waited_for_a_core_ns()
    dist.barrier()
    with record(str(out / "capture"), start_step=2, steps=RECORDED) as session:
        for _ in range(RECORDED + 3):
            step()
            session.step()
    rank = dist.get_rank()
    (out / f"steps_{rank}.json").write_text(json.dumps(times))
    (out / f"waited_{rank}.json").write_text(json.dumps(waited_ns * 1e-9 / STEPS))


def waited_for_a_core_ns() -> int:
    """How long the thread that trains was ready to run and no core was free."""
    return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1])


def sweep(out: Path) -> None:
    """Time all-reduces of some sizes between two hosts that do nothing else: what is known of the network beforehand."""
    urgent()
    dist.barrier()
    seconds: dict[int, list[float]] = {}
    for size in SWEEP_BYTES:
        tensor = torch.zeros(size // 4)
        for _ in range(SWEEPS):
            dist.barrier()
            time.sleep(0.005)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.setdefault(size, []).append(time.perf_counter() - began)
    (out / f"network_{dist.get_rank()}.json").write_text(json.dumps(seconds))


def _settle() -> None:
    """Keep to the core of this rank, before whatever else runs there."""
    ahead()
    os.sched_setaffinity(os.getpid(), {int(os.environ["CORE"])})
    dist.barrier()


class Delay(torch.autograd.Function):
    """Stands for a kernel: holds the rank for a time in proportion to its elements, twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ns: int) -> Tensor:
        ctx.seconds = x.numel() * ns * 1e-9
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0].clone(), None


class Layer(nn.Module):
    """Two matrices with a delay between them."""

    def __init__(self, ns: int, inner: int) -> None:
        super().__init__()
        self.ns = ns
        self.up = nn.Linear(WIDTH, inner * WIDTH, bias=False)
        self.down = nn.Linear(inner * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(Delay.apply(self.up(x), self.ns))
        return out


class Again(Layer):
    """A layer that is run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Experts(nn.Module):
    """A few experts, each with two matrices, over all ranks; every expert gets as many of a rank's tokens."""

    def __init__(self, ns: int, inner: int) -> None:
        super().__init__()
        self.ns = ns
        local = EXPERTS // dist.get_world_size()
        self.up = nn.Parameter(torch.randn(local, WIDTH, inner * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(local, inner * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        world, group = dist.get_world_size(), dist.group.WORLD
        split = [len(x) // world] * world
        arrived = functional.all_to_all_single_autograd(x, split, split, group)
        by_expert = arrived.view(world, len(self.up), -1, WIDTH).transpose(0, 1).reshape(len(self.up), -1, WIDTH)
        out = torch.bmm(Delay.apply(torch.bmm(by_expert, self.up), self.ns), self.down)
        out = out.view(len(self.up), world, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        back: Tensor = functional.all_to_all_single_autograd(out, split, split, group)
        return back


class Mixture(nn.Module):
    """A dense layer followed by experts."""

    def __init__(self, ns: int, inner: int) -> None:
        super().__init__()
        self.dense = Layer(ns, inner)
        self.experts = Experts(ns, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        out: Tensor = x + self.experts(x)
        return out


class Copied(torch.autograd.Function):
    """What every rank has a copy of; gradients are summed over the tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].contiguous()
        dist.all_reduce(out, group=ctx.group)
        return out, None


class Summed(torch.autograd.Function):
    """Parts of a sum that the tensor-parallel ranks hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def split_by_hand(block: Any, group: Any) -> None:
    """Tensor parallelism over the group as Megatron writes it: a slice of each matrix and one all-reduce a direction,
    without the wrappers of DTensor and the work for the CPU that they bring."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    for linear, dimension in ((block.up, 0), (block.down, 1)):
        mine = linear.weight.detach().chunk(degree, dimension)[rank].contiguous()
        linear.weight = nn.Parameter(mine)
    block.up.register_forward_pre_hook(lambda _, inputs: (Copied.apply(inputs[0], group),))
    block.down.register_forward_hook(lambda _, inputs, out: Summed.apply(out, group))


class RingAttention(torch.autograd.Function):
    """PyTorch's templated ring attention around the attention of the CPU, which its dispatcher leaves out."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _ring()._templated_ring_attention(group, 2, flash, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group = group
        kept: Tensor = out
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        found = _ring()._templated_ring_attention_backward(
            ctx.group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
            grad_out=grads[0].contiguous(), grad_out_name="grad_out", query=query, key=key, value=value, out=out,
            logsumexp=lse, is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return *found[:3], None


def _ring() -> Any:
    """The module that holds PyTorch's ring attention, wherever this version keeps it."""
    from torch.distributed.tensor.experimental import _attention

    return sys.modules[_attention._templated_ring_attention.__module__]


class Attending(nn.Module):
    """Attention over the tokens of all ranks, and a layer."""

    def __init__(self, ns: int, inner: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = Layer(ns, inner)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(1, len(x), 3, HEADS, WIDTH // HEADS).transpose(1, 3).unbind(2)
        mixed = RingAttention.apply(*parts, self.group)
        out: Tensor = self.feed(x + self.out(mixed.transpose(1, 2).reshape(len(x), WIDTH)))
        return out


def job(mode: str, tp: int, micro_batches: int, tokens: int, ns: int, inner: int, again: int) -> Callable[[], None]:
    """A function that trains one step of the job on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    block = {"ep": Mixture, "cp": Attending}.get(mode, Again if again else Layer)
    count = LAYERS // world if mode == "pp" else LAYERS
    model: Any = nn.Sequential(*[block(ns, inner) for _ in range(count)])
    x = torch.randn(tokens * micro_batches, WIDTH, requires_grad=True)
    if mode == "pp":
        return pipeline(model, rank, world, micro_batches, x)
    if mode == "cp":
        from torch.distributed.tensor.experimental import _attention

        _attention.set_rotate_method("allgather")
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        for part in model:
            part.group = mesh.get_group()
    if mode in ("tp", "fsdp_tp", "ddp") and world > 1:
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    if mode in ("megatron", "ddp") and tp > 1:
        group = mesh["tp"].get_group() if mode == "ddp" else dist.group.WORLD
        for part in model:
            split_by_hand(part, group)
    elif mode in ("tp", "fsdp_tp") and tp > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for part in model:
            parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mode == "fsdp_tp":
        from torch.distributed.fsdp import fully_shard

        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp_shard"])
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp_shard"].get_group())
    return accumulated(model, x, micro_batches)


def pipeline(model: nn.Module, rank: int, world: int, micro_batches: int, x: Tensor) -> Callable[[], None]:
    """One step of this rank's stage under 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        schedule.step(*((x,) if rank == 0 else ()), target=x if rank == world - 1 else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def accumulated(model: Any, x: Tensor, micro_batches: int) -> Callable[[], None]:
    """One step: all micro batches, gradients of data ranks reduced behind the last, and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    parts = x.detach().chunk(micro_batches)

    def step() -> None:
        for number, part in enumerate(parts, 1):
            model.require_backward_grad_sync = number == micro_batches
            model(part.requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def main() -> None:
    """One rank, from its arguments: where to write, and the options of the job."""
    out, mode, options = Path(sys.argv[1]), sys.argv[2], list(map(int, sys.argv[3:]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if mode == "net":
        sweep(out)
    else:
        train(job(mode, *options), out)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
