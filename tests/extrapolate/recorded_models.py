"""Records small models with torch's own profiler, as users write them: kinds of blocks, checkpoints, wrappers, names.

Runs as a program, since the profiler and numba do not share a process well: FOLDER CASE… writes FOLDER/CASE.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint

VOCABULARY = 128


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(x).view(samples, tokens, 4, 3 * width // 4).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return out


class Mlp(nn.Module):
    """Two products with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Experts(nn.Module):
    """A router and a few experts, all of which run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), nn.ModuleList(Mlp(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).topk(1, -1)
        return sum((expert(x) * (chosen == k) * gate for k, expert in enumerate(self.experts)), torch.zeros_like(x))


class Quux(nn.Module):
    """A pre-norm block under a name that nobody expects."""

    def __init__(self, width: int, experts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.feed = Attention(width), Experts(width) if experts else Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        out: Tensor = x + self.feed(self.second(x))
        return out


class Net(nn.Module):
    """Embedding, positions, blocks, norm and head. how: plain, annotated, or checkpointed ("keep", "reentrant")."""

    def __init__(self, layers: int, width: int = 64, experts: Sequence[int] = (), how: str = "plain") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Quux(width, at in experts) for at in range(layers))
        self.norm, self.head, self.how = nn.LayerNorm(width), nn.Linear(width, VOCABULARY), how

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for at, block in enumerate(self.blocks):
            if self.how == "annotated":
                with record_function(f"layer {at}"):
                    x = block(x)
            elif self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        out: Tensor = self.head(self.norm(x))
        return out


class Tower(nn.Module):
    """Embedding and equal products with an activation, and no attention."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out


class Translator(nn.Module):
    """PyTorch's own encoder of three layers and decoder of two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.body = nn.Transformer(64, 4, 3, 2, 128, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        out: Tensor = self.head(self.body(x, x))
        return out


def record(
    path: Path,
    make: Callable[[], nn.Module],
    *,
    micro_batches: int = 1,
    train: bool = True,
    shapes: bool = True,
    modules: bool = False,
    memory: bool = False,
    samples: int = 2,
    tokens: int = 32,
) -> Path:
    """Train (or run) a model for two recorded steps after two others; the file that torch.profiler exported."""
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        for _ in range(micro_batches):
            words = torch.randint(0, VOCABULARY, (samples, tokens))
            with torch.set_grad_enabled(train):
                out = net(words)
            if train:
                F.cross_entropy(out.flatten(0, 1), words.flatten()).backward()
        if train:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    options = {"record_shapes": shapes, "with_stack": modules, "with_modules": modules, "profile_memory": memory}
    wait = schedule(wait=0, warmup=2, active=2)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=wait,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        **options,
    ) as recorder:
        for _ in range(4):
            step()
            recorder.step()
    return path


def tied() -> nn.Module:
    """A model whose head reads the embedding's weights."""
    net = Net(4)
    net.head.weight = net.words.weight
    return net


def compiled(blocks: bool) -> nn.Module:
    """A model compiled block by block, or as a whole."""
    net = Net(4)
    if not blocks:
        whole: nn.Module = torch.compile(net)  # type: ignore[assignment]
        return whole
    for block in net.blocks:
        block.compile()
    return net


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (lambda: Net(4), {}),
    "tied": (tied, {}),
    "tied, accumulated": (tied, {"micro_batches": 3}),
    "deep": (lambda: Net(12, 32), {}),
    "two": (lambda: Net(2), {}),
    "one": (lambda: Net(1), {}),
    "without shapes": (lambda: Net(4), {"shapes": False}),
    "accumulated": (lambda: Net(3), {"micro_batches": 3}),
    "named": (lambda: Net(5), {"modules": True}),
    "named, accumulated": (lambda: Net(3), {"modules": True, "micro_batches": 2}),
    "annotated": (lambda: Net(4, how="annotated"), {}),
    "checkpointed": (lambda: Net(4, how="keep"), {}),
    "checkpointed, reentrant": (lambda: Net(4, how="reentrant"), {}),
    "checkpointed, named": (lambda: Net(4, how="keep"), {"modules": True}),
    "experts in turn": (lambda: Net(6, experts=(1, 3, 5)), {}),
    "experts in turn, named": (lambda: Net(6, experts=(1, 3, 5)), {"modules": True}),
    "first layer dense": (lambda: Net(5, experts=(1, 2, 3, 4)), {}),
    "inference": (lambda: Net(4), {"train": False}),
    "encoder and decoder": (Translator, {"modules": True}),
    "tower": (lambda: Tower(6), {}),
    "no layers": (lambda: Tower(1), {}),
    "memory": (lambda: Net(4, 128), {"memory": True, "samples": 8, "tokens": 64}),
    "memory, checkpointed": (lambda: Net(4, 128, how="keep"), {"memory": True, "samples": 8, "tokens": 64}),
    "compiled": (lambda: compiled(False), {}),
    "compiled by blocks": (lambda: compiled(True), {}),
}
"""What can be recorded: a model and how."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        make, how = MODELS[case]
        record(Path(sys.argv[1]) / f"{case}.json", make, **how)
