"""Turns a built job into all that its stretching starts from: sizes, layout, calibration, overlap, noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np
import numpy.typing as npt

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate import cautions, overlap
from scaletrace.extrapolate.anatomy import Anatomy, dissect
from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster, Link
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.cores import Crowd, crowd_of
from scaletrace.extrapolate.costs import Calibration, collective_seconds
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.flops import flop_by_growth, step_flop
from scaletrace.extrapolate.footprint import Footprint, footprint_of
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout, degrees, measured_layout
from scaletrace.extrapolate.noise import measure_noise
from scaletrace.extrapolate.origin import CPU, DEVICE_ERROR, Origin, origin_of
from scaletrace.extrapolate.overlap import Slowdown
from scaletrace.extrapolate.recorded import carry, same_network, seen_on
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.buckets import rebucket
from scaletrace.extrapolate.rewrite.data import Shape
from scaletrace.extrapolate.rewrite.depth import measured_width
from scaletrace.extrapolate.rewrite.device import move
from scaletrace.extrapolate.rewrite.gradients import reduces_gradients, trains, with_gradients, woven_gradients
from scaletrace.extrapolate.rewrite.replicas import replicate
from scaletrace.extrapolate.rewrite.select import keep_nodes, real_ranks
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.shards import ShardCopies, shard_copies, units_of
from scaletrace.extrapolate.stragglers import PRIOR_NOISE, Folded, Noise, fold
from scaletrace.extrapolate.strong import Batch, Retiming, agreed, batch_of, retiming_of
from scaletrace.extrapolate.transfers import (
    evidence,
    instance_of_hubs,
    serialised,
    unshared_ns,
    whole_bytes,
    with_groups,
    with_sizes,
)
from scaletrace.parse.build import Built, build
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import Graph, GraphCollective, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.parse.profiler_cost import tell_profiler_cost
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_time_s, step_window
from scaletrace.replay.timeline import Timeline

Floats = npt.NDArray[np.float64]
PRIOR_JITTER, PRIOR_STEPS = 0.02, 2
"""MLPerf's step times spread by 0.1 to 2 % (GPT-3 on H100, p05 to p95 of 0.4 to 6.8 %)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The measured step and what the replay of its own graph gives, seconds; both by the definition of replay.steps."""

    gpus: int
    steps: int
    measured_s: float
    replayed_s: float

    @property
    def error(self) -> float:
        return self.replayed_s / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True, slots=True)
class Base:
    """The measured job, ready to be stretched.

    graph, dur_ns        as measured, every collective with a group and a size
    spread, spread_ns    the same with transfers taking turns on each rank's link, where ranks have one (gloo)
    share, plan          overlap of every kernel at the measured scale, and what of the structure it is asked of
    alone                what of its measured duration every node would take with nothing beside it, float64[n]
    folded, chosen       the representative ranks for stragglers, and which nodes they are
    optimizer            which nodes work on parameters after the backward pass
    copies               which nodes copy shards into and out of what FSDP gathers
    step_s               step of the plain replay (replay.steps): a floor for more ranks that do as much each
    jitter_s             spread of step times, drawn to a prior where few steps were seen
    rebuilt              what was changed before any stretching, so that even the measured size is modelled
    model_error          relative error (1 sigma) of compute that was not measured in this layout and on this device
    origin, compute_moved  where the trace was recorded; whether its kernels were re-timed for the cluster's device
    tokens_per_step, flop_per_step  of one rank, None where neither the trace nor its manifest tells
    fit                  the measured step and its replay
    found                the transfers that the calibration rests on
    certainty            that the axes which decide the layout are what they are taken for, 0 to 1
    crowd                how ranks shared cores or devices; None where they did not
    flop_counted         whether FLOP come from recorded shapes, which tell matrix products and attention alone
    batch, retiming      how a fixed global batch is divided; only where strong scaling was asked for
    """

    graph: Graph
    dur_ns: IntArray
    spread: Graph
    spread_ns: IntArray
    ranks: int
    layout: Layout
    cluster: Cluster
    calibration: Calibration
    slowdown: Slowdown
    share: Floats
    alone: Floats
    plan: overlap.Plan
    noise: Noise
    folded: Folded
    chosen: BoolArray
    optimizer: BoolArray
    copies: ShardCopies
    jitter_s: float
    step_s: float
    origin: Origin
    footprint: Footprint
    fit: Fit
    found: Sequence[Evidence] = ()
    compute_moved: bool = False
    tokens_per_step: float | None = None
    flop_per_step: float | None = None
    rebuilt: str = ""
    model_error: float = 0.0
    units: Sequence[Sequence[Shape]] = ()
    batch: Batch | None = None
    retiming: Retiming | None = None
    health: Health = field(default_factory=Health)
    certainty: float = 1.0
    flop_counted: bool = False
    crowd: Crowd | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants beside sizes; see curve.extrapolate."""

    layout: Layout | None = None
    bucket_bytes: int | None = None
    noise: Noise | None = None
    slowdown: float | None = None
    units: Sequence[Sequence[Shape]] = ()
    strong: bool = False


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a job tells before its graph is made ready: all that `_assembled` needs beside graph, layout and marks."""

    job: Job
    asked: Asked
    cluster: Cluster
    calibration: Calibration
    origin: Origin
    fit: Fit
    footprint: Footprint
    found: Sequence[Evidence]
    measured_ranks: int
    measured_layout: Layout
    moves_compute: bool
    health: Health
    certainty: float
    crowd: Crowd | None = None
    carried: bool = False
    growth: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What nodes are, for a graph whose nodes may be woven anew."""

    optimizer: BoolArray
    copies: ShardCopies
    retiming: Retiming | None

    def moved(self, origin: Int32Array) -> _Marks:
        """The same for a graph whose node v was node origin[v] (-1: new)."""
        here = origin >= 0
        retiming = self.retiming.moved(origin) if self.retiming is not None else None
        return _Marks(here & self.optimizer[origin], self.copies.moved(origin), retiming)


def guess_cluster(job: Job) -> Cluster:
    """The catalog's cluster that fits what the trace says of its device; flat Ethernet for a job without one."""
    return origin_of(job).cluster


def prepare(
    source: Built | Job,
    cluster: Cluster | None = None,
    *,
    more_evidence: Iterable[Evidence] = (),
    noise: Noise | None = None,
    slowdown: float | None = None,
    units: Sequence[Sequence[Shape]] = (),
    asked: Layout | None = None,
    bucket_bytes: int | None = None,
    strong: bool = False,
    recorded: Cluster | None = None,
) -> Base:
    """Everything that all points of a curve share; see curve.extrapolate for the options.

    asked         the layout that all sizes shall have: its axes other than dp and fsdp are made here, and so are the
                  all-reduces over replicas where an FSDP job becomes HSDP
    bucket_bytes  gradient buckets of another size than the measured ones
    strong        the global batch will stay, so what a rank's batch holds is found out here
    """
    built = source if isinstance(source, Built) else build(source)
    if not len(built.graph):
        raise InputError("nothing to extrapolate: the trace holds no work that a graph could be built from")
    health = Health()
    origin = origin_of(built.job)
    if cluster is not None and origin.said(cluster):
        health.note(origin.said(cluster))
    health.add(built.job.health)
    health.add(built.health)
    tell_profiler_cost(built.job, health)
    there = cluster or recorded or origin.cluster
    if cluster is None and recorded is None:
        health.note(f"Cluster {there.name} is a guess from the trace; name another with --cluster.")
    moves = origin.network_moves(there)
    here = recorded or (origin.cluster if moves else there)
    ranks = max(built.job.world_size, len(real_ranks(built.graph)))
    graph = cautions.unnamed(built.job, with_groups(built.graph, ranks, health), health)
    graph = replace(graph, instance=instance_of_hubs(graph))
    timeline, alone = _replayed(graph, here)
    free = overlap.beside_nothing(graph, timeline, alone, 0.0 if slowdown == 0 else None)
    found, more = evidence(graph, free), list(more_evidence)
    if recorded is None and cluster is not None and not moves:
        here = seen_on(found, here, health)
    carries = not moves and not same_network(here, there)
    found += [] if moves or carries else more
    calibration = calibrate(found, here)
    graph = with_sizes(graph, free, here, health)
    layout = measured_layout(graph, ranks)
    certainty = cautions.axes(built.job, graph, layout, health)
    if moves or carries:
        graph, calibration = carry(graph, alone, here, there, calibration, more, carries, health)
        found = more
    cautions.costs(found, there, health)
    measured = _Measured(
        built.job, Asked(asked, bucket_bytes, noise, slowdown, units, strong), there, calibration, origin,
        _fit(built, ranks), footprint_of(built, graph, dissect(built), layout, health), found, ranks, layout, origin.compute_moves(there), health, certainty,
        crowd_of(built, cluster), moves or carries,
    )  # fmt: skip
    if measured.crowd is not None and (said := measured.crowd.note()):
        health.note(said)
    cautions.straggler(replay(built.graph), health)
    return _ready(measured, built, graph)


def _ready(measured: _Measured, built: Built, graph: Graph) -> Base:
    """The base of a graph of the measured job with groups and sizes, by way of a State where its layout changes."""
    asked, layout = measured.asked, measured.measured_layout
    if asked.layout is not None:
        _check_sharding(graph, asked.layout, layout)
    copies = shard_copies(built)
    other = asked.layout is not None and _other_axes(asked.layout, layout)
    if asked.strong or measured.moves_compute or other:
        return _with_state(measured, replace(built, graph=graph), copies)
    anatomy = dissect(built)
    marks = _Marks(anatomy.phase == Phase.OPTIMIZER, copies, None)
    graph, marks = _with_gradients(graph, marks, anatomy, measured.footprint, measured.health)
    cautions.data_axis(graph, measured.health)
    return _assembled(measured, graph, marks, layout, 0.0)


def _with_state(measured: _Measured, built: Built, copies: ShardCopies) -> Base:
    """The base of a job whose layout, device or batch changes: by way of a State, which knows what its nodes compute."""
    asked, origin, cluster = measured.asked, measured.origin, measured.cluster
    ceilings = Ceilings.of(origin.cluster.device) if origin.family and origin.family != CPU else None
    layout = measured.measured_layout
    if asked.layout is not None and asked.layout.mbs and not measured.footprint.layout.mbs:
        # No shape tells the micro batch, so what the user says of it is what was measured, not what is wanted.
        layout = replace(layout, mbs=asked.layout.mbs, seq=asked.layout.seq or 1)
    state = open_state(built, layout, Network(cluster, measured.calibration), ceilings)
    if asked.layout is not None and _other_axes(asked.layout, measured.measured_layout):
        old = measured.measured_layout
        measured = replace(measured, growth=_growth(state, asked.layout))
        state = relayout(state, _on_measured_ranks(asked.layout.over(state.layout), old))
    if measured.moves_compute:
        state = replace(move(state, Ceilings.of(cluster.device)), error=float(np.hypot(state.error, DEVICE_ERROR)))
    try:
        state = with_gradients(state)
    except UsageError as error:
        measured.health.note(f"What data ranks beyond the measured ones send each other is in no number here: {error}.")
    cautions.data_axis(state.graph, measured.health)
    measured.health.add(state.health)
    by_row = copies.by_row(built.graph)

    def assemble(state: State) -> Base:
        graph = replace(state.graph, instance=instance_of_hubs(state.graph))
        retiming = retiming_of(state) if asked.strong else None
        marks = _Marks(state.anatomy.phase == Phase.OPTIMIZER, by_row(graph), retiming)
        return _assembled(measured, graph, marks, state.layout, state.error)

    base = assemble(state)
    if not asked.strong:
        return base
    given = asked.layout is not None and asked.layout.mbs > 0
    batch = batch_of(agreed(state), assemble, given)
    if batch.unit != "samples":
        measured.health.note(
            f"Samples of a micro batch are not known; the global batch counts {batch.unit or 'micro batches alone'}, "
            "so whether samples divide can't be checked. Give them with --layout mbs=…, or record attention's shapes."
        )
    batch.made[batch.micro_batches] = base
    return replace(base, batch=batch)


def of_micro_batches(base: Base, count: int) -> Base:
    """The same job with `count` micro batches a step; made once for each number."""
    from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches

    batch = base.batch
    if batch is None or count == batch.micro_batches:
        return base
    if count not in batch.made:
        batch.made[count] = replace(batch.assemble(repeat_micro_batches(batch.state, count)), batch=batch)
    return batch.made[count]


def _fit(built: Built, ranks: int) -> Fit:
    """The measured step beside that of the plain replay."""
    graph, measured, timeline = built.graph, built.measured, replay(built.graph)
    seen = step_window(graph, measured.start_ns, measured.end_ns)
    return Fit(ranks, len(seen.times_ns), seen.mean_ns * 1e-9, step_time_s(graph, timeline.start_ns, timeline.end_ns))


def _check_sharding(graph: Graph, asked: Layout, measured: Layout) -> None:
    """Refuse to shard what was measured unsharded, and the other way round: the trace shows other work than that."""
    shards = any(item.group >= 0 and graph.groups[item.group].axis == "fsdp" for item in graph.collectives)
    if asked.fsdp > 1 and not shards:
        raise UsageError(f"layout {asked}: the trace shows no sharded parameters; record the job under FSDP, or use dp")
    if asked.fsdp == 1 and measured.fsdp > 1:
        raise UsageError(f"layout {asked}: the trace shows sharded parameters; say over how many ranks, as fsdp=8")


def _other_axes(asked: Layout, measured: Layout) -> bool:
    """Whether a layout asks for more than other degrees of dp and fsdp."""
    return _on_measured_ranks(asked.over(measured), measured) != measured


def _on_measured_ranks(asked: Layout, measured: Layout) -> Layout:
    """The asked layout with the measured data ranks, which the points stretch; as many more as its experts need."""
    data = measured.data_ranks * asked.cp
    more = asked.ep // gcd(data, asked.ep)
    axis = "fsdp" if measured.fsdp > 1 else "dp"
    ranks = {"dp": measured.dp, "fsdp": measured.fsdp, "zero": measured.zero}
    return replace(asked, **{**ranks, axis: ranks[axis] * more})  # type: ignore[arg-type]


def _replayed(graph: Graph, cluster: Cluster) -> tuple[Timeline, IntArray]:
    """The plain replay, and durations with transfers as they would be alone on their rank's link (int64[n])."""
    timeline = replay(graph)
    if cluster.tiers[0].link is Link.TCP:
        return timeline, unshared_ns(graph, timeline.start_ns, timeline.end_ns)
    return timeline, graph.dur_ns


def _slowdown(measured: Slowdown, given: float | None) -> Slowdown:
    """The slowdown that the user gives for kernels, if any; without any, transfers are not slowed either."""
    if given is None:
        return measured
    return Slowdown((given, given), {}, "given", transfers=measured.transfers if given > 0 else 0.0)


def _assembled(measured: _Measured, graph: Graph, marks: _Marks, layout: Layout, error: float) -> Base:
    """What the final graph tells of overlap, noise and jitter, beside what was found on the way."""
    asked, cluster, health = measured.asked, measured.cluster, measured.health
    if asked.layout is not None and asked.layout.fsdp > 1 and layout.fsdp > 1 and layout.dp == 1:
        graph, marks = _with_replicas(graph, marks, health)
    if asked.bucket_bytes is not None:
        graph, marks = _with_buckets(graph, marks, asked.bucket_bytes, cluster, measured.calibration, health)
    timeline, alone = _replayed(graph, cluster)
    plan = overlap.plan(graph)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns, made=plan)
    chosen = representatives(graph)
    spread = serialised(graph) if cluster.tiers[0].link is Link.TCP else graph
    ranks = measured.measured_ranks if _same_degrees(layout, measured.measured_layout) else layout.ranks
    prior = cluster.device.overlap_slowdown
    slowdown = overlap.measure(graph, share, prior, operands=overlap.operands(measured.job, graph))
    slowdown = _slowdown(slowdown, asked.slowdown)
    steps = step_window(graph, timeline.start_ns, timeline.end_ns)
    job = measured.job
    work = _work_ratio(measured, layout)
    tokens = _model(job, "tokens_per_step")
    told = _model(job, "flops_per_step")
    flop = told or step_flop(job)
    return Base(
        graph=graph,
        dur_ns=graph.dur_ns,
        spread=spread,
        spread_ns=alone,
        ranks=ranks,
        layout=layout,
        cluster=cluster,
        calibration=measured.calibration,
        slowdown=slowdown,
        share=share,
        alone=1 - overlap.lost_shares(slowdown.per_node(graph), share),
        plan=plan,
        noise=asked.noise or _across_nodes(measure_noise(graph), ranks, cluster),
        folded=fold(keep_nodes(spread, chosen)),
        chosen=chosen,
        optimizer=marks.optimizer,
        copies=marks.copies,
        jitter_s=_jitter_s(np.asarray(steps.times_ns * 1e-9, np.float64)),
        step_s=steps.mean_ns * 1e-9,
        origin=measured.origin,
        footprint=measured.footprint,
        fit=measured.fit,
        found=measured.found,
        compute_moved=measured.moves_compute,
        tokens_per_step=tokens * work if tokens else None,
        flop_per_step=flop * work * _size_ratio(measured) or None if flop else None,
        flop_counted=not told,
        rebuilt=_rebuilt(measured, layout, error),
        model_error=error,
        units=asked.units or units_of(measured.job),
        retiming=marks.retiming,
        health=health,
        certainty=measured.certainty,
        crowd=measured.crowd,
    )


def _rebuilt(measured: _Measured, layout: Layout, error: float) -> str:
    """What was changed before any stretching, "" for nothing."""
    if measured.moves_compute:
        return "device"
    if error or not _same_degrees(layout, measured.measured_layout):
        return "layout"
    if measured.carried:
        return "network"
    return "bucket size" if measured.asked.bucket_bytes is not None else ""


def _same_degrees(one: Layout, other: Layout) -> bool:
    return degrees(one) == degrees(other)


def _work_ratio(measured: _Measured, layout: Layout) -> float:
    """How much more (tokens, FLOP) one rank does in a step of `layout` than it did where it was measured."""
    was, now = measured.footprint.layout, layout
    if not (was.mbs and now.mbs):
        return (now.microbatches or 1) / (was.microbatches or 1) if now.microbatches and was.microbatches else 1.0
    replica = (was.ranks / was.data_ranks) / (now.ranks / now.data_ranks)
    return (
        replica
        * now.mbs
        * (now.microbatches or 1)
        * (now.seq or was.seq)
        / (was.mbs * (was.microbatches or 1) * was.seq)
    )


def _size_ratio(measured: _Measured) -> float:
    """How much more FLOP a sample takes at the depth and width that are asked for; 0 where that is not known."""
    depth, width = measured.growth
    if depth == width == 1.0:
        return 1.0
    parts = flop_by_growth(measured.job)
    if parts is not None:
        return parts.resized(depth, width) / parts.total
    model = measured.footprint.model
    if model is None:
        return 0.0
    there = model.resized(round(model.layers * depth), round(model.hidden * width))
    return there.step_flop(1.0) / model.step_flop(1.0)


def _growth(state: State, asked: Layout) -> tuple[float, float]:
    """Depth and width that are asked for over those of a measured state; 1.0 for what stays."""
    depth = asked.layers / state.anatomy.layers if asked.layers and state.anatomy.layers else 1.0
    return depth, asked.hidden / measured_width(state) if asked.hidden else 1.0


def _has_replicas(graph: Graph) -> bool:
    """Whether a collective of the dp axis was recorded, were it over one rank (HSDP with a single replica)."""
    return any(item.group >= 0 and graph.groups[item.group].axis == "dp" for item in graph.collectives)


def _with_gradients(
    graph: Graph, marks: _Marks, anatomy: Anatomy, footprint: Footprint, health: Health
) -> tuple[Graph, _Marks]:
    """The graph with all-reduces of gradients over one data rank, where the job is trained, has none and shows its
    weights; and the marks of it. More data ranks make them cost something."""
    if reduces_gradients(graph, footprint.layout) or not trains(anatomy):
        return graph, marks
    try:
        woven = woven_gradients(graph, anatomy, footprint.layout, footprint.states.gradient)
    except UsageError:  # the caution says what is missing
        return graph, marks
    health.guessed["all-reduces inserted for gradients, since the job has no data axis"] = len(
        woven.graph.collectives
    ) - len(graph.collectives)
    out = replace(woven.graph, multiplicity=graph.multiplicity)
    return out, marks.moved(woven.origin)


def _with_replicas(graph: Graph, marks: _Marks, health: Health) -> tuple[Graph, _Marks]:
    """The graph with all-reduces over replicas, which move nothing yet, where it has none; and the marks of it."""
    if _has_replicas(graph):
        return graph, marks
    out = replicate(graph)
    count = (len(out) - len(graph)) // 2
    health.guessed["all-reduces over replicas inserted behind reduce-scatters"] = count
    new = np.isin(out.instance, np.arange(len(graph.collectives), len(out.collectives)))
    return out, marks.moved(np.where(new, -1, np.cumsum(~new) - 1).astype(np.int32))


def _with_buckets(
    graph: Graph, marks: _Marks, size_bytes: int, cluster: Cluster, calibration: Calibration, health: Health
) -> tuple[Graph, _Marks]:
    """The graph with other gradient buckets, and the marks of its nodes."""

    def cost_ns(item: GraphCollective) -> float:
        group = graph.groups[item.group]
        size = max(1, whole_bytes(item, group.size))
        cost = collective_seconds(
            item.kind, size, group.size, cluster, stride=max(1, group.stride), calibration=calibration
        )
        return cost.seconds * 1e9

    marked = replace(graph, layer=np.arange(len(graph), dtype=np.int32))
    out = rebucket(marked, size_bytes, cost_ns, health)
    if out is marked:
        return graph, marks
    health.guessed["gradient buckets merged or split"] = len(set(out.instance.tolist()) - set(graph.instance.tolist()))
    origin = out.layer
    layer = graph.layer[origin] if len(graph.layer) else graph.layer
    return replace(out, layer=layer), marks.moved(origin)


def _across_nodes(noise: Noise, ranks: int, cluster: Cluster) -> Noise:
    """Measured noise, with the prior's spread between ranks where all of them shared one node.

    Nodes differ more than the ranks of one do (9 % at 64,000 ranks, PRISM), and one node can't tell by how much.
    """
    if noise.source == PRIOR_NOISE.source or cluster.backend != "nccl" or ranks > cluster.node_size:
        return noise
    static = max(noise.static_cv, PRIOR_NOISE.static_cv)
    return replace(noise, static_cv=static, source=f"{noise.source}; spread between nodes from the prior")


def _jitter_s(times_s: Floats) -> float:
    """Standard deviation of step times, as if PRIOR_STEPS more steps had shown PRIOR_JITTER."""
    prior = PRIOR_JITTER * float(np.median(times_s))
    seen = float(((times_s - np.median(times_s)) ** 2).sum())
    return float(np.sqrt((PRIOR_STEPS * prior**2 + seen) / (PRIOR_STEPS + len(times_s) - 1)))


def _model(job: Job, key: str) -> float | None:
    """A number of the manifest's model, of one rank."""
    model = job.manifest.get("model")
    value = model.get(key) if isinstance(model, Mapping) else None
    return float(value) / max(1, job.world_size) if isinstance(value, int | float) and value > 0 else None


def representatives(graph: Graph) -> BoolArray:
    """Nodes of the ranks that stand for all: the rank of median compute, or every rank where ranks send to each other."""
    ranks = real_ranks(graph)
    kinds = {item.kind for item in graph.collectives}
    if not kinds & {"send", "recv"}:
        work = compute_nodes(graph)
        totals = np.bincount(graph.rank[work], weights=graph.dur_ns[work], minlength=max(ranks) + 1)[ranks]
        ranks = [ranks[int(np.argsort(totals, kind="stable")[(len(ranks) - 1) // 2])]]
    keep = np.isin(graph.rank, ranks) & (graph.kind != NodeKind.RENDEZVOUS)
    hub = graph.kind == NodeKind.RENDEZVOUS
    into = graph.edge_dst
    fed = np.zeros(len(graph), np.bool_)
    fed[into[hub[into] & keep[graph.pred]]] = True
    return np.asarray(keep | (hub & fed), np.bool_)
