"""Turns a described job into its layers' forwards and backwards: kernels in order, with the collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from scaletrace.extrapolate.described.plan_kernels import KernelPlans, Part
from scaletrace.extrapolate.described.plan_messages import MessagePlans
from scaletrace.extrapolate.described.planned import (
    CONTEXT,
    EXPERT,
    GATHER,
    Described,
    Item,
    PlannedBackward,
    PlannedHost,
    PlannedKernel,
    PlannedModule,
    PlannedRange,
    PlannedWait,
)


class LayerPlans:
    """Makes the layers of one rank, named as PyTorch names modules (`layers.3`) and FSDP's annotations."""

    __slots__ = ("d", "kernels", "messages")

    def __init__(self, described: Described, kernels: KernelPlans, messages: MessagePlans) -> None:
        self.d, self.kernels, self.messages = described, kernels, messages

    def forward(self, batch: int, first: int, count: int) -> Iterator[Item]:
        """Layers in order; the gather of the next one is issued before this one's kernels (prefetch)."""
        sharded = self.messages.sharded
        if count and sharded:
            yield self.messages.layer_gather()
        for layer in range(first, first + count):
            if sharded:
                ahead = (self.messages.layer_gather(),) if layer + 1 < first + count else ()
                yield PlannedRange(f"FSDP::pre_forward (layers.{layer})", (PlannedWait(GATHER), *ahead))
            self.kernels.unit = f"{batch}/{layer}"
            yield PlannedModule(f"TransformerBlock_{layer}", tuple(self.layer_forward()))
            if sharded:
                yield PlannedRange(f"FSDP::post_forward (layers.{layer})", (PlannedHost("aten::detach"),))

    def backward(self, batch: int, first: int, count: int, reduces: bool) -> Iterator[Item]:
        """Layers from the last to the first, gathered again one ahead; the next gather goes before this reduction.

        What gives weights' gradients only needs neither gathers nor recomputing.
        """
        inputs = self.kernels.part is not Part.WEIGHT
        gathers = inputs and self.messages.sharded
        if gathers and count:
            yield self.messages.layer_gather()
        for layer in reversed(range(first, first + count)):
            self.kernels.unit = f"{batch}/{layer}"
            if gathers:
                ahead = (self.messages.layer_gather(),) if layer > first else ()
                yield PlannedRange(f"FSDP::pre_backward (layers.{layer})", (PlannedWait(GATHER), *ahead))
            if inputs and self.d.layout.recompute == "full":
                # The first node to unpack a saved tensor runs the forward again, without numbers of its own.
                yield PlannedBackward("CheckpointFunctionBackward", "", tuple(_untagged(self.layer_forward())))
            yield from self.layer_backward()
            if self.kernels.part is not Part.INPUT:
                reduction = tuple(self.messages.reduce(self.messages.layer_elements(), reduces))
                if reduction and self.messages.sharded:
                    yield PlannedRange(f"FSDP::post_backward_reduce (layers.{layer})", reduction)
                else:
                    yield from reduction

    def layer_forward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        yield self.kernels.norm("norm 1")
        yield self.kernels.product("qkv", (model.hidden + 2 * model.kv_width) // tp, model.hidden)
        yield from self.context("all_gather")
        yield self.kernels.attention()
        yield self.kernels.product("out", model.hidden, model.hidden // tp)
        yield from self.messages.tensor_parallel()
        yield self.kernels.norm("norm 2")
        if self.routes:
            yield self.kernels.permutation()
        yield from self.routed(self.mlp_forward)
        yield from self.messages.tensor_parallel()
        yield self.kernels.residual()

    def layer_backward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        inputs = self.kernels.part is not Part.WEIGHT
        yield from self.kernels.node("AddBackward0", "residual")
        yield from self.routed(self.mlp_backward) if inputs else self.mlp_backward()
        if self.routes:
            yield from self.kernels.permutation_backward()
        yield from self.messages.tensor_parallel() if inputs else ()
        yield from self.kernels.norm_backward("norm 2")
        yield from self.kernels.product_backward("out", model.hidden, model.hidden // tp)
        yield from self.kernels.attention_backward()
        yield from self.context("reduce_scatter") if inputs else ()
        yield from self.kernels.product_backward("qkv", (model.hidden + 2 * model.kv_width) // tp, model.hidden)
        yield from self.messages.tensor_parallel() if inputs else ()
        yield from self.kernels.norm_backward("norm 1")

    def mlp_forward(self) -> Iterator[Item]:
        model = self.d.model
        width = model.mlp_width // self.d.layout.tp
        yield self.kernels.experts("up", width * (model.mlp_matrices - 1), model.hidden)
        yield self.kernels.activation(width * model.experts_per_token)
        yield self.kernels.experts("down", model.hidden, width)

    def mlp_backward(self) -> Iterator[Item]:
        model = self.d.model
        width = model.mlp_width // self.d.layout.tp
        yield from self.kernels.experts_backward("down", model.hidden, width)
        yield from self.kernels.activation_backward(width * model.experts_per_token)
        yield from self.kernels.experts_backward("up", width * (model.mlp_matrices - 1), model.hidden)

    @property
    def routes(self) -> bool:
        """Whether tokens travel to experts on other ranks."""
        return self.d.model.experts > 1 and self.d.layout.ep > 1

    def routed(self, work: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Expert layers: tokens go to their experts and come back."""
        if not self.routes:
            yield from work()
            return
        elements = self.d.tokens * self.d.model.experts_per_token * self.d.model.hidden
        yield from self.messages.blocking("all_to_all", "ep", EXPERT, elements)
        yield from work()
        yield from self.messages.blocking("all_to_all", "ep", EXPERT, elements)

    def context(self, kind: str) -> Iterator[Item]:
        """Keys and values of the whole sequence are gathered; their gradients are scattered back."""
        layout = self.d.layout
        if layout.cp > 1:
            elements = self.d.tokens * 2 * self.d.model.kv_width // layout.tp * layout.cp
            yield from self.messages.blocking(kind, "cp", CONTEXT, elements)


def _untagged(items: Iterator[Item]) -> Iterator[Item]:
    """The same items with kernels that no backward node belongs to."""
    for item in items:
        yield replace(item, tag="") if isinstance(item, PlannedKernel) else item
