"""Turns a described job into checked sizes, and names what its expansion consists of: kernels, collectives, waits, ranges."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.collectives import GroupShape
from scaletrace.extrapolate.described.constants import Device, KernelCosts
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.layout import Layout

GATHER, REDUCE, TENSOR, EXPERT, CONTEXT, REPLICATE = 20, 24, 28, 32, 36, 40
RECEIVE_FORWARD, SEND_FORWARD, RECEIVE_BACKWARD, SEND_BACKWARD = 44, 48, 52, 56
"""Streams, one for each use, as PyTorch and Megatron keep one communicator for each."""


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """A kernel: seconds before calibration, grid, and the shapes of the op that launches it."""

    name: str
    op: str
    seconds: float
    blocks: int
    shapes: tuple[tuple[int, ...], ...] = ()


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


@dataclass(frozen=True, slots=True)
class PlannedWait:
    """The compute stream waits for another."""

    on: int


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A named range of the host around further items."""

    name: str
    body: tuple[Item, ...]


Item = PlannedKernel | PlannedCollective | PlannedWait | PlannedRange


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
        if layout.pipeline_schedule not in ("1F1B", "Interleaved1F1B"):
            raise UsageError(f"schedule {layout.pipeline_schedule} can't be described yet; 1F1B or Interleaved1F1B")

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

    def group(self, axis: str) -> GroupShape:
        """How the groups of an axis lie on nodes."""
        span = self.layout.span(axis)
        return GroupShape(span.size, max(1, self.device.gpus_per_node // span.stride))
