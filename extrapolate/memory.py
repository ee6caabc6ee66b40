"""Turns a model, a layout and the bytes of its states into the memory that each rank of a pipeline needs at its peak.

Activations follow Korthikanti et al. (2205.05198), counted tensor by tensor so that gated MLPs and grouped queries fit
too; how many micro batches are alive on a stage is read off the schedule's own action list, not from a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite import schedules
from scaletrace.extrapolate.rewrite.schedules import Op, Program, build
from scaletrace.parse.events import Events

RESERVED_BYTES = 1.5e9
"""Context, libraries and workspaces of a device, before the first tensor (prior; NVIDIA contexts take 0.5 to 2 GB)."""
CHANNEL_BYTES = 24 * 2 * 4 * 1024 * 1024
"""Buffers of one NCCL communicator: 24 channels, send and receive, 4 MiB each (NCCL_BUFFSIZE)."""
FRAGMENTATION = 0.06
"""Share of the tensors that the caching allocator holds on top (prior; 3 to 10 % is usual)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes an element of what training keeps. The defaults are mixed precision as Megatron and FSDP2 keep it.

    weight     parameters in the type of the compute, gradient what is accumulated
    optimizer  moments and the fp32 master copy together
    activation type of the activations
    fused      attention keeps no scores; an unfused one keeps them, their softmax and a dropout mask
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    activation: float = 2.0
    fused: bool = True

    @staticmethod
    def of(element_bytes: float, fused: bool = True) -> StateBytes:
        """For a job that computes in this type: in single precision there is no second copy of the weights."""
        master = 12.0 if element_bytes < 4 else 8.0
        return StateBytes(weight=element_bytes, activation=element_bytes, optimizer=master, fused=fused)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak of one rank, by what they hold. `total` is what must fit.

    logits: with what the last norm and the head keep;  gathered: of FSDP's units;  buffers: of communicators
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    buffers: float
    fragmentation: float
    reserved: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in self.__slots__))

    @property
    def states(self) -> float:
        """Weights, gradients and what the optimizer keeps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def tensors(self) -> float:
        """What an allocator's peak counts: neither its own waste, nor what libraries take beside it."""
        return self.states + self.activations + self.logits + self.gathered

    def scaled(self, states: float, rest: float) -> Memory:
        """States and all other tensors multiplied, as a measured peak says; buffers and context are not in a peak."""
        out = replace(
            self,
            weights=self.weights * states,
            gradients=self.gradients * states,
            optimizer=self.optimizer * states,
            activations=self.activations * rest,
            logits=self.logits * rest,
            gathered=self.gathered * rest,
        )
        return replace(out, fragmentation=FRAGMENTATION * out.tensors) if self.fragmentation else out

    def on_host(self) -> Memory:
        """The same without what only a device's allocator and libraries take."""
        return replace(self, buffers=0.0, fragmentation=0.0, reserved=0.0)


def alive(program: Program) -> tuple[int, ...]:
    """Largest number of (chunk, micro batch) whose activations each rank holds at once."""
    out = []
    for row in program.actions:
        now = most = 0
        for action in row:
            if action.op is Op.FORWARD:
                now += 1
                most = max(most, now)
            elif action.op in (Op.BACKWARD, Op.WEIGHT):
                now -= 1
        out.append(most)
    return tuple(out)


def layer_activation_bytes(
    model: Model, layout: Layout, tokens: float, seq: float, bytes_each: float = 2.0, fused: bool = True
) -> float:
    """What one layer keeps for its backward pass, for `tokens` tokens of one rank in sequences of `seq`.

    With "full" checkpointing only the layer's input stays. Fused attention keeps no scores; without fusion they stay
    (5 a s² b in 2205.05198), unless "selective" checkpointing makes them again.
    """
    h, kv, width = model.hidden, model.kv_width, model.mlp_width
    split = layout.tp if layout.sp else 1
    if layout.recompute == "full":
        return tokens * h * bytes_each / split
    dropout = 2 * h / bytes_each if model.family == "gpt" else 0.0
    whole = 4 * h + dropout  # inputs of two norms, of the query-key-value product and of the MLP, dropout masks
    hidden_tensors = 2 if model.mlp_matrices == 2 else 4
    active = model.experts_per_token
    parted = 2 * h + 2 * kv + active * hidden_tensors * width  # query, key, value, attention output; MLP
    kept = tokens * bytes_each * (whole / split + parted / layout.tp)
    if fused or layout.recompute == "selective":
        return kept
    scores = 2 * bytes_each + (1.0 if model.family == "gpt" else 0.0)
    return kept + tokens * model.heads / layout.tp * seq * scores


@lru_cache(maxsize=4096)
def held_by_rank(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[tuple[int, ...], int]:
    """(`alive` of a schedule, the rank that holds the last stage: the first one where the stages go there and back)."""
    schedules.check(schedule, ranks, micro_batches, chunks)
    if schedules.canonical(schedule) in _HOLD_ALL:
        return (micro_batches * chunks,) * ranks, ranks - 1
    program = build(schedule, ranks, _as_if(schedule, ranks, micro_batches, chunks), chunks)
    return alive(program), program.rank_of_stage[-1]


_HOLD_ALL = ("GPipe", "LoopedBFS")
"""Schedules that run every forward before the first backward."""


def _as_if(schedule: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """A number of micro batches with which every rank holds as many at once: more than fill a pipeline change nothing.

    Interleaved ones come in whole rounds of `ranks`, or of more, whose length depends on their number.
    """
    enough = ranks * (2 * chunks + 4)
    in_rounds = schedules.canonical(schedule).startswith("Interleaved")
    return enough if micro_batches > enough and (not in_rounds or micro_batches % ranks == 0) else micro_batches


def _ends(layout: Layout, rank: int) -> tuple[bool, bool]:
    """Whether a pipeline rank holds the embedding, and whether it holds the head."""
    if layout.pp == 1 or not layout.microbatches:
        return rank == 0, rank == layout.pp - 1
    return rank == 0, rank == held_by_rank(layout.pipeline_schedule, layout.pp, layout.microbatches, layout.chunks)[1]


def rank_parameters(model: Model, layout: Layout, rank: int = 0) -> float:
    """Parameters of the pipeline rank `rank`'s stages after tensor and expert parallelism, before sharding over data."""
    per_layer = (model.layer_parameters - model.experts * model.expert_parameters) / layout.tp
    per_layer += model.experts * model.expert_parameters / (layout.tp * layout.ep)
    layers = -(-model.layers // layout.stages) * layout.chunks if layout.pp > 1 else model.layers
    ends = sum(_ends(layout, rank))
    embedding = model.embedding_parameters / layout.tp
    if ends == 2 and model.tied:
        ends = 1
    return min(layers, model.layers) * per_layer + ends * embedding


def rank_memory(
    model: Model,
    layout: Layout,
    rank: int = 0,
    states: StateBytes | None = None,
) -> Memory:
    """The peak of one pipeline rank. The layout must say mbs, seq and microbatches (UsageError otherwise)."""
    states = states or StateBytes()
    if not (layout.mbs and layout.seq and layout.microbatches):
        raise UsageError(f"layout {layout}: memory needs mbs, seq and microbatches")
    held = 1
    if layout.pp > 1:
        held = held_by_rank(layout.pipeline_schedule, layout.pp, layout.microbatches, layout.chunks)[0][rank]
    embeds, heads = _ends(layout, rank)
    parameters = rank_parameters(model, layout, rank)
    sharded = (layout.fsdp > 1 or layout.zero == 3) and layout.pp == 1
    # In a pipeline FSDP keeps weights gathered and gradients whole until the last micro batch of the step.
    of_weights = layout.shards if sharded else 1
    of_gradients = layout.shards if sharded or (layout.zero >= 2 and layout.pp == 1) else 1
    tokens = layout.mbs * layout.seq / layout.cp
    layer = layer_activation_bytes(model, layout, tokens, layout.seq, states.activation, states.fused)
    layers = model.layers / layout.stages
    working = 0.0
    if layout.recompute == "full":
        whole = replace(layout, recompute="none")
        working = layer_activation_bytes(model, whole, tokens, layout.seq, states.activation, states.fused)
        working = max(0.0, working - layer)  # the input of the layer that is made again is kept already
    # Outside the layers (2205.05198, section 4.3): the mask of the dropout behind the embedding, inputs of norm and head.
    width = tokens * model.hidden / (layout.tp if layout.sp else 1)
    mask = width if embeds and model.family == "gpt" else 0.0
    logits = tokens * model.vocab / layout.tp * (states.activation * 2 + 4) + 2 * width * states.activation
    unit = model.layer_parameters / layout.tp / (layout.ep if model.experts > 1 else 1)
    gathered = 2.0 * unit * states.weight + unit * states.gradient if sharded else 0.0
    weights = parameters * states.weight / of_weights
    gradients = parameters * states.gradient / of_gradients
    optimizer = parameters * states.optimizer / layout.shards
    activations = held * (layers * layer + mask / layout.chunks) + working
    logits = logits if heads else 0.0
    tensors = weights + gradients + optimizer + activations + logits + gathered
    communicators = sum(degree > 1 for degree in (layout.dp, layout.fsdp, layout.tp, layout.pp, layout.cp, layout.ep))
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        gathered=gathered,
        buffers=communicators * float(CHANNEL_BYTES),
        fragmentation=FRAGMENTATION * tensors,
        reserved=RESERVED_BYTES,
    )


def peak_memory(model: Model, layout: Layout, states: StateBytes | None = None) -> Memory:
    """The rank that needs most: the first stage holds most micro batches, the last one the logits."""
    ranks = {0, layout.pp - 1, min(1, layout.pp - 1)}
    return max((rank_memory(model, layout, rank, states) for rank in ranks), key=lambda memory: memory.total)


def stretch_peaks(measured_bytes: Sequence[float], old: Program, new: Program, ends: int = 1) -> tuple[float, ...]:
    """Peaks of a pipeline's ranks under another schedule, from those measured under `old` (same ranks and layers).

    The slope of the peaks over the micro batches alive (without `ends` ranks at either end, which hold embedding and
    head) is what one micro batch takes on a rank; all else stays. Raises UsageError where the peaks don't tell it.
    """
    held = np.array(alive(old), float) / old.chunks
    peaks = np.array(measured_bytes, float)
    inner = slice(ends, len(peaks) - ends) if len(peaks) > 2 * ends + 1 else slice(None)
    if len(peaks) != old.ranks or new.ranks != old.ranks or len(set(held[inner].tolist())) < 2:
        raise UsageError(
            "measured peaks tell activations only where the stages hold different numbers of micro batches"
        )
    slope = float(np.polyfit(held[inner], peaks[inner], 1)[0])
    change = np.array(alive(new), float) / new.chunks - held
    return tuple((peaks + slope * change).tolist())


def measured_peak_bytes(events: Events) -> Mapping[int, int]:
    """Largest "Total Allocated" that a trace's memory events report, per accelerator; empty where it has none."""
    total, kind = events.ints("Total Allocated"), events.ints("Device Type")
    rows = np.flatnonzero((total >= 0) & (kind > 0))
    device = events.ints("Device Id")[rows]
    return {int(number): int(total[rows][device == number].max()) for number in np.unique(device)}
