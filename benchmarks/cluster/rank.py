"""Turns one process into a rank of a small training job: times steps without a profiler, then records some.

A layer is a Linear and a delay that stands for a GPU kernel: it holds the rank for a fixed time without using the CPU,
so that eight ranks fit on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # this file runs as a script

from benchmarks.cluster.priority import urgent
from scaletrace.collect import record

WARM_UP, BATCH = 4, 16


class Delay(torch.autograd.Function):
    """Identity that takes `seconds` forward and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0].clone(), None


class Layer(nn.Module):
    """Linear, ReLU and a delay."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Delay.apply(self.linear(x).relu(), self.seconds)


def build(args: argparse.Namespace) -> nn.Module:
    """The model under the asked parallelism."""
    model = nn.Sequential(*[Layer(args.width, args.delay_ms / 1e3) for _ in range(args.depth)])
    if args.mode == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    world = dist.get_world_size()
    if args.mode == "hsdp":
        mesh = init_device_mesh("cpu", (world // args.shard, args.shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Join the job that the environment describes, train, and write what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("ddp", "fsdp2", "hsdp"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--record", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--delay_ms", type=float, default=10.0)
    parser.add_argument("--bucket_mb", type=float, default=0.5)
    parser.add_argument("--cpu_group", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, args.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(WARM_UP):
        step()
    if args.cpu_group:
        # Only the training thread comes under the quota, and only now: gloo's threads act like a NIC's own engine.
        args.cpu_group.write_text(str(threading.get_native_id()))
    else:
        urgent()
    dist.barrier()
    times = []
    for _ in range(args.steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    dist.barrier()
    with record(str(args.out / "capture"), start_step=2, steps=args.record) as session:
        for _ in range(args.record + 3):
            step()
            session.step()
    (args.out / f"steps_{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
