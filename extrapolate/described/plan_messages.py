"""Turns a described job into the collectives and messages of one rank, each with its group, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrace.extrapolate.described.collectives import all_gather_s, all_reduce_s, all_to_all_s, send_s
from scaletrace.extrapolate.described.planned import (
    GATHER,
    REDUCE,
    REPLICATE,
    TENSOR,
    Described,
    Item,
    PlannedCollective,
    PlannedWait,
)

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

    def gather_layer(self) -> Iterator[Item]:
        """FULL_SHARD gathers again in the backward."""
        if self.sharded:
            yield self.layer_gather()
            yield PlannedWait(GATHER)

    def reduce_layer(self, reduces: bool) -> Iterator[Item]:
        """FSDP scatters each micro batch's gradients; replicas reduce them once, after the last micro batch."""
        layout, elements = self.d.layout, self.layer_elements()
        if self.sharded:
            yield self.shard_collective("reduce_scatter", REDUCE, elements, "Float", 4)
            elements //= layout.span("shard").size
        if layout.dp > 1 and reduces:
            yield self.replica_reduction(elements)

    def replica_reduction(self, elements: int) -> PlannedCollective:
        group = self.d.group("dp")
        if self.d.layout.zero:
            seconds = all_gather_s(self.d.device, 4.0 * elements, group)
            return PlannedCollective(
                "reduce_scatter", "dp", REPLICATE, seconds, elements, elements // group.size, "Float"
            )
        buckets = max(1, math.ceil(4.0 * elements / BUCKET_BYTES))
        seconds = buckets * all_reduce_s(self.d.device, 4.0 * elements / buckets, group)
        return PlannedCollective("all_reduce", "dp", REPLICATE, seconds, elements, elements, "Float")

    def shard_collective(self, kind: str, stream: int, elements: int, dtype: str, width: int) -> PlannedCollective:
        group = self.d.group("shard")
        padded = math.ceil(elements / group.size) * group.size
        seconds = all_gather_s(self.d.device, float(width * padded), group)
        whole, part = padded, padded // group.size
        sizes = (part, whole) if kind == "all_gather" else (whole, part)
        return PlannedCollective(kind, "shard", stream, seconds, *sizes, dtype)

    def sharded_root(self, first: bool) -> Iterator[Item]:
        """The root unit (embedding, and head where it is tied): gathered at the head, reduced at the tail."""
        elements = self.d.model.embedding_parameters // self.d.layout.tp
        if self.sharded and first:
            yield self.shard_collective("all_gather", GATHER, elements, "BFloat16", 2)
            yield PlannedWait(GATHER)
        elif self.sharded:
            yield self.shard_collective("reduce_scatter", REDUCE, elements, "Float", 4)

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
            seconds = all_gather_s(self.d.device, size_bytes, group)
            sizes = (part, elements) if kind == "all_gather" else (elements, part)
        yield PlannedCollective(kind, axis, stream, seconds, *sizes)
        yield PlannedWait(stream)

    def neighbour(self, direction: int) -> int:
        """The rank with the same coordinates on the next or previous stage, around the end for interleaved chunks."""
        span = self.d.layout.span("pp")
        stage = (self.stage + direction) % span.size
        return self.rank + (stage - self.stage) * span.stride

    def message(self, kind: str, stream: int, peer: int) -> Iterator[Item]:
        """An activation or its gradient, to or from another stage; a receive is awaited at once."""
        split = self.d.layout.tp if self.d.layout.sp else 1
        elements = self.d.tokens * self.d.model.hidden // split
        across = self.d.layout.span("pp").stride * self.d.layout.pp > self.d.device.gpus_per_node
        seconds = send_s(self.d.device, 2.0 * elements, across)
        yield PlannedCollective(kind, "pp", stream, seconds, elements, elements, peer=peer)
        if kind == "recv":
            yield PlannedWait(stream)
