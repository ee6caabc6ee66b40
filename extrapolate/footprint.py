"""Turns a measured job into the memory of one of its ranks at any size, or the reason why it can't be told.

A peak that the profiler recorded is kept, and only states that are sharded otherwise are added or taken off. Without
one the states follow from the parameters, which the collectives of gradients carry, and the activations from the model
that the shapes show (memory.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.anatomy import Anatomy, outlined, stages_in
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.held import held_micro_batches, schedule_of
from scaletrace.extrapolate.layout import DATA_AXES, Layout, axis_of
from scaletrace.extrapolate.memory import (
    StateBytes,
    layer_activation_bytes,
    measured_peak_bytes,
    peak_memory,
    rank_parameters,
)
from scaletrace.extrapolate.rewrite.data import ELEMENT_BYTES
from scaletrace.extrapolate.traced_memory import fused_attention
from scaletrace.extrapolate.workload import read_model
from scaletrace.parse.build import Built
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job

SCALAR_BYTES = 64
"""An all-reduce of no more than this carries a loss or a norm, not gradients."""
_OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)")
_MOMENTS: Mapping[str, int] = {"sgd": 1, "adagrad": 1, "rmsprop": 1, "muon": 1, "lion": 1}
"""fp32 values an optimizer keeps beside each parameter; two (Adam) where its name is another or not known."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a rank holds. `layout` says micro batch, length and micro batches as measured.

    parameters      of one tensor and pipeline slice, from what the data axis moves; 0 = not known
    measured_bytes  largest peak of a rank that the profiler recorded; 0 = none
    missing         why the model is not known, where it is not
    on_device       whether the job ran on devices at all
    """

    layout: Layout
    states: StateBytes
    parameters: float = 0.0
    model: Model | None = None
    measured_bytes: float = 0.0
    missing: str = ""
    on_device: bool = True

    @property
    def source(self) -> str:
        return "measured and stretched" if self.measured_bytes else "modelled"

    def at(self, layout: Layout) -> tuple[float | None, str]:
        """(bytes at the peak of the rank that needs most, "") under `layout`, or (None, the reason)."""
        if not self.on_device:
            return None, "the job ran on CPUs; what a host holds beside it is not modelled"
        # The measured schedule suits its own number of chunks; another number takes the usual schedule for it.
        same = bool(layout.schedule) or layout.chunks == self.layout.chunks
        target = layout.over(self.layout if same else replace(self.layout, schedule=""))
        if self.measured_bytes:
            return self._from_peak(target)
        if self.model is None:
            return None, f"no peak was recorded (profile_memory=True) and activations are not known: {self.missing}"
        try:
            found = peak_memory(self.model, target, self.states)
        except UsageError as error:
            return None, str(error)
        if not self.parameters or target.pp > 1:
            return found.total, ""
        modelled = found.weights + found.gradients + found.optimizer
        return found.total - modelled + self._states_bytes(target), ""

    def _from_peak(self, target: Layout) -> tuple[float | None, str]:
        """The recorded peak with other shards of the states, and other activations where the micro batch changes."""
        sharding = (target.shards, target.zero, target.fsdp) != (self.layout.shards, self.layout.zero, self.layout.fsdp)
        if sharding and not self.parameters:
            return None, "the peak was recorded, but not how many parameters the ranks share"
        total = self.measured_bytes + self._states_bytes(target) - self._states_bytes(self.layout)
        if self.layout.mbs and (target.mbs, target.seq) != (self.layout.mbs, self.layout.seq):
            if self.model is None:
                return None, f"another micro batch holds other activations, which are not known: {self.missing}"
            total += self._activation_bytes(target) - self._activation_bytes(self.layout)
        return max(total, 0.0), ""

    def _activation_bytes(self, layout: Layout) -> float:
        model = self.model
        if model is None:
            return 0.0
        tokens = layout.mbs * layout.seq / layout.cp
        each = layer_activation_bytes(model, layout, tokens, layout.seq, self.states.activation, self.states.fused)
        return model.layers / layout.pp * each

    def _states_bytes(self, layout: Layout) -> float:
        """Weights, gradients and optimizer states of one rank from the parameters alone."""
        sharded = layout.fsdp > 1 or layout.zero == 3
        weights = layout.shards if sharded else 1
        gradients = layout.shards if sharded or layout.zero >= 2 else 1
        each = self.states.weight / weights + self.states.gradient / gradients + self.states.optimizer / layout.shards
        return self.parameters * each


def footprint_of(built: Built, graph: Graph, anatomy: Anatomy, layout: Layout, health: Health) -> Footprint:
    """The footprint of a measured job; `graph` is the built one with every group and size known."""
    on_device = any(lane.is_device for lane in graph.lanes) and bool(graph.nodes(NodeKind.KERNEL).any())
    peaks = [peak for trace in built.job.ranks for peak in measured_peak_bytes(trace.events).values()]
    gradient_bytes, element = gradients_of(graph, anatomy)
    parameters = gradient_bytes / element if element else 0.0
    model, size, missing = None, 0.0, ""
    measured = layout
    try:
        found = read_model(built, layout, anatomy)
        model, measured, size, missing = found.model, found.layout, found.element_bytes, found.doubt
    except InputError as error:
        missing = str(error)
    measured = with_schedule(built.job, measured, anatomy.micro_batches)
    if not on_device:
        return Footprint(measured, StateBytes(), on_device=False)
    states = states_of(built.job, element, size)
    health.guessed["optimizer states taken to be fp32, as many as the optimizer's name says"] += 1
    if model is not None:
        model = with_ends(model, measured, parameters or (gradient_bytes / size if size else 0.0), health)
    return Footprint(
        measured,
        states,
        parameters,
        None if missing else model,
        float(max(peaks, default=0)),
        missing,
    )


def states_of(job: Job, gradient_bytes: int, compute_bytes: float) -> StateBytes:
    """Bytes an element of what a measured job keeps.

    gradient_bytes  of an element as gradients are reduced, 0 = not seen
    compute_bytes   of an element of the layers' products, 0 = not seen
    """
    weight = compute_bytes or gradient_bytes or 2.0
    master = 4.0 if weight < 4.0 and compute_bytes else 0.0
    optimizer = 4.0 * _moments(job) + master
    return StateBytes(weight, gradient_bytes or weight, optimizer, compute_bytes or weight, fused_attention(job))


def with_schedule(job: Job, layout: Layout, micro_batches: int) -> Layout:
    """The layout with the micro batches of a step and, of a pipeline, the schedule whose stages hold as many as were seen."""
    count = layout.microbatches or max(1, micro_batches)
    if layout.pp == 1 or layout.schedule or layout.chunks > 1:
        return replace(layout, microbatches=count)
    sections, _ = outlined(job, stages_in(job, layout))
    held: dict[int, float] = {}
    for rank, stage in stages_in(job, layout).items():
        held[stage] = max(held.get(stage, 0.0), held_micro_batches(sections[rank]))
    return replace(layout, microbatches=count, schedule=schedule_of(held, layout.pp, count))


def with_ends(model: Model, layout: Layout, parameters: float, health: Health) -> Model:
    """The model with embedding and head as one where the gradients of a rank (`parameters`, 0 = not seen) say so."""
    if not parameters or layout.pp > 1:
        health.guessed["embedding and head taken to have weights of their own"] += 1
        return model
    return min(
        (model, replace(model, tied=True)),
        key=lambda one: abs(rank_parameters(one, replace(layout, fsdp=1)) - parameters),
    )


def gradients_of(graph: Graph, anatomy: Anatomy) -> tuple[float, int]:
    """(bytes of all gradients of one rank, bytes an element), from what one micro batch reduces; (0, 0) unknown."""
    kinds = {"all_reduce", "reduce_scatter"}
    carries = [
        item.kind in kinds
        and item.group >= 0
        and axis_of(graph.groups[item.group].axis) in DATA_AXES
        and max(item.bytes_in, item.bytes_out) > SCALAR_BYTES
        for item in graph.collectives
    ]
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & np.array([*carries, False], np.bool_)[graph.instance])
    if not len(nodes):
        return 0.0, 0
    scatters = any(graph.collectives[at].kind == "reduce_scatter" for at in graph.instance[nodes].tolist())
    total: dict[tuple[int, int, int], float] = {}
    elements: set[int] = set()
    for node in nodes.tolist():
        item = graph.collectives[int(graph.instance[node])]
        if scatters and item.kind != "reduce_scatter":
            continue
        key = (int(graph.rank[node]), int(graph.step[node]), int(anatomy.micro_batch[node]))
        total[key] = total.get(key, 0.0) + max(item.bytes_in, item.bytes_out)
        elements.add(ELEMENT_BYTES.get(item.dtype, 0))
    whole = max(total.values())
    return whole, next(iter(elements)) if len(elements) == 1 else 0


def _moments(job: Job) -> int:
    """fp32 values beside each parameter, by the name of the optimizer in its step's annotation."""
    for trace in job.ranks:
        for text in trace.events.strings:
            found = _OPTIMIZER.match(text)
            if found:
                return next((count for name, count in _MOMENTS.items() if name in found[1].lower()), 2)
    return 2
