"""Turns a described job into checked sizes, and names what its expansion consists of: kernels, collectives, waits, ranges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.collectives import GroupShape
from scaletrace.extrapolate.described.constants import Device, KernelCosts
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.interference import NCCL_CHANNELS
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite import schedules
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program

GATHER, REDUCE, TENSOR, EXPERT, CONTEXT, REPLICATE = 20, 24, 28, 32, 36, 40
MESSAGES = {Op.RECV_F: 44, Op.SEND_F: 48, Op.RECV_B: 52, Op.SEND_B: 56}
RETURNING = 16
"""Streams, one for each use, as PyTorch and Megatron keep one communicator for each. What a V-shaped pipeline sends on
its way back goes to another neighbour, so over a stream of its own, RETURNING further on."""

MESSAGE_CHANNELS = 2
"""NCCL channels of a message, as MLPerf's submitted configurations cap them; collectives have NCCL_CHANNELS."""


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """A kernel: seconds before calibration, grid, and the shapes of the op that launches it.

    outer  the operator that the model calls for it, with its shapes;  tag  the name by which its backward node finds it
    """

    name: str
    op: str
    seconds: float
    blocks: int
    shapes: tuple[tuple[int, ...], ...] = ()
    outer: str = ""
    outer_shapes: tuple[tuple[int, ...], ...] = ()
    tag: str = ""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective or message: kind, axis of its group, stream, seconds of transfer, elements of one member."""

    kind: str
    axis: str
    stream: int
    seconds: float
    in_elements: int
    out_elements: int
    dtype: str = "BFloat16"
    peer: int = -1
    channels: int = NCCL_CHANNELS
    mark: str = ""


@dataclass(frozen=True, slots=True)
class PlannedWait:
    """A stream (`by`, 0 for the compute stream) waits for another, or with `mark` for one collective on it."""

    on: int
    mark: str = ""
    by: int = 0


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """Work of the thread alone."""

    name: str
    seconds: float = 2e-6


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A named range of the host around further items."""

    name: str
    body: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class PlannedBackward:
    """An autograd node around further items; `of` is the tag of the forward operator that it belongs to."""

    name: str
    of: str
    body: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """The forward of a module around further items."""

    name: str
    body: tuple[Item, ...]


Enclosing = PlannedRange | PlannedBackward | PlannedModule
Item = PlannedKernel | PlannedCollective | PlannedWait | PlannedHost | Enclosing


@dataclass(frozen=True, slots=True)
class Described:
    """What is to be expanded. `layout` must say mbs and, with a pipeline, microbatches; seq comes from the model if 0."""

    model: Model
    layout: Layout
    device: Device
    costs: KernelCosts

    def __post_init__(self) -> None:
        layout, model = self.layout, self.model
        for axis, whole, name in (
            ("tp", model.heads, "heads"),
            ("tp", model.mlp_width, "ffn"),
            ("cp", self.seq, "seq"),
        ):
            if whole % getattr(layout, axis):
                raise UsageError(f"{axis}={getattr(layout, axis)} does not divide {name} {whole} of {model.name}")
        if layout.ep > 1 and model.experts % layout.ep:
            raise UsageError(f"ep={layout.ep} does not divide the {model.experts} experts of {model.name}")
        if layout.pp * layout.chunks > model.layers:
            raise UsageError(f"{layout.pp * layout.chunks} stages for the {model.layers} layers of {model.name}")
        schedules.check(layout.pipeline_schedule, layout.pp, self.micro_batches, layout.chunks)
        if layout.zero == 3:
            raise UsageError("zero=3 shards parameters over dp; write that as fsdp")

    @property
    def seq(self) -> int:
        return self.layout.seq or self.model.seq

    @property
    def mbs(self) -> int:
        return self.layout.mbs or 1

    @property
    def micro_batches(self) -> int:
        return self.layout.microbatches or (max(1, self.layout.pp))

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on one rank."""
        return self.mbs * self.seq // self.layout.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of the whole job."""
        return self.mbs * self.seq * self.micro_batches * self.layout.data_ranks

    @property
    def program(self) -> Program:
        """The pipeline's actions by rank; one stage where there is no pipeline."""
        return _program(self.layout.pipeline_schedule, self.layout.pp, self.micro_batches, self.layout.chunks)

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The same with sends and receives, in order of posting."""
        return _rows(self.layout.pipeline_schedule, self.layout.pp, self.micro_batches, self.layout.chunks)

    def group(self, axis: str) -> GroupShape:
        """How the groups of an axis lie on nodes."""
        span = self.layout.span(axis)
        return GroupShape(span.size, max(1, self.device.gpus_per_node // span.stride))


@lru_cache(maxsize=64)
def _program(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Program:
    return schedules.build(schedule, ranks, micro_batches, chunks)


@lru_cache(maxsize=64)
def _rows(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    return schedules.with_messages(_program(schedule, ranks, micro_batches, chunks))
