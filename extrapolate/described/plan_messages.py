"""Turns a described job into the collectives and messages of one rank, each with its group, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrace.extrapolate.described.collectives import all_reduce_s, all_to_all_s, gather_as_run_s, send_s
from scaletrace.extrapolate.described.planned import (
    GATHER,
    MESSAGE_CHANNELS,
    MESSAGES,
    REDUCE,
    REPLICATE,
    RETURNING,
    TENSOR,
    Described,
    Item,
    PlannedCollective,
    PlannedRange,
    PlannedWait,
)
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program

BUCKET_BYTES = 25e6
"""DDP's default bucket."""


class MessagePlans:
    """Makes the collectives of one rank."""

    __slots__ = ("d", "rank", "stage")

    def __init__(self, described: Described, rank: int) -> None:
        self.d, self.rank = described, rank
        self.stage = described.layout.coordinates(rank)["pp"]

    @property
    def sharded(self) -> bool:
        return self.d.layout.span("shard").size > 1 and self.d.layout.fsdp > 1

    def layer_elements(self) -> int:
        """Parameters of one layer on one tensor-parallel rank, experts divided over theirs."""
        model, layout = self.d.model, self.d.layout
        own = model.layer_parameters - model.experts * model.expert_parameters
        experts = model.experts * model.expert_parameters // layout.ep
        return (own + experts) // layout.tp

    def layer_gather(self) -> PlannedCollective:
        return self.shard_collective("all_gather", GATHER, self.layer_elements(), "BFloat16", 2)

    def reduce(self, elements: int, last: bool) -> Iterator[Item]:
        """FSDP scatters each micro batch's gradients; replicas reduce them once, after the last micro batch."""
        layout = self.d.layout
        if self.sharded:
            yield self.shard_collective("reduce_scatter", REDUCE, elements, "Float", 4)
            elements //= layout.span("shard").size
        if layout.dp > 1 and last:
            if self.sharded:
                yield PlannedWait(REDUCE, by=REPLICATE)
            yield from self.replica_reduction(elements)

    def replica_reduction(self, elements: int) -> Iterator[PlannedCollective]:
        """Gradients over replicas: one reduce-scatter where they shard the optimizer, else all-reduces of DDP's buckets."""
        group = self.d.group("dp")
        if self.d.layout.zero:
            seconds = gather_as_run_s(self.d.device, 4.0 * elements, group)
            yield PlannedCollective(
                "reduce_scatter", "dp", REPLICATE, seconds, elements, elements // group.size, "Float"
            )
            return
        buckets = max(1, math.ceil(4.0 * elements / BUCKET_BYTES))
        for bucket in range(buckets):
            own = elements // buckets + (bucket < elements % buckets)
            seconds = all_reduce_s(self.d.device, 4.0 * own, group)
            yield PlannedCollective("all_reduce", "dp", REPLICATE, seconds, own, own, "Float")

    def shard_collective(self, kind: str, stream: int, elements: int, dtype: str, width: int) -> PlannedCollective:
        group = self.d.group("shard")
        padded = math.ceil(elements / group.size) * group.size
        seconds = gather_as_run_s(self.d.device, float(width * padded), group)
        whole, part = padded, padded // group.size
        sizes = (part, whole) if kind == "all_gather" else (whole, part)
        return PlannedCollective(kind, "shard", stream, seconds, *sizes, dtype)

    def root_elements(self, stage: int, stages: int) -> int:
        """Parameters of a stage outside its layers on one tensor-parallel rank: embedding on the first, head on the last."""
        copies = int(stage == 0) + int(stage == stages - 1 and (stages > 1 or not self.d.model.tied))
        return copies * (self.d.model.embedding_parameters // self.d.layout.tp)

    def gather_root(self, elements: int) -> Iterator[Item]:
        """The root unit is gathered before anything of its stage can run."""
        if self.sharded and elements:
            gather = self.shard_collective("all_gather", GATHER, elements, "BFloat16", 2)
            yield PlannedRange("FSDP::root_pre_forward", (gather, PlannedWait(GATHER)))

    def tensor_parallel(self) -> Iterator[Item]:
        """What follows a row-parallel product: an all-reduce, or with sequence parallelism the two halves of one."""
        if self.d.layout.tp == 1:
            return
        elements = self.d.tokens * self.d.model.hidden
        if not self.d.layout.sp:
            yield from self.blocking("all_reduce", "tp", TENSOR, elements)
            return
        yield from self.blocking("reduce_scatter", "tp", TENSOR, elements)
        yield from self.blocking("all_gather", "tp", TENSOR, elements)

    def blocking(self, kind: str, axis: str, stream: int, elements: int) -> Iterator[Item]:
        """A collective whose result the next kernel needs; `elements` is the whole vector."""
        group = self.d.group(axis)
        size_bytes = 2.0 * elements
        part = max(1, elements // group.size)
        if kind == "all_reduce":
            seconds, sizes = all_reduce_s(self.d.device, size_bytes, group), (elements, elements)
        elif kind == "all_to_all":
            seconds, sizes = all_to_all_s(self.d.device, size_bytes, group), (elements, elements)
        else:
            seconds = gather_as_run_s(self.d.device, size_bytes, group)
            sizes = (part, elements) if kind == "all_gather" else (elements, part)
        yield PlannedCollective(kind, axis, stream, seconds, *sizes)
        yield PlannedWait(stream)

    def peer(self, program: Program, action: Action) -> int:
        """The rank with the same coordinates on the stage at the other end of a message."""
        span = self.d.layout.span("pp")
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        ahead = forward == (action.op in (Op.SEND_F, Op.SEND_B))
        home = program.rank_of_stage[action.stage + (1 if ahead else -1)]
        return self.rank + (home - self.stage) * span.stride

    def message(self, action: Action, program: Program) -> PlannedCollective:
        """An activation or its gradient, to or from another stage; the action that needs a receive waits for it."""
        split = self.d.layout.tp if self.d.layout.sp else 1
        elements = self.d.tokens * self.d.model.hidden // split
        across = self.d.layout.span("pp").stride * self.d.layout.pp > self.d.device.gpus_per_node
        receives = action.op in (Op.RECV_F, Op.RECV_B)
        return PlannedCollective(
            "recv" if receives else "send",
            "pp",
            self.stream(action, program),
            send_s(self.d.device, 2.0 * elements, across),
            elements,
            elements,
            peer=self.peer(program, action),
            channels=MESSAGE_CHANNELS,
            mark=str(action) if receives else "",
        )

    def stream(self, action: Action, program: Program) -> int:
        """The stream of a message: one for each use, and others for the way back of a V-shaped pipeline."""
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        ahead = forward == (action.op in (Op.SEND_F, Op.SEND_B))
        lower = action.stage if ahead else action.stage - 1
        turns = program.chunks > 1 and program.rank_of_stage[program.ranks] == program.ranks - 1
        return MESSAGES[action.op] + (RETURNING if turns and lower >= program.ranks else 0)

    def received(self, action: Action, program: Program) -> Iterator[Item]:
        """Wait for what an action reads from another rank, if it does."""
        op = Op.RECV_F if action.op is Op.FORWARD else Op.RECV_B
        receive = Action(action.stage, op, action.micro_batch)
        other = action.stage + (-1 if op is Op.RECV_F else 1)
        if program.rank_of_stage[other] != self.stage:
            yield PlannedWait(self.stream(receive, program), str(receive))
