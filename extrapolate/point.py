"""Turns a measured base and a size into one point of the curve: step time with a band, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.extrapolate import overlap
from scaletrace.extrapolate.base import Base, of_micro_batches
from scaletrace.extrapolate.cautions import has_data_axis
from scaletrace.extrapolate.columns import BOTH, INNER, NONE, OUTER
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.costs import Provenance
from scaletrace.extrapolate.energy import PowerModel, Prices, money_per_million_tokens
from scaletrace.extrapolate.layout import Layout, scaled
from scaletrace.extrapolate.parts import Parts, parts_of
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.steps import Shares, shares
from scaletrace.extrapolate.stragglers import Population, expected_step_ns
from scaletrace.extrapolate.strong import Retimed, Share, with_activations
from scaletrace.extrapolate.transfers import Scaled, rescale
from scaletrace.parse.events import BoolArray, ByteArray, IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_time_s
from scaletrace.replay.timeline import Timeline

Floats = npt.NDArray[np.float64]
SIGMAS = 1.645
"""Half width of a 5 to 95 % band in standard deviations."""
SWEEPS = 3
PRIOR_NOISE_FACTOR, MEASURED_NOISE_FACTOR = 1.0, 0.35
PRIOR_OVERLAP_FACTOR, MEASURED_OVERLAP_FACTOR = 0.5, 0.2
"""Relative uncertainty (one sigma) of straggler loss and of overlap slowdown, where each is a prior or measured; of a
slowdown that is partly both, between the two by its evidence."""
FLOOR_NS = 2_000
"""No kernel gets shorter than this when its shard shrinks: a launch's worth of work."""
POWER = PowerModel()


@dataclass(frozen=True, slots=True)
class Options:
    """How the points are made: weak keeps each rank's work, otherwise the global batch; nics caps a group's NICs."""

    layout: Layout | None = None
    weak: bool = True
    nics: int | None = None
    tokens_per_step: float | None = None
    flop_per_step: float | None = None
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One size. Seconds a step; fractions of the step; bands are p5, p50 and p95.

    ideal_overlap_s  the step if more overlap cost compute nothing more than it did where it was measured
    retimed          shares of compute time that were re-timed "by_shape" and "by_time" for a smaller micro batch
    unknown          for each number that is None the reason
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
    parts: Parts
    provenance: Mapping[str, str]
    comm_error_s: float
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    memory_bytes: float | None = None
    power_W_per_gpu: float | None = None
    tokens_per_J: float | None = None
    money_per_million_tokens: float | None = None
    retimed: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The point as docs/reference/json.md shows it; what isn't known is null, and `unknown` says why."""
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
            "bubble_fraction": self.bubble_fraction,
            "straggler_fraction": self.straggler_fraction,
            "memory_bytes": self.memory_bytes,
            "power_W_per_gpu": self.power_W_per_gpu,
            "tokens_per_J": self.tokens_per_J,
            "money_per_million_tokens": self.money_per_million_tokens,
            "parts": self.parts.to_json(),
            "critical_path_share": dict(self.parts.path),
            "dominant": self.parts.dominant,
            "provenance": dict(self.provenance),
            "compute_retimed": dict(self.retimed),
            "unknown": dict(self.unknown),
        }


@dataclass(frozen=True, slots=True)
class Stretched:
    """A graph at another size with its durations, replayed; `base` is the one it was stretched from.

    plain_ns   durations before the overlap slowed compute;  part, retimed  of the global batch, where that stays
    """

    graph: Graph
    scaled: Scaled
    timeline: Timeline
    ideal: Timeline
    base: Base
    plain_ns: IntArray
    part: Share | None = None
    retimed: Retimed | None = None


def stretch(base: Base, gpus: int, options: Options) -> tuple[Layout, Stretched]:
    """Rewrite to `gpus` ranks, rescale transfers, then let the overlap slow compute until both agree.

    Raises UsageError for a size that the layout, or a fixed global batch, does not fit.
    """
    layout = scaled(base.layout, gpus, options.layout.over(base.layout) if options.layout else None)
    part = retimed = None
    if not options.weak and base.batch is None:
        raise UsageError("a base for strong scaling is made with prepare(…, strong=True), which finds out the batch")
    if not options.weak and base.batch is not None and layout.data_ranks != base.layout.data_ranks:
        part = base.batch.share(layout.data_ranks, gpus)
        base = of_micro_batches(base, part.micro_batches)
        layout = _with_share(layout, base, part)
    same = (layout.dp, layout.fsdp) == (base.layout.dp, base.layout.fsdp) and part is None
    old, dur_ns = (base.graph, base.dur_ns) if same else (base.spread, base.spread_ns)
    new = resize(old, base.layout, layout, base.units)
    if part is not None and part.factor != 1.0:
        new = with_activations(new, part.factor)
    change = rescale(old, new, dur_ns, base.cluster, base.calibration, options.nics)
    plain = change.dur_ns
    if part is not None and part.factor != 1.0 and base.retiming is not None:
        retimed = base.retiming.apply(plain, part.factor)
        plain = retimed.dur_ns
    if not same:
        plain = _other_shards(base, old, new, plain, base.layout.shards / layout.shards)
    ideal = replay(new, plain)
    timeline, durations = ideal, plain
    if not same and base.share.any():
        kappa = base.slowdown.per_node(new)
        for _ in range(SWEEPS):
            share = overlap.overlap_share(new, timeline.start_ns, timeline.end_ns, change.moving, base.plan)
            durations = overlap.apply(plain, kappa, base.share, share)
            timeline = replay(new, durations)
        # Only compute is free of what more overlap costs: transfers have the kernels beside them that they have.
        ideal = replay(new, np.where(new.kind == NodeKind.TRANSFER, durations, plain))
    change = replace(change, dur_ns=durations)
    return layout, Stretched(new, change, timeline, ideal, base, plain, part, retimed)


def _with_share(layout: Layout, base: Base, part: Share) -> Layout:
    """The layout with what a rank of it does in a step."""
    samples = part.samples if base.batch is not None and base.batch.unit == "samples" else layout.mbs
    return replace(layout, mbs=samples, microbatches=part.micro_batches)


def _shown(layout: Layout, base: Base) -> Layout:
    """The layout without a micro batch that stands in for an unknown one (one sample of one token, or of all rows)."""
    stands_in = layout.mbs == 1 and (layout.seq == 1 or (base.batch is not None and base.batch.unit != "samples"))
    return replace(layout, mbs=0, seq=0) if stands_in else layout


def _other_shards(base: Base, old: Graph, new: Graph, dur_ns: IntArray, shard: float) -> IntArray:
    """Work on shards in proportion to them: the optimizer's, and FSDP's copies into gathers; copies of whole units by
    their padding. `shard` is the new shard over the old one."""
    out = dur_ns
    if shard != 1.0:
        out = _smaller(base, out, base.optimizer, shard)
    was, now = _gathered(old), _gathered(new)
    if was[0] and was != now:
        out = _smaller(base, out, base.copies.into, now[0] / was[0])
        out = _smaller(base, out, base.copies.whole, now[1] / was[1])
    return out


def _gathered(graph: Graph) -> tuple[int, int]:
    """Bytes that go into and come out of all gathers of shards on one rank."""
    found = [
        item
        for item in graph.collectives
        if item.kind == "all_gather" and item.group >= 0 and graph.groups[item.group].axis == "fsdp"
    ]
    return sum(max(0, item.bytes_in) for item in found), sum(max(0, item.bytes_out) for item in found)


def _smaller(base: Base, dur_ns: IntArray, where: BoolArray, factor: float) -> IntArray:
    """Compute at `where` for `factor` times the bytes: in proportion, but no shorter than a launch's worth."""
    work = compute_nodes(base.graph) & where
    return np.where(work, np.maximum(np.minimum(dur_ns, FLOOR_NS), np.round(dur_ns * factor).astype(np.int64)), dur_ns)


def _step_s(graph: Graph, timeline: Timeline) -> float:
    return step_time_s(graph, timeline.start_ns, timeline.end_ns)


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


@dataclass(frozen=True, slots=True)
class Core:
    """What decides where a curve bends: the step and its parts at a size, without bands, power or memory."""

    gpus: int
    layout: Layout
    done: Stretched
    step_s: float
    ideal_s: float
    lost_s: float
    part: Shares

    @property
    def total_s(self) -> float:
        return self.step_s + self.lost_s

    @property
    def keep(self) -> float:
        """What of the whole is not lost to stragglers."""
        return self.step_s / self.total_s if self.total_s else 1.0


def core(base: Base, gpus: int, options: Options) -> Core:
    """The step at a size and what it is made of. Raises UsageError where the size does not fit."""
    layout, done = stretch(base, gpus, options)
    graph, timeline = done.graph, done.timeline
    step_s, ideal_s = _step_s(graph, timeline), _step_s(graph, done.ideal)
    if options.weak and gpus > base.ranks and not base.rebuilt and base.cluster.fills(base.ranks):
        # More ranks never help under weak scaling; only less intense transfers beside compute would say so.
        lifted_s = max(0.0, base.step_s - step_s)
        step_s, ideal_s = step_s + lifted_s, ideal_s + lifted_s
    ideal_s = min(ideal_s, step_s)
    all_steps = max(1, len(np.unique(graph.step[graph.step >= 0])))
    lost_s = straggler_s(done.base, graph, gpus, done.scaled.dur_ns, all_steps)
    part = shares(graph, timeline.start_ns, timeline.end_ns, done.base.plan, _lost(done))
    return Core(gpus, layout, done, step_s, ideal_s, lost_s, part)


def _lost(done: Stretched) -> Floats:
    """Of every node the share of its run that it lost to what ran beside it: measured durations hold the slowdown of the
    measured overlap, so both are taken out."""
    return np.asarray(1 - done.plain_ns * done.base.alone / np.maximum(1, done.scaled.dur_ns))


def evaluate(base: Base, gpus: int, options: Options) -> Point:
    """One point of the curve."""
    return point_of(base, core(base, gpus, options), options)


def point_of(base: Base, found: Core, options: Options) -> Point:
    """The point with its band, and with what power, memory and money follow."""
    done, part, keep, total = found.done, found.part, found.keep, found.total_s
    step_s, lost_s = found.step_s, found.lost_s
    comm_low, comm_high = _communication_band(done, step_s)
    noise_sigma = lost_s * (PRIOR_NOISE_FACTOR if "prior" in base.noise.source else MEASURED_NOISE_FACTOR)
    known = 1.0 if base.slowdown.source == "given" else base.slowdown.evidence
    unsure = np.sqrt(known * MEASURED_OVERLAP_FACTOR**2 + (1 - known) * PRIOR_OVERLAP_FACTOR**2)
    overlap_sigma = (step_s - found.ideal_s) * float(unsure)
    model_error = float(np.hypot(base.model_error, done.retimed.error if done.retimed else 0.0))
    noise_sigma = float(np.hypot(noise_sigma, model_error * step_s))
    common = (SIGMAS * noise_sigma) ** 2 + (SIGMAS * overlap_sigma) ** 2 + (SIGMAS * base.jitter_s) ** 2
    tokens = options.tokens_per_step or base.tokens_per_step
    # Under strong scaling a rank's share of the samples shrinks as ranks that take samples are added.
    scale = 1.0 if done.part is None else base.layout.data_ranks / found.layout.data_ranks
    rate = tokens * scale / total if tokens and total else None
    more, unknown = _beside(base, found, options, rate)
    mfu, no_mfu = _mfu(base, found, options, scale)
    if no_mfu:
        unknown["mfu"] = no_mfu
    if (untold := _untold(base, found)) is not None:
        unknown["step_time_band"] = untold
    # A guessed axis may cost something else at any other size than the measured one.
    wider = 1.0 if found.gpus == base.ranks else 1 / base.certainty
    return Point(
        gpus=found.gpus,
        layout=_shown(found.layout, base),
        low_s=max(total - wider * float(np.hypot(comm_low, common**0.5)), 0.0),
        p50_s=total,
        high_s=total + wider * float(np.hypot(comm_high, common**0.5)),
        ideal_overlap_s=found.ideal_s + lost_s,
        compute_fraction=part.compute * keep,
        exposed_comm_fraction=part.exposed * keep,
        exposed_by_axis={axis: value * keep for axis, value in part.by_axis.items()},
        straggler_fraction=lost_s / total if total else 0.0,
        parts=parts_of(part, keep, critical_path(done.timeline).shares()),
        provenance=_provenance(base, done, found.gpus, more),
        comm_error_s=max(comm_low, comm_high),
        tokens_per_s_per_gpu=rate,
        mfu=mfu,
        retimed={"by_shape": done.retimed.by_shape, "by_time": done.retimed.by_time} if done.retimed else {},
        unknown=unknown,
        **more,
    )


NO_TOKENS = "tokens of a step are not known; give --tokens"
NO_FLOP = "FLOP of a step are not known: record shapes (record_shapes=True), or give --flop; those of another width are not worked out"


def _beside(
    base: Base, found: Core, options: Options, tokens_per_s: float | None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Memory, power, energy, money and bubble of a point, and for each number that is not known the reason."""
    power, no_power = _power(base, found)
    money, no_money = _money(base, options, tokens_per_s, power)
    memory, no_memory = _memory(base, found)
    bubble, no_bubble = bubble_fraction(found.done.graph, found.layout, found.part, found.keep)
    values = {
        "memory_bytes": memory,
        "power_W_per_gpu": power,
        "tokens_per_J": tokens_per_s / power if tokens_per_s is not None and power else None,
        "money_per_million_tokens": money,
        "bubble_fraction": bubble,
    }
    unknown = {
        "memory_bytes": no_memory,
        "power_W_per_gpu": no_power,
        "tokens_per_J": NO_TOKENS if tokens_per_s is None else no_power,
        "money_per_million_tokens": no_money,
        "bubble_fraction": no_bubble,
    }
    unknown = {name: reason for name, reason in unknown.items() if values[name] is None}
    if tokens_per_s is None:
        unknown["tokens_per_s_per_gpu"] = NO_TOKENS
    return values, unknown


LEAST_FILLED = 0.01
"""Counted FLOP that would fill less of the compute's time at peak leave most of the compute uncounted."""


def _mfu(base: Base, found: Core, options: Options, scale: float) -> tuple[float | None, str]:
    """(model FLOP utilisation, ""), or (None, the reason); `scale` is the share of a rank's samples that is left."""
    flop = options.flop_per_step or base.flop_per_step
    if base.rebuilt == "network":
        return None, _foreign(base)
    if not flop or not found.total_s:
        return None, NO_FLOP
    value = flop * scale / found.total_s / base.cluster.device.bf16_flops
    compute = found.part.compute * found.keep
    if base.flop_counted and not options.flop_per_step and value < LEAST_FILLED * compute:
        return None, (
            f"the FLOP counted from shapes (matrix products and attention) fill {value / compute:.2g} of the compute's "
            "time at the device's peak, so they say nothing of how well it runs; give --flop"
        )
    return value, ""


def _untold(base: Base, found: Core) -> str | None:
    """Why the band of another size says nothing: no data axis was seen, so what more ranks cost is in no number, or ranks
    shared the cores of a host."""
    if found.gpus > base.ranks and not has_data_axis(base.graph):
        return (
            "the trace holds no collective of a data axis, so what more ranks cost is not known; low and high cover what "
            "was measured alone"
        )
    if base.crowd is not None and found.gpus != base.ranks:
        return base.crowd.untold(found.gpus) or None
    return None


def _foreign(base: Base) -> str:
    """Why nothing of the cluster's device can be said."""
    origin, device = base.origin, base.cluster.device
    return f"compute is that of {origin.name or origin.cluster.device.name}, not of {device.name}"


def _power(base: Base, found: Core) -> tuple[float | None, str]:
    """(watts of the mean GPU, ""), or (None, the reason)."""
    device = base.cluster.device
    if base.rebuilt == "network":
        return None, _foreign(base)
    if device.power_W is None:
        return None, f"the power of {device.name} is not known; give power_W in a cluster's YAML"
    rate, resident = (found.part.compute - found.part.slowed) * found.keep, found.part.resident * found.keep
    return POWER.power_W(device.power_W, min(1.0, rate), min(1.0, resident)), ""


def _money(base: Base, options: Options, tokens_per_s: float | None, power: float | None) -> tuple[float | None, str]:
    """(cost of a million tokens, ""), or (None, the reason)."""
    if base.rebuilt == "network":
        return None, _foreign(base)
    if options.prices is None:
        return None, "no price was given; give --price"
    if tokens_per_s is None:
        return None, NO_TOKENS
    return money_per_million_tokens(tokens_per_s, power, base.cluster.device.name, options.prices)


def _memory(base: Base, found: Core) -> tuple[float | None, str]:
    """(bytes of the rank that needs most, ""), or (None, the reason); where only rows are known the sequence stands for
    the samples."""
    part, measured = found.done.part, base.footprint.layout
    if part is None or part.factor == 1.0 or (base.batch is not None and base.batch.unit == "samples"):
        return base.footprint.at(found.layout)
    if not measured.mbs:
        return None, "a smaller micro batch holds less, and how large the measured one is, is not known"
    return base.footprint.at(replace(found.layout, seq=max(1, round(measured.seq * part.factor))))


def bubble_fraction(graph: Graph, layout: Layout, part: Shares, keep: float = 1.0) -> tuple[float | None, str]:
    """Share of the mean rank's step in which it waits for a neighbouring stage and nothing computes; (None, reason).

    0 where every message and group of the job shows that there is no pipeline.
    """
    messages = [item for item in graph.collectives if item.kind in ("send", "recv")]
    if layout.pp > 1:
        return part.waiting_by_axis.get("pp", 0.0) * keep, ""
    if any(item.group < 0 or graph.groups[item.group].axis not in ("cp", "ep", "tp") for item in messages):
        return None, "ranks send messages in groups that are not named; name the axes (--axes) to tell a pipeline"
    return 0.0, ""


def _communication_band(done: Stretched, step_s: float) -> tuple[float, float]:
    """Seconds that the step gets shorter and longer if all modelled transfers are off the same way (5 and 95 %)."""
    graph, change = done.graph, done.scaled
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


_WORDS = {
    Provenance.MEASURED: "measured",
    Provenance.INTERPOLATED: "interpolated",
    Provenance.EXTRAPOLATED_SIZE: "extrapolated",
    Provenance.EXTRAPOLATED_RANKS: "extrapolated",
    Provenance.PRIOR: "prior",
}
_IN = {Provenance.EXTRAPOLATED_SIZE: "size", Provenance.EXTRAPOLATED_RANKS: "ranks"}


def _provenance(base: Base, done: Stretched, gpus: int, more: Mapping[str, float | None]) -> dict[str, str]:
    """For each part of the answer, one word for how it is known, and sentences for what the word leaves out."""
    worst = done.scaled.worst
    made = base.rebuilt in ("layout", "device")
    out = {"compute": "extrapolated" if made or done.retimed else "measured", "communication": _WORDS[worst]}
    if base.rebuilt == "network":
        out["compute"] = "measured on another device"
    if done.retimed:
        out["compute_by"] = (
            f"{done.retimed.by_shape:.0%} of what shrinks by the models of shapes, "
            f"{done.retimed.by_time:.0%} in proportion to time"
        )
    if worst in _IN:
        out["communication_beyond"] = _IN[worst]
    elif worst is Provenance.MEASURED and base.rebuilt in ("network", "device"):
        out["communication"] = "prior"
    elif worst is Provenance.MEASURED and base.rebuilt:
        out |= {"communication": "extrapolated", "communication_beyond": base.rebuilt}
    if gpus != base.ranks:
        out["stragglers"] = "prior" if "prior" in base.noise.source else "extrapolated"
        if base.share.any():
            out["overlap"] = base.slowdown.provenance
    if base.share.any():
        out["slowed_compute"] = f"modelled, overlap {base.slowdown.provenance}"
    if more.get("memory_bytes") is not None:
        out["memory"] = base.footprint.source
    if more.get("power_W_per_gpu") is not None:
        out["power"] = "modelled"
    return out
