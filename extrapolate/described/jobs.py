"""Turns a model, a layout and a device into the lane program of one training step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.collectives import (
    GroupShape,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    send_s,
)
from scaletrace.extrapolate.described.constants import (
    ADAM_BYTES_PER_PARAMETER,
    FP8_OVER_BF16,
    GRADIENT_PASS_BYTES_PER_PARAMETER,
    Device,
    KernelCosts,
)
from scaletrace.extrapolate.described.fsdp import ShardedStep, sharded_program
from scaletrace.extrapolate.described.kernels import head_s, layer_s
from scaletrace.extrapolate.described.lanes import FrozenProgram, LaneTimes, solve_increasing
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.pipeline import Pipeline, pipeline_program
from scaletrace.extrapolate.described.sharded_optimizer import OwnedStep, owned_program
from scaletrace.extrapolate.described.spread import straggle
from scaletrace.extrapolate.described.stages import layers_by_chunk, layers_by_cost
from scaletrace.extrapolate.interference import NCCL_CHANNELS

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a described job is cut up, and the structural facts that its description must state.

    dp counts data-parallel replicas (of whole model copies cut by tp × cp × pp); world = dp × tp × cp × pp.
    gradient_bytes, gathered_bytes   bytes an element of the reduced gradients and of the gathered parameters
    recompute                        none, selective (the attention core) or full
    overlapped                       parameter and gradient traffic runs beside compute
    sharded_optimizer                each data-parallel rank updates its share (ZeRO-1, distributed optimizer)
    fp8_layers                       layers run in FP8 while the head stays in bf16
    nic_cap_Bps                      network rate of one ring where channels or NICs are limited (inf = not)
    channels                         NCCL channels (SMs held) of the data-parallel communicator, where the job caps them
    tensors_apart                    weights of a layer that are gathered and reduced one by one (0 = fused buffers)
    balanced_stages                  layers are dealt to stages by cost, so that the head's stage holds fewer
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    overlapped: bool = True
    sharded_optimizer: bool = True
    gradient_bytes: float = 2.0
    gathered_bytes: float = 2.0
    fp8_layers: bool = False
    nic_cap_Bps: float = math.inf
    channels: int = NCCL_CHANNELS
    tensors_apart: int = 0
    balanced_stages: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise UsageError(f"layout: recompute is {self.recompute!r}; one of {', '.join(RECOMPUTE)}")
        for name in ("dp", "tp", "pp", "cp", "ep", "chunks", "micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"layout: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def data_group(self, device: Device) -> GroupShape:
        """The ranks that share parameters: dp × cp, with tp neighbours between them on a node."""
        return GroupShape(self.dp * self.cp, max(1, device.gpus_per_node // self.tp), self.nic_cap_Bps)


@dataclass(frozen=True, slots=True)
class Job:
    """A described step, ready to be timed: the program, and how many ranks its slowest is the slowest of."""

    program: FrozenProgram
    device: Device
    world: int
    channels: int = NCCL_CHANNELS

    def step_s(self, unit_s: float) -> float:
        """Step time when compute of weight 1 takes `unit_s` on an average rank."""
        slow = unit_s * straggle(self.device.spread, self.world)
        return self.times(slow).makespan_s

    def times(self, unit_s: float) -> LaneTimes:
        """Start and end of every operation when compute of weight 1 takes `unit_s`."""
        return self.program.run(unit_s, self.device.kernel_slowdown(self.channels), self.device.collective_slowdown)

    def unit_for(self, step_s: float) -> float:
        """The compute time that gives this step time: the one number calibrated on the smallest run."""
        return solve_increasing(self.step_s, step_s, guess=step_s / max(1e-9, self._bound_weight()))

    def _bound_weight(self) -> float:
        lanes = self.program.lane_ptr
        return max(float(self.program.weight[lanes[2 * r] : lanes[2 * r + 1]].sum()) for r in range(self.program.ranks))


def pipeline_job(model: Model, layout: Layout, device: Device, costs: KernelCosts | None = None) -> Job:
    """A step under data, tensor, context and pipeline parallelism.

    Without `costs`, weight 1 is one layer's forward of one micro batch, to be calibrated; with `costs` the weights are
    modelled seconds, so that `step_s(1.0)` is a prediction without any calibration.
    """
    if costs is None:
        head = model.head_in_layers * (FP8_OVER_BF16 if layout.fp8_layers else 1.0)
        forward = _stage_work(model, layout, 1.0, head)
        backward = _stage_work(model, layout, 3.0 if layout.recompute == "full" else 2.0, 2 * head)
    else:
        layer = layer_s(model, device, costs, layout.micro_batch, layout.tp, layout.cp, layout.ep)
        last = head_s(model, device, costs, layout.micro_batch, layout.tp, layout.cp)
        again = {"none": 0.0, "selective": layer.attention_s, "full": layer.forward_s}[layout.recompute]
        forward = _stage_work(model, layout, layer.forward_s, last.forward_s)
        backward = _stage_work(model, layout, layer.backward_s + again, last.backward_s)
    gather, reduce = _parameter_traffic_s(model, layout, device)
    return Job(
        pipeline_program(
            Pipeline(
                stages=layout.pp,
                chunks=layout.chunks,
                micro_batches=layout.micro_batches,
                forward=forward,
                backward=backward,
                send_s=message_s(model, layout, device),
                gather_s=gather,
                reduce_s=reduce,
                end_s=end_of_step_s(model, layout, device),
                overlapped=layout.overlapped,
            )
        ).freeze(),
        device,
        layout.world,
        layout.channels,
    )


def _stage_work(model: Model, layout: Layout, layer: float, head: float) -> tuple[tuple[float, ...], ...]:
    """Work of [stage][chunk] where a layer costs `layer` and the last chunk carries the head."""
    chunks = layout.pp * layout.chunks
    counts = layers_by_cost(model.layers, chunks, head / layer) if layout.balanced_stages else None
    counts = counts or layers_by_chunk(model.layers, chunks)
    work = [[layer * counts[chunk * layout.pp + stage] for chunk in range(layout.chunks)] for stage in range(layout.pp)]
    work[-1][-1] += head
    return tuple(tuple(row) for row in work)


def _parameter_traffic_s(model: Model, layout: Layout, device: Device) -> tuple[float, float]:
    """Seconds of one chunk's parameter gather and of its gradient reduction on the data-parallel group."""
    group = layout.data_group(device)
    per_chunk = model.parameters / (layout.tp * layout.pp * layout.chunks)
    if group.size == 1:
        return 0.0, 0.0
    messages = max(1, round(layout.tensors_apart * model.layers / (layout.pp * layout.chunks)))
    gathered = per_chunk * layout.gathered_bytes / messages
    reduced = per_chunk * layout.gradient_bytes / messages
    if not layout.sharded_optimizer:
        return 0.0, messages * all_reduce_s(device, reduced, group)
    return messages * all_gather_s(device, gathered, group), messages * all_gather_s(device, reduced, group)


def message_s(model: Model, layout: Layout, device: Device) -> float:
    """One activation message between stages, cut by tp (scatter-gather) and cp; 0 without a pipeline."""
    if layout.pp == 1:
        return 0.0
    size_bytes = layout.micro_batch * (model.seq / layout.cp) * model.hidden * 2 / layout.tp
    return send_s(device, size_bytes, across_nodes=layout.world > device.gpus_per_node)


def end_of_step_s(model: Model, layout: Layout, device: Device) -> float:
    """Optimizer, one pass over gradients or FP8 weights, two scalar all-reduces, and the tied embedding's all-reduce."""
    shard = model.parameters / (layout.tp * layout.pp)
    owned = shard / (layout.dp * layout.cp) if layout.sharded_optimizer else shard
    hbm = device.hbm_share * device.hbm_Bps
    seconds = owned * ADAM_BYTES_PER_PARAMETER / hbm + shard * GRADIENT_PASS_BYTES_PER_PARAMETER / hbm
    seconds += 2 * all_reduce_s(device, 4, GroupShape(layout.world, device.gpus_per_node))
    if model.tied and layout.pp > 1:
        seconds += all_reduce_s(device, model.embedding_parameters / layout.tp * 2, GroupShape(2, 1))
    return seconds


def sharded_job(model: Model, layout: Layout, device: Device, regather: bool = True, rank_parameters: float = 0) -> Job:
    """A step under FSDP or ZeRO over dp × cp ranks, tp inside; weight 1 is the whole step's compute.

    rank_parameters overrides the parameters of the model where the source prints its own count.
    """
    group = layout.data_group(device)
    total = (rank_parameters or model.parameters) / layout.tp
    root = model.embedding_parameters * (1 if model.tied else 2) / layout.tp
    unit = (total - root) / model.layers

    def gather(parameters: float) -> float:
        return all_gather_s(device, parameters * layout.gathered_bytes, group)

    def reduce(parameters: float) -> float:
        return all_gather_s(device, parameters * layout.gradient_bytes, group)

    hbm = device.hbm_share * device.hbm_Bps
    world = GroupShape(layout.world, device.gpus_per_node)
    message_bytes = layout.micro_batch * (model.seq / layout.cp) * model.hidden * 2
    step = ShardedStep(
        units=model.layers,
        gather_s=gather(unit),
        reduce_s=reduce(unit),
        root_gather_s=gather(root),
        root_reduce_s=reduce(root),
        end_s=total / group.size * ADAM_BYTES_PER_PARAMETER / hbm + 2 * all_reduce_s(device, 4, world),
        forward_share=1 / 4 if layout.recompute == "full" else 1 / 3,
        regather=regather,
        accumulation=layout.micro_batches,
        blocking_s=2 * all_reduce_s(device, message_bytes, GroupShape(layout.tp, device.gpus_per_node)),
    )
    return Job(sharded_program(step).freeze(), device, layout.world, layout.channels)


BUCKET_ELEMENTS = 512 * 2**20
"""Elements of one gradient bucket that InternEvo reduces at once."""


def owned_job(model: Model, layout: Layout, device: Device, owners: int, inside_node: bool) -> Job:
    """A step with an optimizer sharded by whole tensors over `owners` ranks, in the node or over all dp ranks."""
    group = layout.data_group(device)
    total = model.parameters / layout.tp
    hbm = device.hbm_share * device.hbm_Bps
    # Whole tensors can't be cut: whoever owns the embedding updates all of it.
    largest_share = max(total / owners, model.embedding_parameters / layout.tp)
    optimizer = largest_share * ADAM_BYTES_PER_PARAMETER / hbm
    optimizer += total * GRADIENT_PASS_BYTES_PER_PARAMETER / hbm
    optimizer += 2 * all_reduce_s(device, 4, GroupShape(layout.world, device.gpus_per_node))
    if inside_node:
        buckets = max(1, math.ceil(total / BUCKET_ELEMENTS))
        reduce = (all_reduce_s(device, total / buckets * layout.gradient_bytes, group),) * buckets
        node = GroupShape(min(owners, group.members_per_node), group.members_per_node)
        broadcast = owners * broadcast_s(device, total / owners * 2, node)
    else:
        reduce = (broadcast_s(device, total / owners * layout.gradient_bytes, group),) * owners
        broadcast = owners * broadcast_s(device, total / owners * 2, group)
    step = OwnedStep(layout.micro_batches, reduce, broadcast, optimizer, 1 / 4 if layout.recompute == "full" else 1 / 3)
    return Job(owned_program(step).freeze(), device, layout.world, layout.channels)
