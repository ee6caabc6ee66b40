"""Turns a measured step and the estimate of the same layout into factors that make the estimate that step.

The mean rank's step is compute, exposed communication by axis, and the rest, in which its host is at work. Each term of
the estimate is multiplied by what was measured of it; an axis that the measurement does not have keeps its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.estimate import Fit, Network, bubble_parts_s, data_s, estimate, room_s
from scaletrace.extrapolate.interference import loss_of
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, Layout, axis_of
from scaletrace.extrapolate.memory import StateBytes
from scaletrace.extrapolate.nodework import node_work
from scaletrace.extrapolate.overlap import of_job
from scaletrace.extrapolate.steps import shares
from scaletrace.extrapolate.workload import Workload
from scaletrace.parse.build import Built
from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_time_s

MOST = 3.0
"""An optimizer takes at most so many times as long as its bytes; what is beyond that is launches and other work."""


def fit_to(work: Workload, built: Built, network: Network, anatomy: Anatomy, states: StateBytes | None = None) -> Fit:
    """The factors for a job whose workload is anchored in it; `network` is that of the measured cluster.

    states: bytes an element of what the job keeps, which the estimates that are fitted must use too
    """
    if work.anchor is None:
        return Fit()
    timeline = replay(built.graph)
    step_s = step_time_s(built.graph, timeline.start_ns, timeline.end_ns)
    seen = shares(built.graph, timeline.start_ns, timeline.end_ns)
    # Axes may overlap each other; together they are what is exposed.
    total = sum(seen.by_axis.values())
    exposed: dict[str, float] = {}
    for axis, share in seen.by_axis.items():
        # While a rank waits for others nothing moves, and a faster or larger network changes nothing of it. What ranks
        # of a pipeline wait for each other is its bubble.
        moving = share - (0.0 if axis_of(axis) == "pp" else seen.waiting_by_axis.get(axis, 0.0))
        exposed[axis_of(axis)] = exposed.get(axis_of(axis), 0.0) + moving * seen.exposed * step_s / total
    calls = _calls(built.graph) * work.anchor.layout.pp
    held = _held(built, anatomy, work.anchor.layout.tp)
    compute_s, moved_s = float(seen.compute * step_s), _moved_s(built.graph)
    slowdown = of_job(built, built.graph, network.cluster.device.overlap_slowdown)
    loss = loss_of(slowdown.default[1], slowdown.transfers) if slowdown else 0.0
    return factors(work, work.anchor.layout, network, step_s, compute_s, exposed, calls, held, states, moved_s, loss)


def _held(built: Built, anatomy: Anatomy, tp: int) -> float:
    """Share of forward and backward compute that is dispatch; 0 on a device, whose kernels have a floor of their own."""
    work = node_work(built, anatomy, tp)
    mine = work.computes & np.isin(anatomy.phase, [int(Phase.FORWARD), int(Phase.BACKWARD)])
    total = float(built.graph.dur_ns[mine].sum())
    return min(1.0, float(work.held_ns[mine].sum()) / total) if len(work.held_ns) and total > 0 else 0.0


def _calls(graph: Graph) -> float:
    """Collectives of a step and rank that reduce gradients."""
    return float(_of_data(graph, ("all_reduce", "reduce_scatter")).sum()) / _rank_steps(graph)


def _moved_s(graph: Graph) -> float:
    """How long collectives of the data axes move something in a step of a rank, hidden or not."""
    mine = _of_data(graph, ("all_reduce", "reduce_scatter", "all_gather"))
    return float(graph.dur_ns[mine].sum()) * 1e-9 / _rank_steps(graph)


def _of_data(graph: Graph, kinds: tuple[str, ...]) -> BoolArray:
    """Mask of the transfers of such collectives on data axes."""
    wanted = [
        item.kind in kinds and axis_of(graph.groups[item.group].axis if item.group >= 0 else "") in DATA_AXES
        for item in graph.collectives
    ]
    named = np.array([*wanted, False], np.bool_)[graph.instance]
    return np.asarray(named & (graph.kind == int(NodeKind.TRANSFER)), np.bool_)


def _rank_steps(graph: Graph) -> int:
    steps = max(1, len(np.unique(graph.step[graph.step >= 0])))
    return steps * max(1, len(np.unique(graph.rank[graph.lane >= 0])))


def factors(
    work: Workload,
    layout: Layout,
    network: Network,
    step_s: float,
    compute_s: float,
    exposed_s: Mapping[str, float],
    calls: float = 0.0,
    held: float = 0.0,
    states: StateBytes | None = None,
    moved_s: float = 0.0,
    loss: float = 0.0,
) -> Fit:
    """The factors from seconds of the mean rank: its step, what of it computes, and what is exposed by axis.

    calls: collectives that reduce gradients, over all pipeline stages; 0 = one a layer.  held: as in Fit
    moved_s: how long collectives of the data axes move something, hidden or not; 0 = not known.  loss: as in Fit
    """
    states = states or StateBytes.of(work.element_bytes)
    plain = estimate(work, layout, network, states)
    unfitted = plain.step_s / step_s - 1
    layers = plain.terms.compute + plain.terms.head + plain.terms.recompute
    # What computes beyond layers and head is the optimizer and the like; fewer than those, and they were counted double.
    compute = min(1.0, compute_s / layers) if layers > 0 else 1.0
    beyond = max(0.0, compute_s - layers)
    optimizer = min(MOST, beyond / plain.terms.optimizer) if plain.terms.optimizer > 0 else 1.0
    once_s = beyond - optimizer * plain.terms.optimizer
    fit = Fit(
        compute=compute,
        held=held,
        optimizer=optimizer,
        once_s=once_s,
        calls=calls,
        measured_s=step_s,
        unfitted=unfitted,
    )
    plain = estimate(work, layout, network, states, fit)
    terms = plain.terms

    def over(axis: str, model_s: float) -> float:
        return exposed_s.get(axis, 0.0) / model_s if model_s > 0 else 1.0

    fit = replace(
        fit,
        tensor=over("tp", terms.tensor),
        context=over("cp", terms.context),
        expert=over("ep", terms.expert),
    )
    idle, messages = bubble_parts_s(work, layout, network, fit)
    waits = exposed_s.get("pp", 0.0)
    fit = replace(
        fit,
        messages=max(0.0, waits - idle) / messages if messages > 0 else 1.0,
    )
    data = sum(exposed_s.get(axis, 0.0) for axis in DATA_AXES)
    fit = replace(fit, data=_data_factor(work, layout, network, states, fit, data, moved_s))
    fit = replace(fit, loss=loss, hidden=_hidden(work, layout, network, states, fit))
    rest = step_s - estimate(work, layout, network, states, fit).step_s
    passes = layout.microbatches * work.model.layers / layout.pp
    fit = replace(fit, host_s=max(0.0, rest) / passes)
    return replace(fit, residual=estimate(work, layout, network, states, fit).step_s / step_s - 1)


def _data_factor(
    work: Workload, layout: Layout, network: Network, states: StateBytes, fit: Fit, exposed_s: float, moved_s: float
) -> float:
    """The factor on all traffic of gradients and parameters that leaves `exposed_s` of it beyond what compute hides.

    It takes no longer than it was seen to (`moved_s`): what is exposed beyond that is a matter of the order in which
    the host issues things.
    """
    comm, ends = data_s(work, layout, network, states, fit)
    if comm <= 0:
        return 1.0
    room = room_s(work, layout, network, fit)
    ends = min(ends, comm)
    hidden = exposed_s / ends if ends > 0 else 0.0
    factor = hidden if ends > 0 and hidden * (comm - ends) <= room else (exposed_s + room) / comm
    return min(factor, moved_s / comm) if moved_s > 0 else factor


def _hidden(work: Workload, layout: Layout, network: Network, states: StateBytes, fit: Fit) -> float:
    """Of the micro batches' time the share beside which traffic of gradients and parameters is hidden, 0 to 1."""
    comm, ends = (fit.data * part for part in data_s(work, layout, network, states, fit))
    room = room_s(work, layout, network, fit)
    busy = room if layout.pp == 1 else room * layout.microbatches / 2
    return min(1.0, min(comm - min(ends, comm), room) / busy) if busy > 0 else 0.0


def for_cluster(fit: Fit, same: bool) -> Fit:
    """The factors on the asked cluster: those of communication hold only where it is the measured one."""
    if same:
        return fit
    return replace(fit, tensor=1.0, context=1.0, expert=1.0, data=1.0, messages=1.0)


def tell(fit: Fit, health: Health, same: bool) -> None:
    """Say in `health` what was fitted and what is left."""
    if not fit.measured_s:
        return
    left = "" if abs(fit.residual) < 5e-4 else f", but for {fit.residual:+.1%} that no factor takes up"
    kept = "" if same else "; on another cluster its communication factors do not hold and are left out"
    health.note(
        f"Fitted to one measurement, the step of {fit.measured_s:.4g} s, so it agrees there by construction{left} "
        f"(before that the estimate was {fit.unfitted:+.0%} off): compute x{fit.compute:.3g}, optimizer and the like x{fit.optimizer:.3g}, "
        f"tensor x{fit.tensor:.3g}, data x{fit.data:.3g}, messages x{fit.messages:.3g}, "
        f"host {fit.host_s * 1e3:.3g} ms a layer and micro batch, {fit.once_s * 1e3:.3g} ms once a step{kept}."
    )
