"""The sample transformer under activation checkpointing: JOBS HOW LAYERS STRATEGY, HOW = none, full, reentrant, attention."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, sys.argv[1])
from transformer import Block, Shape, Transformer, loss_of, parallelize

how, layers, strategy = sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
forward, attend = Block.forward, Block.attend


def whole(self: Block, x: Tensor) -> Tensor:
    """The whole block is run again."""
    return checkpoint(forward, self, x, use_reentrant=how == "reentrant")


def core(self: Block, x: Tensor) -> Tensor:
    """Attention with its products is run again, the MLP is kept."""
    return checkpoint(attend, self, x, use_reentrant=False)


if how in ("full", "reentrant"):
    Block.forward = whole  # type: ignore[method-assign]
elif how == "attention":
    Block.attend = core  # type: ignore[method-assign]
torch.manual_seed(0)
model = parallelize(Transformer(Shape(layers=layers, width=256)), strategy, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(8):
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_backend() == "gloo":
    dist.barrier()
dist.destroy_process_group()
