"""The sample transformer with its samples spread over context ranks, by PyTorch's own ring attention: CP EXCHANGE LAYERS.

FSDP2 shards over data and context ranks together, as torchtitan does. `EXCHANGE` is one of PyTorch's rotation methods.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import _attention as context

sys.path.insert(0, sys.argv[1])
from transformer import HEAD_DIM, Block, Shape, Transformer, loss_of

ring = sys.modules[context._templated_ring_attention.__module__]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RingAttention(torch.autograd.Function):
    """PyTorch's templated ring attention around the attention of the CPU, which its dispatcher leaves out."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        out, lse = ring._templated_ring_attention(group, 2, FLASH, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        found = ring._templated_ring_attention_backward(
            ctx.group, 2, FLASH_BACKWARD, grad_out=gradients[0].contiguous(), grad_out_name="grad_out", query=query,
            key=key, value=value, out=out, logsumexp=lse, is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return *found[:3], None


def attend(self: Block, x: Tensor) -> Tensor:
    """The block's attention over its local tokens, keys and values from all ranks."""
    query, key, value = (
        self.qkv(x).view(len(x) // self.sequence, self.sequence, -1, 3, HEAD_DIM).transpose(1, 2).unbind(3)
    )
    mixed = RingAttention.apply(query, key, value, GROUP)
    return self.out(mixed.transpose(1, 2).reshape(len(x), -1))


degree, exchange, layers = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp_shard", "cp"))
GROUP = mesh["cp"].get_group()
context.set_rotate_method(exchange)
Block.attend = attend  # type: ignore[method-assign]
shape = Shape(layers=layers, sequence=64 // degree)
torch.manual_seed(0)
model = Transformer(shape)
sharded = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
for unit in (model.embedding, *model.blocks, model.head):
    fully_shard(unit, mesh=sharded)
fully_shard(model, mesh=sharded)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(7):
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.int64)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
