"""Turns a measured base and a size into one point of the curve: step time with a band, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate import overlap
from scaletrace.extrapolate.base import Base
from scaletrace.extrapolate.columns import BOTH, INNER, NONE, OUTER
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.costs import Provenance
from scaletrace.extrapolate.layout import Layout, scaled
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.steps import Shares, shares, step_times_ns, step_window
from scaletrace.extrapolate.stragglers import Population, expected_step_ns
from scaletrace.extrapolate.transfers import Scaled, rescale
from scaletrace.parse.events import BoolArray, ByteArray, IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.replay.engine import replay
from scaletrace.replay.timeline import Timeline

Floats = npt.NDArray[np.float64]
SIGMAS = 1.645
"""Half width of a 5 to 95 % band in standard deviations."""
SWEEPS = 3
PRIOR_NOISE_FACTOR, MEASURED_NOISE_FACTOR = 1.0, 0.35
PRIOR_OVERLAP_FACTOR, MEASURED_OVERLAP_FACTOR = 0.5, 0.2
"""Relative uncertainty (one sigma) of straggler loss and of overlap slowdown, where each is a prior or measured."""
FLOOR_NS = 2_000
"""No kernel gets shorter than this when its batch shrinks: a launch's worth of work."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the points are made: weak keeps each rank's work, otherwise the global batch; nics caps a group's NICs."""

    layout: Layout | None = None
    weak: bool = True
    nics: int | None = None
    tokens_per_step: float | None = None
    flop_per_step: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One size. Seconds a step; fractions of the step; bands are p5, p50 and p95.

    ideal_overlap_s  the step if more overlap cost compute nothing more than it did where it was measured
    """

    gpus: int
    layout: Layout
    low_s: float
    p50_s: float
    high_s: float
    ideal_overlap_s: float
    compute_fraction: float
    exposed_comm_fraction: float
    exposed_by_axis: Mapping[str, float]
    straggler_fraction: float
    dominant: str
    provenance: Mapping[str, str]
    comm_error_s: float
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The point as docs/cli.md shows it; what isn't known is null."""
        return {
            "gpus": self.gpus,
            "layout": self.layout.to_json() or {"dp": 1},
            "step_time_s": {"low": self.low_s, "p50": self.p50_s, "high": self.high_s},
            "ideal_overlap_step_time_s": self.ideal_overlap_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "compute_fraction": self.compute_fraction,
            "exposed_comm_fraction": self.exposed_comm_fraction,
            "exposed_by_axis": dict(self.exposed_by_axis),
            "bubble_fraction": None,
            "straggler_fraction": self.straggler_fraction,
            "memory_bytes": None,
            "power_W_per_gpu": None,
            "dominant": self.dominant,
            "provenance": dict(self.provenance),
        }


@dataclass(frozen=True, slots=True)
class Stretched:
    """A graph at another size with its durations, replayed."""

    graph: Graph
    scaled: Scaled
    timeline: Timeline
    ideal: Timeline


def stretch(base: Base, gpus: int, options: Options) -> tuple[Layout, Stretched]:
    """Rewrite to `gpus` ranks, rescale transfers, then let the overlap slow compute until both agree."""
    layout = scaled(base.layout, gpus, options.layout.over(base.layout) if options.layout else None)
    same = layout == base.layout
    old, dur_ns = (base.graph, base.dur_ns) if same else (base.spread, base.spread_ns)
    new = resize(old, base.layout, layout, base.units)
    change = rescale(old, new, dur_ns, base.cluster, base.calibration, options.nics)
    if not options.weak and not same:
        change = replace(change, dur_ns=_smaller(base, change.dur_ns, ~base.optimizer, base.ranks / gpus))
    if layout.shards != base.layout.shards:
        shard = base.layout.shards / layout.shards
        change = replace(change, dur_ns=_smaller(base, change.dur_ns, base.optimizer, shard))
    ideal = replay(new, change.dur_ns)
    timeline, durations = ideal, change.dur_ns
    kappa = base.slowdown.per_node(new)
    if not same and base.share.any():
        for _ in range(SWEEPS):
            share = overlap.overlap_share(new, timeline.start_ns, timeline.end_ns, change.moving)
            durations = overlap.apply(change.dur_ns, kappa, base.share, share)
            timeline = replay(new, durations)
    return layout, Stretched(new, replace(change, dur_ns=durations), timeline, ideal)


def _smaller(base: Base, dur_ns: IntArray, where: BoolArray, factor: float) -> IntArray:
    """Compute at `where` for `factor` times the samples or parameters: in proportion, but no shorter than a launch's worth."""
    work = compute_nodes(base.graph) & where
    return np.where(work, np.maximum(np.minimum(dur_ns, FLOOR_NS), np.round(dur_ns * factor).astype(np.int64)), dur_ns)


def _step_s(graph: Graph, timeline: Timeline) -> float:
    return float(np.median(step_times_ns(graph, timeline.start_ns, timeline.end_ns))) * 1e-9


def straggler_s(base: Base, graph: Graph, gpus: int, dur_ns: IntArray, steps: int) -> float:
    """What waiting for the slowest of `gpus` ranks adds to a step, beyond what the measured ranks already showed.

    graph is the stretched one: its groups say which collectives hold up whom.
    """
    if gpus <= base.ranks:
        return 0.0
    picked = dur_ns[base.chosen]
    many, few = (
        expected_step_ns(replace(base.folded, reach=reach), population, base.noise, picked)
        for population, reach in (
            spread_of(graph, gpus, base.folded.class_count),
            spread_of(base.graph, base.ranks, base.folded.class_count),
        )
    )
    return max(0.0, many - few) * 1e-9 / max(1, steps)


def spread_of(graph: Graph, ranks: int, classes: int) -> tuple[Population, ByteArray]:
    """The population of each class, and how far each collective reaches in it (columns.NONE … BOTH).

    Neighbours in groups smaller than the population (tensor parallel ranks, the shards of HSDP) form its inner axis;
    groups that stand apart cross it, and groups of all ranks reach everywhere.
    """
    total = max(1, ranks // max(1, classes))
    sizes = [graph.groups[item.group] if item.group >= 0 else None for item in graph.collectives]
    near = [g.size for g in sizes if g is not None and 1 < g.size < total and g.stride <= 1]
    inner = max((size for size in near if total % size == 0), default=1)
    reach = np.full(max(1, len(sizes)), BOTH, np.uint8)
    for at, (item, group) in enumerate(zip(graph.collectives, sizes, strict=True)):
        if item.kind in ("send", "recv") or (group is not None and group.size == 1):
            reach[at] = NONE
        elif group is not None and group.size < total and inner > 1:
            reach[at] = INNER if group.stride <= 1 else OUTER
    return Population(max(1, total // inner), inner), reach


def evaluate(base: Base, gpus: int, options: Options) -> Point:
    """One point of the curve."""
    layout, done = stretch(base, gpus, options)
    graph, timeline = done.graph, done.timeline
    step_s, ideal_s = _step_s(graph, timeline), _step_s(graph, done.ideal)
    if options.weak and gpus > base.ranks and not base.rebuilt:
        # More ranks never help under weak scaling; only less intense transfers beside compute would say so.
        step_s = max(step_s, base.step_s)
    all_steps = max(1, len(np.unique(graph.step[graph.step >= 0])))
    lost_s = straggler_s(base, graph, gpus, done.scaled.dur_ns, all_steps)
    comm_low, comm_high = _communication_band(graph, done.scaled, step_s)
    noise_sigma = lost_s * (PRIOR_NOISE_FACTOR if "prior" in base.noise.source else MEASURED_NOISE_FACTOR)
    known = base.slowdown.pairs > 0 or base.slowdown.source == "given"
    overlap_sigma = (step_s - ideal_s) * (MEASURED_OVERLAP_FACTOR if known else PRIOR_OVERLAP_FACTOR)
    noise_sigma = float(np.hypot(noise_sigma, base.model_error * step_s))
    common = (SIGMAS * noise_sigma) ** 2 + (SIGMAS * overlap_sigma) ** 2 + (SIGMAS * base.jitter_s) ** 2
    total = step_s + lost_s
    part = shares(graph, timeline.start_ns, timeline.end_ns)
    keep = step_s / total if total else 1.0
    tokens = options.tokens_per_step or base.tokens_per_step
    flop = options.flop_per_step or base.flop_per_step
    scale = 1.0 if options.weak else base.ranks / gpus
    return Point(
        gpus=gpus,
        layout=layout,
        low_s=max(total - float(np.hypot(comm_low, common**0.5)), 0.0),
        p50_s=total,
        high_s=total + float(np.hypot(comm_high, common**0.5)),
        ideal_overlap_s=ideal_s + lost_s,
        compute_fraction=part.compute * keep,
        exposed_comm_fraction=part.exposed * keep,
        exposed_by_axis={axis: value * keep for axis, value in part.by_axis.items()},
        straggler_fraction=lost_s / total if total else 0.0,
        dominant=_dominant(part, keep, 1 - keep),
        provenance=_provenance(base, done.scaled, gpus),
        comm_error_s=max(comm_low, comm_high),
        tokens_per_s_per_gpu=tokens * scale / total if tokens and total else None,
        mfu=flop * scale / total / base.cluster.device.bf16_flops if flop and total else None,
    )


def _communication_band(graph: Graph, change: Scaled, step_s: float) -> tuple[float, float]:
    """Seconds that the step gets shorter and longer if all modelled transfers are off the same way (5 and 95 %)."""
    error = change.errors() * SIGMAS
    if not error.any():
        return 0.0, 0.0
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    spread = error[graph.instance[nodes]]
    out = []
    for sign in (-1.0, 1.0):
        durations = change.dur_ns.copy()
        factor = 1 + spread if sign > 0 else 1 / (1 + spread)
        durations[nodes] = np.round(durations[nodes] * factor).astype(np.int64)
        out.append(abs(_step_s(graph, replay(graph, durations)) - step_s))
    return out[0], out[1]


def _dominant(part: Shares, keep: float, straggler: float) -> str:
    """The largest of compute, each axis' exposed communication, stragglers, and the host with all else."""
    terms = {"compute": part.compute * keep, "stragglers": straggler, "host": part.rest * keep}
    terms |= {f"{axis} communication": value * keep for axis, value in part.by_axis.items()}
    return max(terms, key=lambda name: terms[name])


_WORDS = {
    Provenance.MEASURED: "measured",
    Provenance.INTERPOLATED: "interpolated",
    Provenance.EXTRAPOLATED_SIZE: "extrapolated",
    Provenance.EXTRAPOLATED_RANKS: "extrapolated",
    Provenance.PRIOR: "prior",
}
_IN = {Provenance.EXTRAPOLATED_SIZE: "size", Provenance.EXTRAPOLATED_RANKS: "ranks"}


def _provenance(base: Base, change: Scaled, gpus: int) -> dict[str, str]:
    """For each part of the answer, one word for how it is known, and sentences for what the word leaves out."""
    worst = change.worst
    measured = gpus == base.ranks
    out = {"compute": "extrapolated" if base.rebuilt == "layout" else "measured", "communication": _WORDS[worst]}
    if worst in _IN:
        out["communication_beyond"] = _IN[worst]
    elif worst is Provenance.MEASURED and base.rebuilt:
        out |= {"communication": "extrapolated", "communication_beyond": base.rebuilt}
    if not measured:
        out["stragglers"] = "prior" if "prior" in base.noise.source else "extrapolated"
        if base.share.any():
            out["overlap"] = "measured" if base.slowdown.pairs else "prior"
    return out


def steps_in(graph: Graph, timeline: Timeline) -> int:
    """Whole steps that the graph's window times."""
    return step_window(graph, timeline.start_ns, timeline.end_ns)[2]
