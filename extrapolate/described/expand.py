"""Turns a model, a layout and a device into what each rank's thread issues in one step: kernels, collectives, waits.

Where `jobs` sees a layer as one stretch of compute, this sees its kernels, so that the step can be written down as a
trace. Times of kernels come from the same formulas (kernels.py) and share one factor, to be calibrated. The order of a
pipeline's actions and messages is that of rewrite/schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrace.extrapolate.described.collectives import GroupShape, all_reduce_s, gather_as_run_s
from scaletrace.extrapolate.described.constants import ADAM_BYTES_PER_PARAMETER
from scaletrace.extrapolate.described.plan_kernels import ADAM, KernelPlans, Part
from scaletrace.extrapolate.described.plan_layers import LayerPlans
from scaletrace.extrapolate.described.plan_messages import MessagePlans
from scaletrace.extrapolate.described.planned import (
    REDUCE,
    REPLICATE,
    Described,
    Item,
    PlannedCollective,
    PlannedRange,
    PlannedWait,
)
from scaletrace.extrapolate.described.stages import layers_by_chunk
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program

SINGLE_STAGE = ("GPipe", "1F1B")
"""Schedules whose runtime in PyTorch annotates `Forward 3`; the others annotate each action, as `PP:2F3`."""


def distinct_ranks(layout: Layout) -> tuple[int, ...]:
    """One rank for each class of equal work: the first of every pipeline stage."""
    span = layout.span("pp")
    return tuple(stage * span.stride for stage in range(span.size))


def expand(described: Described, rank: int) -> tuple[Item, ...]:
    """What one rank issues in one step."""
    return tuple(_Expander(described, rank).step())


class _Expander:
    """One rank's view of the step."""

    __slots__ = ("counts", "d", "kernels", "layers", "messages", "program", "stage")

    def __init__(self, described: Described, rank: int) -> None:
        self.d = described
        self.program: Program = described.program
        self.kernels, self.messages = KernelPlans(described), MessagePlans(described, rank)
        self.layers = LayerPlans(described, self.kernels, self.messages)
        self.stage = self.messages.stage
        self.counts = layers_by_chunk(described.model.layers, self.program.stages)

    def step(self) -> Iterator[Item]:
        row = self.d.rows[self.stage]
        last = {action.stage: action for action in row if action.op in (Op.BACKWARD, Op.WEIGHT)}
        for action in row:
            items = tuple(self.action(action, last.get(action.stage) == action))
            if not items:
                continue
            name = self.name_of(action)
            yield from (PlannedRange(name, items),) if name else items
        yield PlannedRange("Optimizer.step#AdamW.step", tuple(self.optimizer()))

    def name_of(self, action: Action) -> str:
        """As PyTorch's pipelining annotates it; a single-stage schedule leaves its messages without a name."""
        if self.program.schedule not in SINGLE_STAGE:
            return f"PP:{action}"
        word = {Op.FORWARD: "Forward", Op.BACKWARD: "Backward"}.get(action.op, "")
        return f"{word} {action.micro_batch}" if word else ""

    def action(self, action: Action, reduces: bool) -> Iterator[Item]:
        """What one action issues; `reduces` says that no gradient of its stage comes after it."""
        if action.op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B):
            yield self.messages.message(action, self.program)
        elif action.op is Op.FORWARD:
            yield from self.forward(action)
        else:
            self.kernels.part = Part(action.op.value)
            yield from self.backward(action, reduces)

    def first_layer(self, stage: int) -> int:
        return sum(self.counts[:stage])

    def root_elements(self, stage: int) -> int:
        return self.messages.root_elements(stage, self.program.stages)

    def forward(self, action: Action) -> Iterator[Item]:
        stage, batch = action.stage, action.micro_batch
        yield from self.messages.gather_root(self.root_elements(stage))
        if stage == 0:
            self.kernels.unit = f"{batch}/embedding"
            yield self.kernels.embedding()
        else:
            yield from self.messages.received(action, self.program)
        yield from self.layers.forward(batch, self.first_layer(stage), self.counts[stage])
        if stage == self.program.stages - 1:
            self.kernels.unit = f"{batch}/head"
            yield self.kernels.norm("norm")
            yield self.kernels.product("head", self.d.model.vocab // self.d.layout.tp, self.d.model.hidden)
            yield self.kernels.loss()

    def backward(self, action: Action, reduces: bool) -> Iterator[Item]:
        stage, batch = action.stage, action.micro_batch
        if stage == self.program.stages - 1:
            self.kernels.unit = f"{batch}/head"
            yield from self.kernels.loss_backward()
            yield from self.kernels.product_backward(
                "head", self.d.model.vocab // self.d.layout.tp, self.d.model.hidden
            )
            yield from self.kernels.norm_backward("norm")
        elif action.op is not Op.WEIGHT:
            yield from self.messages.received(action, self.program)
        yield from self.layers.backward(batch, self.first_layer(stage), self.counts[stage], reduces)
        if stage == 0:
            self.kernels.unit = f"{batch}/embedding"
            yield from self.kernels.embedding_backward()
        if self.root_elements(stage) and self.kernels.part is not Part.INPUT:
            yield from self.messages.reduce(self.root_elements(stage), reduces)

    def optimizer(self) -> Iterator[Item]:
        layout = self.d.layout
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
        stages = [stage for stage, home in enumerate(self.program.rank_of_stage) if home == self.stage]
        held = sum(self.counts[stage] for stage in stages) * self.messages.layer_elements()
        held += sum(self.root_elements(stage) for stage in stages)
        owned = math.ceil(held / layout.shards)
        yield self.kernels.kernel_of(ADAM, "aten::_fused_adamw_", float(owned) * ADAM_BYTES_PER_PARAMETER, (owned, 1))
        if layout.zero and layout.dp > 1:
            group = self.d.group("dp")
            seconds = gather_as_run_s(self.d.device, 2.0 * held, group)
            yield PlannedCollective("all_gather", "dp", REPLICATE, seconds, held // group.size, held)
            yield PlannedWait(REPLICATE)


def groups(layout: Layout) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """All process groups of more than one rank: (axis, description, ranks), in the order of their creation."""
    found = [("world", "default_pg", tuple(range(layout.ranks)))]
    names = {
        "dp": "mesh_dp_replicate",
        "shard": "mesh_dp_shard_cp" if layout.cp > 1 else "mesh_dp_shard",
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
