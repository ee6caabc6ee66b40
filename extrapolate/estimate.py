"""Turns a workload, a layout and a cluster into an estimate of the step: seconds by what they are spent on.

The same terms as an event-level pipeline (scaling-findings, Formulas), in closed form, so that thousands of layouts can
be compared in seconds. `lower_bound_s` leaves out all that could be hidden and never exceeds the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import Calibration, Cost, collective_seconds
from scaletrace.extrapolate.interference import loss_of
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.memory import Memory, StateBytes, rank_parameters
from scaletrace.extrapolate.rewrite import schedules
from scaletrace.extrapolate.workload import Workload

MESSAGE_OVERHEAD_S = 20e-6
"""Launch and handshake of one send and receive beside its bytes (scaling-findings: send/recv)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of a step, by cause; they add up to the step.

    compute      layers of the busiest stage, recompute beside;  head: vocabulary product and loss of the last stage
    tensor, context, expert   collectives inside layers, which nothing hides
    bubble       waiting of the pipeline, messages of its warm-up and drain
    data_exposed what gradients and parameters take beyond the compute that hides them
    slowdown     what hidden collectives cost the compute beside them; of a measured job beyond what its compute has
                 of it already, below 0 where less is hidden
    host         what a measured step has beyond all these, on the host and once a step; 0 for a described job
    """

    compute: float
    head: float
    recompute: float
    tensor: float
    context: float
    expert: float
    bubble: float
    data_exposed: float
    slowdown: float
    optimizer: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout's step in seconds with its terms and its memory (None where it was not counted)."""

    layout: Layout
    terms: Terms
    samples: int
    memory: Memory | None = None

    @property
    def step_s(self) -> float:
        return self.terms.total

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def bubble_fraction(self) -> float:
        return self.terms.bubble / self.step_s


@dataclass(frozen=True, slots=True)
class Fit:
    """What a measured step makes of the estimate's terms: factors, so that at the measured layout they add up to it.

    held      share of the measured compute that is dispatch of operators, which no change of size moves
    host_s    host time of one layer and micro batch on a rank, forward and backward
    once_s    work of every step that neither layers nor the bytes of the optimizer explain: launches, data, logging
    calls     collectives that reduce gradients in a step of one pipeline stage's share of all layers; 0: one a layer
    loss      seconds of compute that a second of hidden collective costs (interference.loss_of)
    hidden    of the measured compute the share beside which collectives were hidden
    residual  what is left at the measured layout, relative to the step; unfitted: what was off before
    """

    compute: float = 1.0
    held: float = 0.0
    optimizer: float = 1.0
    tensor: float = 1.0
    context: float = 1.0
    expert: float = 1.0
    data: float = 1.0
    messages: float = 1.0
    host_s: float = 0.0
    once_s: float = 0.0
    calls: float = 0.0
    measured_s: float = 0.0
    loss: float = 0.0
    hidden: float = 0.0
    residual: float = 0.0
    unfitted: float = 0.0


PLAIN = Fit()
"""A described job: nothing measured, nothing fitted."""


@dataclass(frozen=True, slots=True)
class Network:
    """Costs of collectives on a cluster, remembered."""

    cluster: Cluster
    calibration: Calibration | None = None

    def seconds(self, kind: str, size_bytes: float, size: int, stride: int) -> float:
        """Time of one collective over `size` ranks, `stride` apart; 0 for a single rank."""
        if size <= 1 or size_bytes <= 0:
            return 0.0
        return self.cost(kind, size_bytes, size, stride).seconds

    def cost(self, kind: str, size_bytes: float, size: int, stride: int) -> Cost:
        """The same with its parts (costs.collective_seconds)."""
        return _cost(self.cluster.name, kind, round(size_bytes), size, stride, _Held(self.cluster, self.calibration))


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Carries a cluster past the cache, whose key is the rest of the arguments and this object's cluster by identity."""

    cluster: Cluster
    calibration: Calibration | None

    def __hash__(self) -> int:
        return hash((id(self.cluster), id(self.calibration)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.cluster is other.cluster and self.calibration is other.calibration


@lru_cache(maxsize=65536)
def _cost(name: str, kind: str, size_bytes: int, size: int, stride: int, held: _Held) -> Cost:
    return collective_seconds(kind, size_bytes, size, held.cluster, stride=stride, calibration=held.calibration)


def _tensor_s(work: Workload, layout: Layout, network: Network) -> float:
    """Collectives of one layer's forward over the tensor group: two all-reduces, or with sp two gathers and scatters."""
    span = layout.span("tp")
    size = layout.mbs * layout.seq / layout.cp * work.model.hidden * work.element_bytes
    if not layout.sp:
        return 2 * network.seconds("all_reduce", size, span.size, span.stride)
    both = network.seconds("all_gather", size, span.size, span.stride)
    return 2 * (both + network.seconds("reduce_scatter", size, span.size, span.stride))


def _context_s(work: Workload, layout: Layout, network: Network) -> float:
    """Gathering keys and values of one layer over the context group."""
    span = layout.span("cp")
    size = layout.mbs * layout.seq * 2 * work.model.kv_width / layout.tp * work.element_bytes
    return network.seconds("all_gather", size, span.size, span.stride)


def _expert_s(work: Workload, layout: Layout, network: Network) -> float:
    """Dispatch and combine of one layer over the expert group."""
    if work.model.experts == 1:
        return 0.0
    span = layout.span("ep")
    tokens = layout.mbs * layout.seq / layout.cp / (layout.tp if layout.sp else 1)
    size = tokens * work.model.experts_per_token * work.model.hidden * work.element_bytes
    return 2 * network.seconds("all_to_all", size, span.size, span.stride)


@dataclass(frozen=True, slots=True)
class _Micro:
    """One micro batch on the busiest rank (all its layers), seconds."""

    layers: float
    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tensor + self.context + self.expert


def _parts_s(work: Workload, layout: Layout, fit: Fit) -> tuple[float, float, float]:
    """(forward, backward of one layer, head in both directions) for one micro batch, as fitted."""
    forward, backward = work.layer_s(layout)
    ends = sum(work.ends_s(layout))
    if fit.held and work.anchor is not None:
        there, back = work.layer_s(work.anchor.layout)
        at_ends = sum(work.ends_s(work.anchor.layout))
        forward, backward = (fit.held * a + (1 - fit.held) * b for a, b in ((there, forward), (back, backward)))
        ends = fit.held * at_ends + (1 - fit.held) * ends
    return fit.compute * forward, fit.compute * backward, fit.compute * ends


def _micro(work: Workload, layout: Layout, network: Network, fit: Fit) -> _Micro:
    layers = work.model.layers / layout.pp
    forward, backward, _ = _parts_s(work, layout, fit)
    again = 1.0 if layout.recompute == "full" else 0.0
    passes = 2.0 + again
    return _Micro(
        layers,
        layers * (forward + backward),
        layers * forward * again,
        fit.tensor * layers * passes * _tensor_s(work, layout, network),
        fit.context * layers * passes * _context_s(work, layout, network),
        fit.expert * layers * passes * _expert_s(work, layout, network),
    )


def bubble_parts_s(work: Workload, layout: Layout, network: Network, fit: Fit = PLAIN) -> tuple[float, float]:
    """(waiting, messages) of a pipeline's warm-up and drain: (p - 1) chunks, less where weight gradients fill it."""
    if layout.pp == 1:
        return 0.0, 0.0
    micro = _micro(work, layout, network, fit)
    span = layout.span("pp")
    size = layout.mbs * layout.seq / layout.cp * work.model.hidden * work.element_bytes / layout.tp
    hop = network.seconds("send", size, 2, span.stride) + MESSAGE_OVERHEAD_S
    schedule = layout.pipeline_schedule
    idle = schedules.bubble_units(schedule, layout.pp) * micro.total / layout.chunks
    delays = schedules.message_delays(schedule, layout.pp, layout.chunks, layout.microbatches)
    return idle, fit.messages * delays * hop


def data_s(
    work: Workload, layout: Layout, network: Network, states: StateBytes, fit: Fit = PLAIN
) -> tuple[float, float]:
    """(seconds of all collectives of gradients and parameters in a step, those at its ends that nothing can hide)."""
    parameters = rank_parameters(work.model, layout, 0)
    units = max(1.0, (fit.calls or work.model.layers) / layout.pp)
    weight, gradient = parameters * states.weight / units, parameters * states.gradient / units
    data, shard = layout.span("data"), layout.span("shard")
    if layout.fsdp > 1 or layout.cp > 1:
        gather = network.seconds("all_gather", weight, shard.size, shard.stride)
        scatter = network.seconds("reduce_scatter", gradient, shard.size, shard.stride)
        replicas = layout.span("dp")
        across = network.seconds("all_reduce", gradient / shard.size, replicas.size, replicas.stride)
        rounds = layout.microbatches if layout.pp == 1 else 1
        return units * (rounds * (2 * gather + scatter) + across), gather + scatter + across
    if layout.zero:
        gather = network.seconds("all_gather", weight, data.size, data.stride)
        scatter = network.seconds("reduce_scatter", gradient, data.size, data.stride)
        return units * (gather + scatter), gather + scatter
    reduce = network.seconds("all_reduce", gradient, data.size, data.stride)
    return units * reduce, reduce


def room_s(work: Workload, layout: Layout, network: Network, fit: Fit = PLAIN) -> float:
    """Compute beside which gradients and parameters can travel; in a pipeline that of the first and last micro batch."""
    micro = _micro(work, layout, network, fit).total
    return layout.microbatches * micro if layout.pp == 1 else 2 * micro


def estimate(
    work: Workload, layout: Layout, network: Network, states: StateBytes | None = None, fit: Fit = PLAIN
) -> Estimate:
    """Step of a layout that says mbs, microbatches and seq; memory is counted apart (memory.peak_memory)."""
    states = states or StateBytes.of(work.element_bytes)
    micro = _micro(work, layout, network, fit)
    m = layout.microbatches
    comm, ends = (fit.data * part for part in data_s(work, layout, network, states, fit))
    loss = fit.loss if fit.measured_s else loss_of(network.cluster.device.overlap_slowdown)
    hidden = min(comm - min(ends, comm), room_s(work, layout, network, fit))
    busy = m * micro.total
    parameters = rank_parameters(work.model, layout, 0)
    terms = Terms(
        compute=m * micro.compute,
        head=m * _parts_s(work, layout, fit)[2],
        recompute=m * micro.recompute,
        tensor=m * micro.tensor,
        context=m * micro.context,
        expert=m * micro.expert,
        bubble=sum(bubble_parts_s(work, layout, network, fit)),
        data_exposed=comm - hidden,
        slowdown=loss * (min(hidden, busy) - fit.hidden * busy) if fit.measured_s else loss * hidden,
        optimizer=fit.optimizer * work.optimizer_s(parameters / layout.shards),
        host=fit.host_s * m * micro.layers + fit.once_s,
    )
    samples = layout.mbs * m * layout.data_ranks
    return Estimate(layout, terms, samples)


def lower_bound_s(work: Workload, layout: Layout, fit: Fit = PLAIN) -> float:
    """Compute of the busiest stage alone: no layout of these degrees is faster, whatever its network does."""
    forward, backward, ends = _parts_s(work, layout, fit)
    again = forward if layout.recompute == "full" else 0.0
    layers = work.model.layers / layout.pp
    free = 1 - fit.loss * fit.hidden  # a layout that hides nothing computes faster than was measured
    return layout.microbatches * (layers * ((forward + backward + again) * free + fit.host_s) + ends)
