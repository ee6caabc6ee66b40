"""Turns a model, a layout and a device into what each rank's thread issues in one step: kernels, collectives, waits.

Where `jobs` sees a layer as one stretch of compute, this sees its kernels, so that the step can be written down as a
trace. Times of kernels come from the same formulas (kernels.py) and share one factor, to be calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from scaletrace.extrapolate.described.collectives import GroupShape, all_gather_s, all_reduce_s
from scaletrace.extrapolate.described.constants import ADAM_BYTES_PER_PARAMETER
from scaletrace.extrapolate.described.pipeline import order
from scaletrace.extrapolate.described.plan_kernels import ADAM, POINTWISE, KernelPlans
from scaletrace.extrapolate.described.plan_messages import MessagePlans
from scaletrace.extrapolate.described.planned import (
    CONTEXT,
    EXPERT,
    GATHER,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    REDUCE,
    REPLICATE,
    SEND_BACKWARD,
    SEND_FORWARD,
    Described,
    Item,
    PlannedCollective,
    PlannedRange,
    PlannedWait,
)
from scaletrace.extrapolate.described.stages import layers_by_chunk
from scaletrace.extrapolate.layout import Layout


def distinct_ranks(layout: Layout) -> tuple[int, ...]:
    """One rank for each class of equal work: the first of every pipeline stage."""
    span = layout.span("pp")
    return tuple(stage * span.stride for stage in range(span.size))


def expand(described: Described, rank: int) -> tuple[Item, ...]:
    """What one rank issues in one step."""
    return tuple(_Expander(described, rank).step())


class _Expander:
    """One rank's view of the step."""

    __slots__ = ("counts", "d", "kernels", "messages", "stage")

    def __init__(self, described: Described, rank: int) -> None:
        self.d = described
        self.kernels, self.messages = KernelPlans(described), MessagePlans(described, rank)
        self.stage = self.messages.stage
        self.counts = layers_by_chunk(described.model.layers, described.layout.pp * described.layout.chunks)

    def step(self) -> Iterator[Item]:
        layout = self.d.layout
        operations, _ = order(layout.pp, layout.chunks, self.d.micro_batches, self.stage)
        last_backward = {chunk: mb for is_forward, chunk, mb in operations if not is_forward}
        for is_forward, chunk, micro_batch in operations:
            work = self.forward if is_forward else self.backward
            name = f"{'Forward' if is_forward else 'Backward'} {micro_batch}"
            yield PlannedRange(name, tuple(work(chunk, last_backward[chunk] == micro_batch)))
        yield PlannedRange("Optimizer.step#AdamW.step", tuple(self.optimizer()))

    # Work of one chunk

    def forward(self, chunk: int, _: bool) -> Iterator[Item]:
        virtual = chunk * self.d.layout.pp + self.stage
        first, last = virtual == 0, virtual == len(self.counts) - 1
        if not first:
            yield from self.messages.message("recv", RECEIVE_FORWARD, self.messages.neighbour(-1))
        else:
            yield from self.messages.sharded_root(first=True)
            yield self.kernels.bytes_kernel("void at::native::embedding_kernel", "aten::embedding", 4)
        yield from self.layers(self.counts[virtual], self.layer_forward)
        if last:
            yield from self.head(backward=False)
        else:
            yield from self.messages.message("send", SEND_FORWARD, self.messages.neighbour(1))

    def backward(self, chunk: int, reduces: bool) -> Iterator[Item]:
        virtual = chunk * self.d.layout.pp + self.stage
        first, last = virtual == 0, virtual == len(self.counts) - 1
        if last:
            yield from self.head(backward=True)
        else:
            yield from self.messages.message("recv", RECEIVE_BACKWARD, self.messages.neighbour(1))
        for _ in range(self.counts[virtual]):
            yield from self.messages.gather_layer()
            if self.d.layout.recompute == "full":
                yield from self.layer_forward()
            yield from self.layer_backward()
            yield from self.messages.reduce_layer(reduces)
        if first:
            yield self.kernels.bytes_kernel(
                "void at::native::embedding_backward_kernel", "aten::embedding_dense_backward", 6
            )
            yield from self.messages.sharded_root(first=False)
        else:
            yield from self.messages.message("send", SEND_BACKWARD, self.messages.neighbour(-1))

    def layers(self, count: int, work: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Layers in order; the gather of the next one is issued before this one's kernels (prefetch)."""
        if count and self.messages.sharded:
            yield self.messages.layer_gather()
        for i in range(count):
            if self.messages.sharded:
                yield PlannedWait(GATHER)
                if i + 1 < count:
                    yield self.messages.layer_gather()
            yield from work()

    # Kernels of one layer

    def layer_forward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        yield self.kernels.norm()
        yield self.kernels.gemm((model.hidden + 2 * model.kv_width) // tp, model.hidden)
        if self.d.layout.cp > 1:
            yield from self.messages.blocking(
                "all_gather", "cp", CONTEXT, self.d.tokens * 2 * model.kv_width // tp * self.d.layout.cp
            )
        yield self.kernels.attention(backward=False)
        yield self.kernels.gemm(model.hidden, model.hidden // tp)
        yield from self.messages.tensor_parallel()
        yield self.kernels.norm()
        yield from self.routed(self.mlp_forward)
        yield from self.messages.tensor_parallel()
        yield self.kernels.bytes_kernel(POINTWISE.format("CUDAFunctor_add<c10::BFloat16>"), "aten::add", 6)

    def layer_backward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        yield from self.routed(self.mlp_backward)
        yield from self.messages.tensor_parallel()
        yield self.kernels.norm(backward=True)
        yield from self.kernels.gemm_backward(model.hidden, model.hidden // tp)
        yield self.kernels.attention(backward=True)
        if self.d.layout.cp > 1:
            yield from self.messages.blocking(
                "reduce_scatter", "cp", CONTEXT, self.d.tokens * 2 * model.kv_width // tp * self.d.layout.cp
            )
        yield from self.kernels.gemm_backward((model.hidden + 2 * model.kv_width) // tp, model.hidden)
        yield from self.messages.tensor_parallel()
        yield self.kernels.norm(backward=True)

    def mlp_forward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        width = model.mlp_width // tp
        share = model.experts_per_token
        yield self.kernels.gemm(width * (model.mlp_matrices - 1), model.hidden, share)
        yield self.kernels.activation(width * share, backward=False)
        yield self.kernels.gemm(model.hidden, width, share)

    def mlp_backward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        width = model.mlp_width // tp
        share = model.experts_per_token
        yield from self.kernels.gemm_backward(model.hidden, width, share)
        yield self.kernels.activation(width * share, backward=True)
        yield from self.kernels.gemm_backward(width * (model.mlp_matrices - 1), model.hidden, share)

    def routed(self, work: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Expert layers: tokens go to their experts and come back."""
        model = self.d.model
        if model.experts == 1 or self.d.layout.ep == 1:
            yield from work()
            return
        elements = self.d.tokens * model.experts_per_token * model.hidden
        yield self.kernels.bytes_kernel("void moe_permute_topk_kernel", "aten::index_select", 6)
        yield from self.messages.blocking("all_to_all", "ep", EXPERT, elements)
        yield from work()
        yield from self.messages.blocking("all_to_all", "ep", EXPERT, elements)

    def head(self, backward: bool) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        columns = model.vocab // tp
        if not backward:
            yield self.kernels.norm()
            yield self.kernels.gemm(columns, model.hidden)
            yield self.kernels.logits("void cross_entropy_forward_kernel<float>", "aten::cross_entropy_loss", 1 / 3)
        else:
            yield self.kernels.logits("void cross_entropy_backward_kernel<float>", "aten::nll_loss_backward", 2 / 3)
            yield from self.kernels.gemm_backward(columns, model.hidden)
            yield self.kernels.norm(backward=True)

    def optimizer(self) -> Iterator[Item]:
        layout, model = self.d.layout, self.d.model
        if self.messages.sharded:
            yield PlannedWait(REDUCE)
        if layout.dp > 1:
            yield PlannedWait(REPLICATE)
        if layout.ranks > 1:
            world = GroupShape(layout.ranks, self.d.device.gpus_per_node)
            yield PlannedCollective(
                "all_reduce", "world", REDUCE, all_reduce_s(self.d.device, 4.0, world), 1, 1, "Float"
            )
            yield PlannedWait(REDUCE)
        chunks = [chunk * layout.pp + self.stage for chunk in range(layout.chunks)]
        held = sum(self.counts[chunk] for chunk in chunks) * self.messages.layer_elements()
        if 0 in chunks or len(self.counts) - 1 in chunks:
            held += model.embedding_parameters // layout.tp
        owned = math.ceil(held / layout.shards)
        yield self.kernels.kernel_of(ADAM, "aten::_fused_adamw_", float(owned) * ADAM_BYTES_PER_PARAMETER, (owned, 1))
        if layout.zero and layout.dp > 1:
            group = self.d.group("dp")
            seconds = all_gather_s(self.d.device, 2.0 * held, group)
            yield PlannedCollective("all_gather", "dp", REPLICATE, seconds, held // group.size, held)
            yield PlannedWait(REPLICATE)


def groups(layout: Layout) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """All process groups of more than one rank: (axis, description, ranks), in the order of their creation."""
    found = [("world", "default_pg", tuple(range(layout.ranks)))]
    names = {
        "dp": "mesh_dp_replicate",
        "shard": "mesh_dp_shard",
        "tp": "mesh_tp",
        "cp": "mesh_cp",
        "ep": "mesh_ep",
        "pp": "mesh_pp",
    }
    for axis, description in names.items():
        span = layout.span(axis)
        if span.size == 1 or (axis == "shard" and layout.fsdp == 1):
            continue
        found += [(axis, description, members) for members in _groups_of(layout, axis)]
    return tuple(found)


def _groups_of(layout: Layout, axis: str) -> Iterator[tuple[int, ...]]:
    span = layout.span(axis)
    seen: set[int] = set()
    for rank in range(layout.ranks):
        if rank not in seen:
            members = tuple(range(rank, rank + span.size * span.stride, span.stride))
            seen.update(members)
            yield members
