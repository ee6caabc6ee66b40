"""A small mixture of experts over expert-parallel ranks: `experts.py EP EXPERTS SKEW LAYERS [recompute]`, under torchrun or alone.

Which expert each token goes to is known beforehand (so that ranks that do not exist can take part): token t of any rank
goes to expert t mod EXPERTS, and with SKEW > 0 that many more tokens of each rank go to expert 0. Gradients of experts
are reduced over the ranks that hold the same ones, all others over all ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, TOKENS = 64, 256
degree, experts, skew, layers = map(int, sys.argv[1:5])
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("edp", "ep"))
ep, same = mesh["ep"].get_group(), mesh["edp"].get_group()
local = experts // degree
chosen = torch.arange(TOKENS) % experts
chosen[:skew] = 0
order = torch.argsort(chosen, stable=True)
counts = torch.bincount(chosen, minlength=experts)
send = [int(n) for n in counts.view(degree, local).sum(1)]
mine = counts.view(degree, local)[dist.get_rank(ep)]
receive = [int(mine.sum())] * degree


class Experts(nn.Module):
    """Two matrices an expert, one batched product for all local ones (tokens padded to the fullest)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(local, WIDTH, 4 * WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(local, 4 * WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        room = int(mine.max()) * degree
        by_expert = F.pad(x, (0, 0, 0, local * room - len(x))).view(local, room, WIDTH)
        out = torch.bmm(F.relu(torch.bmm(by_expert, self.up)), self.down)
        return out.reshape(-1, WIDTH)[: len(x)]


class Layer(nn.Module):
    """A dense product and the experts, with exchanges around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        if degree > 1:
            functional.wait_tensor(functional.all_to_all_single(counts, None, None, ep))
            arrived = functional.all_to_all_single_autograd(x[order], receive, send, ep)
            back = functional.all_to_all_single_autograd(self.experts(arrived), send, receive, ep)
        else:
            back = self.experts(x[order])
        return x + torch.zeros_like(x).index_copy(0, order, back)


torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(7):
    loss = model(torch.ones(TOKENS, WIDTH)).square().mean()
    loss.backward()
    for name, weight in model.named_parameters():
        dist.all_reduce(weight.grad, group=same if "experts" in name and degree > 1 else None)
    optimizer.step()
    optimizer.zero_grad()
if world > 1 and dist.get_backend() == "gloo":
    dist.barrier()
dist.destroy_process_group()
