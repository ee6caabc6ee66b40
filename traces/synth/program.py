"""Turns a description of what each rank does into instructions: host operations, kernels, collectives, waits.

A program is written down once a step and rank, as one would write the training loop. Times of kernels and transfers
come with it; when things start is what `schedule` works out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMPUTE_STREAM = 7

KINDS = {
    "all_reduce": ("allreduce", "AllReduce_Sum", "c10d::allreduce_"),
    "all_gather": ("_allgather_base", "AllGather", "c10d::_allgather_base_"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter_Sum", "c10d::_reduce_scatter_base_"),
    "all_to_all": ("all_to_allv", "SendRecv", "c10d::alltoall_base_"),
    "broadcast": ("broadcast", "Broadcast", "c10d::broadcast_"),
    "send": ("send", "SendRecv", "c10d::send"),
    "recv": ("recv", "SendRecv", "c10d::recv_"),
}
"""Kind → (collective name in the metadata, part of the NCCL kernel's name, dispatcher op)."""

DTYPES = {"Float": ("f32", 4), "BFloat16": ("bf16", 2), "Half": ("f16", 2), "Byte": ("u8", 1), "Long": ("i64", 8)}
"""Data type in the metadata → (part of the kernel's name, bytes an element)."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A group as the header's pg_config lists it; `name` is its creation number as text."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostOp:
    """Work of the calling thread that launches nothing."""

    name: str
    dur_ns: int = 5_000


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch. `blocks` is the grid; `shapes` goes into "Input Dims" of the op that launched it.

    outer  the operator that a model calls and that contains `op`, with its own shapes ("": `op` is called itself)
    tag    names this operator for its backward node; it gets an autograd sequence number
    """

    name: str
    dur_ns: int
    op: str = "aten::op"
    stream: int = COMPUTE_STREAM
    blocks: int = 132
    shapes: tuple[tuple[int, ...], ...] = ()
    outer: str = ""
    outer_shapes: tuple[tuple[int, ...], ...] = ()
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or message. It starts once its stream and the compute stream have come that far, on each rank by
    itself, and ends on all ranks `dur_ns` after the last of them has started.

    group        name of the ProcessGroup
    in_elements, out_elements  as record_param_comms counts them
    peer         global rank of the other side, for send and recv
    slowdown     how much slower kernels of its ranks run while it is resident there (0.5: 1.5 times as long)
    mark         a name for a `Wait` that awaits just this one
    """

    kind: str
    group: str
    dur_ns: int
    in_elements: int
    out_elements: int
    dtype: str = "BFloat16"
    stream: int = 20
    peer: int = -1
    channels: int = 24
    slowdown: float = 0.0
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` waits for all work given to stream `on` so far (cudaEventRecord, cudaStreamWaitEvent).

    With `mark` it waits for the collective of that name only, whose event was recorded when it was issued.
    """

    on: int
    stream: int = COMPUTE_STREAM
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for the whole device, as `loss.item()` or a timer makes it do."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """A named range of the host (record_function) around further instructions."""

    name: str
    body: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """An autograd node around what it runs; `of` is the tag of its forward operator, "" for a node without one.

    It runs on the calling thread, as with `torch.autograd.set_multithreading_enabled(False)`.
    """

    name: str
    of: str
    body: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """The forward of an `nn.Module`, as a profiler with `with_modules` or `with_stack` shows it (a Python frame)."""

    name: str
    body: tuple[Instruction, ...]


Range = Annotation | Backward | Module
Instruction = HostOp | Kernel | Collective | Wait | Sync | Range


@dataclass(frozen=True, slots=True)
class SynthJob:
    """Programs of one step by rank, and the world that they run in.

    Ranks of the world without a program are not written; collectives then go without them.
    collective_slowdown  how much slower a transfer is while a kernel runs on one of its ranks
    model                what the manifest says of the model: parameters, tokens_per_step, flops_per_step of the job
    """

    world_size: int
    groups: tuple[ProcessGroup, ...]
    programs: Mapping[int, tuple[Instruction, ...]]
    steps: int = 3
    device: str = "NVIDIA H100 80GB HBM3"
    sm_count: int = 132
    gpus_per_node: int = 8
    nccl_version: str = "2.27.5"
    name: str = "synthetic"
    facts: Mapping[str, str] = field(default_factory=dict)
    collective_slowdown: float = 0.0
    model: Mapping[str, float | str] = field(default_factory=dict)

    def group(self, name: str) -> ProcessGroup:
        return next(group for group in self.groups if group.name == name)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Time of the calling thread, in ns; a call of the driver starts `lead_ns` into its op."""

    op_ns: int = 9_000
    lead_ns: int = 3_000
    launch_ns: int = 4_000
    collective_ns: int = 38_000
    collective_lead_ns: int = 14_000
    wait_ns: int = 4_500
    marked_wait_ns: int = 2_500
    enter_ns: int = 1_500
    leave_ns: int = 800
    sync_ns: int = 6_000
    step_ns: int = 60_000
    to_device_ns: int = 1_500
