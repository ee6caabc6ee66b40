"""Turns a measured job into the memory of one of its ranks at any size, or the reason why it can't be told.

A peak that the profiler recorded is kept, and only states that are sharded otherwise are added or taken off. Without
one the states follow from the parameters, which the collectives of gradients carry, and the activations from the model
that the shapes show (memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.anatomy import Anatomy, dissect, outlined, stages_in
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.held import held_micro_batches, schedule_of
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, Layout, axis_of, measured_layout
from scaletrace.extrapolate.memory import (
    CHANNEL_BYTES,
    FRAGMENTATION,
    RESERVED_BYTES,
    Memory,
    StateBytes,
    measured_peak_bytes,
    peak_memory,
    rank_parameters,
)
from scaletrace.extrapolate.rewrite.data import ELEMENT_BYTES
from scaletrace.extrapolate.rewrite.gradients import trains
from scaletrace.extrapolate.traced_memory import Traced, states_of, traced_memory
from scaletrace.extrapolate.transfers import with_groups
from scaletrace.extrapolate.workload import read_model
from scaletrace.parse.build import Built
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job

SCALAR_BYTES = 64
"""An all-reduce of no more than this carries a loss or a norm, not gradients."""
FROZEN = 0.9
"""A rank that reduces fewer gradients than this share of its weights does not train all of them."""
NEAREST = 0.25
"""Share by which the layers' weights may miss those of the nearest family for it to stand for their activations."""
ACCOUNTED = (0.75, 4 / 3)
"""Weights that shapes may show of those that are reduced, for the shapes to tell the memory."""
UNKNOWN_GRADIENT = 4.0
"""Bytes of a gradient's element where neither its collective nor a product of the layers says them."""
_NO_BACKWARD = "no peak was recorded (profile_memory=True), and no backward pass is seen that would keep activations"
_OF_STATES = "weights, gradients and optimizer states alone"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a rank holds. `layout` says micro batch, length and micro batches as measured.

    parameters      of one tensor and pipeline slice, from what the data axis moves; 0 = not known
    measured_bytes  largest peak of a rank that the profiler recorded; 0 = none
    missing         why the model is not known, where it is not
    on_device       whether the job ran on devices at all; what a host holds beside the tensors is not counted
    traced          what the shapes of the fullest rank say, where no model is known
    whole_weights   parameters are gathered behind the optimizer, not before they are used, so that a rank holds all
    trains          whether there is a backward pass
    """

    layout: Layout
    states: StateBytes
    parameters: float = 0.0
    model: Model | None = None
    measured_bytes: float = 0.0
    missing: str = ""
    on_device: bool = True
    traced: Traced | None = None
    whole_weights: bool = False
    trains: bool = True

    @property
    def source(self) -> str:
        of = "" if self.on_device else ", tensors alone"
        if self.measured_bytes:
            return f"measured and stretched{of}"
        return f"modelled{of}" if self.model is not None else f"from shapes of operators{of}"

    def at(self, layout: Layout) -> tuple[float | None, str]:
        """(bytes at the peak of the rank that needs most, "") under `layout`, or (None, the reason).

        A measured peak is an allocator's: what libraries take beside its tensors is in it nowhere, and not here.
        """
        value, reason = self._told(layout)
        least, what = self.at_least(layout) if value is None else (None, "")
        return value, f"{reason}; {what} take {least / 1e9:.3g} GB" if least else reason

    def _told(self, layout: Layout) -> tuple[float | None, str]:
        target = self._completed(layout)
        if self.model is not None:
            try:
                found = self.parts(layout)
            except UsageError as error:
                return None, str(error)
            return found.tensors if self.measured_bytes else found.total, ""
        if self.measured_bytes:
            return self._changed(self.measured_bytes, target)
        if not self.trains:
            return None, "; ".join(filter(None, (_NO_BACKWARD, self.missing)))
        why = self._blind()
        if why or self.traced is None:
            return None, why
        found_bytes, reason = self._changed(self._traced_bytes(self.traced), target)
        if found_bytes is None or not self.on_device:
            return found_bytes, reason
        return found_bytes * (1 + FRAGMENTATION) + RESERVED_BYTES + _buffers(target), ""

    def at_least(self, layout: Layout) -> tuple[float | None, str]:
        """(bytes that a rank surely needs, what they are): its states, where `at` can't tell; (None, "") unknown."""
        target = self._completed(layout)
        parameters = self.parameters or (self.traced.elements if self.traced else 0)
        if not parameters or not self.trains or not self._same(target, *_SLICES):
            return None, ""
        return self._states_bytes(target, parameters), _OF_STATES

    def parts(self, layout: Layout) -> Memory:
        """The peak by what it holds. Raises UsageError where the layout or the model tells too little.

        Of a recorded peak the states are those of the parameters, and what is left over the model's other tensors
        multiplies those.
        """
        if self.model is None:
            raise UsageError(f"the model is not known: {self.missing}")
        found = self._modelled(self.model, self._completed(layout))
        if not self.measured_bytes:
            return found
        there = self._modelled(self.model, self.layout)
        rest, left = there.tensors - there.states, self.measured_bytes - there.states
        if rest > 0 and left > 0:
            return found.scaled(1.0, left / rest)
        factor = self.measured_bytes / there.tensors
        return found.scaled(factor, factor)

    def _completed(self, layout: Layout) -> Layout:
        # The measured schedule suits its own number of chunks; another number takes the usual schedule for it.
        same = bool(layout.schedule) or layout.chunks == self.layout.chunks
        return layout.over(self.layout if same else replace(self.layout, schedule=""))

    def _modelled(self, model: Model, target: Layout) -> Memory:
        model, cut = model.resized(target.layers, target.hidden), self._with_whole_weights(target)
        found = peak_memory(model, cut, self._counted_states(model, cut))
        return found if self.on_device else found.on_host()

    def _with_whole_weights(self, layout: Layout) -> Layout:
        """FSDP's groups as data ranks with a sharded optimizer, where that is what they are."""
        if not self.whole_weights or layout.fsdp == 1 or layout.dp > 1:
            return layout
        return replace(layout, dp=layout.fsdp, fsdp=1, zero=max(1, layout.zero))

    def _counted_states(self, model: Model, target: Layout) -> StateBytes:
        """The states' bytes an element of the model, so that they are those of the parameters that were moved."""
        if not self.parameters or self.model is None:
            return self.states
        at = replace(self.layout, layers=0, hidden=0)
        count = self.parameters / max(rank_parameters(self.model, at, rank) for rank in {0, at.pp - 1})
        return replace(
            self.states,
            weight=self.states.weight * (count if count > FROZEN else 1.0),
            gradient=self.states.gradient * count,
            optimizer=self.states.optimizer * count,
        )

    def _same(self, target: Layout, *names: str) -> bool:
        return all(getattr(target, name) == getattr(self.layout, name) for name in names)

    def _changed(self, total: float, target: Layout) -> tuple[float | None, str]:
        """The tensors of a peak with other shards of the states, and other activations where the micro batch changes;
        (None, the reason) for what needs a model."""
        was = self.layout
        if not self._same(target, *_SLICES):
            return None, f"another layout of the model holds other parts of it, and it is not known: {self.missing}"
        if not self._same(target, "shards", "zero", "fsdp"):
            parameters = self.parameters or (self.traced.elements if self.traced else 0)
            if not parameters:
                return None, "the peak was recorded, but not how many parameters the ranks share"
            total += self._states_bytes(target, parameters) - self._states_bytes(was, parameters)
        if was.mbs and (target.mbs, target.seq) != (was.mbs, was.seq):
            if self.traced is None or not self.traced.activations:
                return None, f"another micro batch holds other activations, which are not known: {self.missing}"
            # Scores of attention that are kept would grow faster than the tokens.
            total += self.traced.activations * (target.mbs * target.seq / (was.mbs * was.seq) - 1)
        return max(total, 0.0), ""

    def _blind(self) -> str:
        """Why the shapes of operators don't tell the memory, "" where they do."""
        traced = self.traced
        if traced is None or not (traced.weights and traced.activations):
            record = (
                "" if "record_shapes" in self.missing else "; shapes of all operators (record_shapes=True) tell more"
            )
            return f"no peak was recorded (profile_memory=True) and activations are not known: {self.missing}{record}"
        low, high = ACCOUNTED
        if self.parameters and not low <= traced.elements / self.parameters <= high:
            return (
                f"no peak was recorded (profile_memory=True), and shapes show {traced.elements:,} of the "
                f"{self.parameters:,.0f} weights that are reduced"
            )
        return ""

    def _traced_bytes(self, traced: Traced) -> float:
        """Tensors of the measured layout from shapes; what tables that update themselves hold is not sharded."""
        states = self._states_bytes(self.layout, self.parameters or traced.elements)
        return traced.tables + traced.fused + states + traced.activations + traced.passing

    def _states_bytes(self, layout: Layout, parameters: float) -> float:
        """Weights, gradients and optimizer states of one rank from the parameters alone."""
        layout = self._with_whole_weights(layout)
        sharded = layout.fsdp > 1 or layout.zero == 3
        weights = layout.shards if sharded else 1
        gradients = layout.shards if sharded or layout.zero >= 2 else 1
        each = self.states.weight / weights + self.states.gradient / gradients + self.states.optimizer / layout.shards
        return parameters * each


_SLICES = ("tp", "pp", "cp", "ep", "layers", "hidden", "recompute")
"""What of a layout decides which part of a model a rank holds, beside the data axes."""


def _buffers(layout: Layout) -> float:
    axes = (layout.dp, layout.fsdp, layout.tp, layout.pp, layout.cp, layout.ep)
    return float(CHANNEL_BYTES) * sum(degree > 1 for degree in axes)


def footprint_of_job(built: Built, layout: Layout | None = None) -> Footprint:
    """The footprint of a measured job as it is (under `layout`, where its groups do not tell), for `inspect` and
    `search`; a job that is stretched has its graph (base.prepare)."""
    ranks = max(1, built.job.world_size)
    graph = with_groups(built.graph, ranks, Health())
    layout = layout or measured_layout(graph, ranks)
    return footprint_of(built, graph, dissect(built, layout), layout, Health())


def footprint_of(built: Built, graph: Graph, anatomy: Anatomy, layout: Layout, health: Health) -> Footprint:
    """The footprint of a measured job; `graph` is the built one with every group and size known."""
    on_device = any(lane.is_device for lane in graph.lanes) and bool(graph.nodes(NodeKind.KERNEL).any())
    peaks = [peak for trace in built.job.ranks for peak in measured_peak_bytes(trace.events).values()]
    gradient_bytes, element = gradients_of(_as_recorded(built.graph, graph), anatomy)
    model, size, missing = None, 0.0, ""
    measured = layout
    try:
        found = read_model(built, layout, anatomy)
        model, measured, size, missing = found.model, found.layout, found.element_bytes, found.doubt
        if missing and found.missed <= NEAREST:
            health.note(f"Memory is that of the nearest family of models ({model.family}): {missing}.")
            missing = ""
    except InputError as error:
        missing = str(error)
    measured = with_schedule(built.job, measured, anatomy.micro_batches)
    parameters = gradient_bytes / (element or size or UNKNOWN_GRADIENT)
    if gradient_bytes and not element:
        health.guessed["bytes an element of reduced gradients, whose type the trace does not state"] += 1
    assumed = UNKNOWN_GRADIENT if gradient_bytes and not size else 0.0
    states = states_of(built.job.ranks, element or assumed, size)
    health.guessed["optimizer states taken to be fp32, as many as the optimizer's name says"] += 1
    if model is not None:
        model = with_ends(model, measured, parameters, health)
    model = None if missing else model
    known = trains(anatomy)
    traced = None
    if model is None and known:
        traced = max((traced_memory(trace) for trace in built.job.ranks), key=lambda found: found.predicted)
        dense = traced.weights - traced.tables
        if not size and traced.elements:
            states = states_of(built.job.ranks, element, dense / traced.elements)
    return Footprint(
        measured, states, parameters, model if known else None, float(max(peaks, default=0)), missing, on_device,
        traced, _gathers_late(graph, anatomy), known,
    )  # fmt: skip


def _as_recorded(built: Graph, graph: Graph) -> Graph:
    """The graph without the sizes of collectives that were worked out from their time: they would tell no weights."""
    pairs = zip(graph.collectives, built.collectives, strict=True)
    items = tuple(replace(item, bytes_in=was.bytes_in, bytes_out=was.bytes_out) for item, was in pairs)
    return replace(graph, collectives=items)


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


def _gathers_late(graph: Graph, anatomy: Anatomy) -> bool:
    """Whether most of what data ranks gather is gathered behind the optimizer: each then holds the whole weights."""
    carries = [
        max(item.bytes_in, item.bytes_out, 0)
        if item.kind == "all_gather" and item.group >= 0 and axis_of(graph.groups[item.group].axis) in DATA_AXES
        else 0
        for item in graph.collectives
    ]
    moved = np.array([*carries, 0], np.float64)[graph.instance] * (graph.kind == NodeKind.TRANSFER)
    late = anatomy.phase == int(Phase.OPTIMIZER)
    return bool(moved[late].sum() > moved[~late].sum())


def gradients_of(graph: Graph, anatomy: Anatomy) -> tuple[float, float]:
    """(bytes of all gradients of one rank, bytes an element), from what one micro batch reduces; (0, 0) unknown.

    Where gradients have several types their mean counts; where one is not stated, that of none is known.
    """
    kinds = {"all_reduce", "reduce_scatter"}
    reduces = [
        item.kind in kinds and item.group >= 0 and axis_of(graph.groups[item.group].axis) in DATA_AXES
        for item in graph.collectives
    ]
    moved_bytes = np.array([max(item.bytes_in, item.bytes_out) for item in graph.collectives] + [0], np.int64)
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & np.array([*reduces, False], np.bool_)[graph.instance])
    unknown = moved_bytes[graph.instance[nodes]] < 0
    nodes = nodes[moved_bytes[graph.instance[nodes]] > SCALAR_BYTES]
    if unknown.any() or not len(nodes):
        return 0.0, 0.0
    scatters = any(graph.collectives[at].kind == "reduce_scatter" for at in graph.instance[nodes].tolist())
    total: dict[tuple[int, int, int], float] = {}
    sizes: list[tuple[float, int]] = []
    for node in nodes.tolist():
        item = graph.collectives[int(graph.instance[node])]
        if scatters and item.kind != "reduce_scatter":
            continue
        key = (int(graph.rank[node]), int(graph.step[node]), int(anatomy.micro_batch[node]))
        total[key] = total.get(key, 0.0) + max(item.bytes_in, item.bytes_out)
        sizes.append((max(item.bytes_in, item.bytes_out), ELEMENT_BYTES.get(item.dtype, 0)))
    # What belongs to no micro batch (the root's, behind the last one) comes to that of one.
    steps = {key[:2] for key in total}
    of_one = {
        step: max((size for key, size in total.items() if key[:2] == step and key[2] >= 0), default=0.0)
        for step in steps
    }
    whole = max(of_one[step] + total.get((*step, -1), 0.0) for step in steps)
    if not all(each for _, each in sizes):
        return whole, 0.0
    return whole, sum(moved for moved, _ in sizes) / sum(moved / each for moved, each in sizes)
