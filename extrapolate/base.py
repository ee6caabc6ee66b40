"""Turns a built job into all that its stretching starts from: sizes, layout, calibration, overlap, noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate import overlap
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster, Link
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.costs import FAMILY, Calibration, collective_seconds
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.flops import step_flop
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, Layout, axis_of, measured_layout
from scaletrace.extrapolate.noise import measure_noise
from scaletrace.extrapolate.overlap import Slowdown
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.buckets import rebucket
from scaletrace.extrapolate.rewrite.data import Shape
from scaletrace.extrapolate.rewrite.replicas import replicate
from scaletrace.extrapolate.rewrite.select import keep_nodes, real_ranks
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.steps import step_times_ns
from scaletrace.extrapolate.stragglers import PRIOR_NOISE, Folded, Noise, fold
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
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import Graph, GraphCollective, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.replay.engine import replay
from scaletrace.replay.stragglers import stragglers
from scaletrace.replay.timeline import Timeline

Floats = npt.NDArray[np.float64]
PRIOR_JITTER, PRIOR_STEPS = 0.02, 2
"""MLPerf's step times spread by 0.1 to 2 % (GPT-3 on H100, p05 to p95 of 0.4 to 6.8 %)."""
DEVICES = (
    (r"GB200", "gb200_nvl72"),
    (r"B200", "dgx_b200"),
    (r"H200", "dgx_h200"),
    (r"H100", "dgx_h100"),
    (r"A100", "dgx_a100"),
    (r"V100", "dgx_v100"),
    (r"MI300|MI325", "mi300x"),
)


def _with_version(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with the NCCL that the trace names."""
    for rank in job.ranks:
        info = rank.header.get("distributedInfo")
        version = info.get("nccl_version") if isinstance(info, Mapping) else None
        if isinstance(version, str) and re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
            return replace(cluster, nccl_version=version)
    return cluster


@dataclass(frozen=True, slots=True)
class Base:
    """The measured job, ready to be stretched.

    graph, dur_ns        as measured, every collective with a group and a size
    spread, spread_ns    the same with transfers taking turns on each rank's link, where ranks have one (gloo)
    share                overlap of every kernel at the measured scale
    folded, chosen       the representative ranks for stragglers, and which nodes they are
    optimizer            which nodes work on parameters after the backward pass
    step_s               median step of the plain replay: a floor for more ranks that do as much each
    jitter_s             spread of step times, drawn to a prior where few steps were seen
    rebuilt              what was changed before any stretching, so that even the measured size is modelled
    model_error          relative error (1 sigma) of compute that was not measured in this layout
    tokens_per_step, flop_per_step  of one rank, None where neither the trace nor its manifest tells
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
    noise: Noise
    folded: Folded
    chosen: BoolArray
    optimizer: BoolArray
    jitter_s: float
    step_s: float
    tokens_per_step: float | None = None
    flop_per_step: float | None = None
    rebuilt: str = ""
    model_error: float = 0.0
    units: Sequence[Sequence[Shape]] = ()
    health: Health = field(default_factory=Health)


def guess_cluster(job: Job) -> Cluster:
    """The catalog's cluster that fits what the trace says of its device; flat Ethernet for a job without one."""
    names = " ".join(
        str(device.get("name", ""))
        for rank in job.ranks
        for device in (rank.header.get("deviceProperties") or [])
        if isinstance(device, dict)
    )
    for pattern, cluster in DEVICES:
        if re.search(pattern, names):
            return _with_version(Cluster.load(cluster), job)
    return Cluster.load("gloo_10g" if job.backend in ("gloo", "mpi", "") and not names else "dgx_h100")


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
) -> Base:
    """Everything that all points of a curve share; see curve.extrapolate for the options.

    asked         the layout that all sizes shall have: its axes other than dp and fsdp are made here, and so are the
                  all-reduces over replicas where an FSDP job becomes HSDP
    bucket_bytes  gradient buckets of another size than the measured ones
    """
    built = source if isinstance(source, Built) else build(source)
    if not len(built.graph):
        raise InputError("nothing to extrapolate: the trace holds no work that a graph could be built from")
    health = Health()
    health.add(built.job.health)
    health.add(built.health)
    if cluster is None:
        cluster = guess_cluster(built.job)
        health.note(f"Cluster {cluster.name} is a guess from the trace; name another with --cluster.")
    ranks = measured_ranks = max(built.job.world_size, len(real_ranks(built.graph)))
    graph = with_groups(built.graph, ranks, health)
    graph = replace(graph, instance=instance_of_hubs(graph))
    _, alone = _replayed(graph, cluster)
    found = [*evidence(graph, alone), *more_evidence]
    calibration = calibrate(found, cluster)
    graph = with_sizes(graph, alone, cluster, health)
    _warn(found, cluster, health)
    layout = measured_layout(graph, ranks)
    optimizer = dissect(built).phase == Phase.OPTIMIZER
    error = 0.0
    if asked is not None:
        _check_sharding(graph, asked, layout)
    if asked is not None and _other_axes(asked, layout):
        state = _relaid(replace(built, graph=graph), asked, layout, Network(cluster, calibration))
        graph, layout, error = state.graph, state.layout, state.error
        graph = replace(graph, instance=instance_of_hubs(graph))
        optimizer, ranks = state.anatomy.phase == Phase.OPTIMIZER, layout.ranks
        health.add(state.health)
    if asked is not None and asked.fsdp > 1 and layout.fsdp > 1 and layout.dp == 1 and not _has_replicas(graph):
        graph, optimizer = _with_replicas(graph, optimizer, health)
    if bucket_bytes is not None:
        graph, optimizer = _with_buckets(graph, optimizer, bucket_bytes, cluster, calibration, health)
    _warn_data_axis(graph, health)
    _warn_straggler(replay(built.graph), health)
    base = _assembled(graph, optimizer, ranks, layout, cluster, calibration, health)
    return replace(
        base,
        noise=noise or base.noise,
        slowdown=base.slowdown if slowdown is None else Slowdown((slowdown, slowdown), {}, "given"),
        tokens_per_step=_model(built.job, "tokens_per_step"),
        flop_per_step=_model(built.job, "flops_per_step") or step_flop(built.job),
        rebuilt="layout" if error or ranks != measured_ranks else "bucket size" if bucket_bytes is not None else "",
        model_error=error,
        units=units,
    )


def _check_sharding(graph: Graph, asked: Layout, measured: Layout) -> None:
    """Refuse to shard what was measured unsharded, and the other way round: the trace shows other work than that."""
    shards = any(item.group >= 0 and graph.groups[item.group].axis == "fsdp" for item in graph.collectives)
    if asked.fsdp > 1 and not shards:
        raise UsageError(f"layout {asked}: the trace shows no sharded parameters; record the job under FSDP, or use dp")
    if asked.fsdp == 1 and measured.fsdp > 1:
        raise UsageError(f"layout {asked}: the trace shows sharded parameters; say over how many ranks, as fsdp=8")


def _other_axes(asked: Layout, measured: Layout) -> bool:
    """Whether a layout asks for more than other degrees of dp and fsdp."""
    same = replace(asked.over(measured), dp=measured.dp, fsdp=measured.fsdp, zero=measured.zero)
    return same != measured


def _relaid(built: Built, asked: Layout, measured: Layout, network: Network) -> State:
    """The measured job in the asked layout, with the measured degrees of the data axes."""
    state = open_state(built, measured, network)
    return relayout(state, replace(asked.over(state.layout), dp=measured.dp, fsdp=measured.fsdp, zero=measured.zero))


def _replayed(graph: Graph, cluster: Cluster) -> tuple[Timeline, IntArray]:
    """The plain replay, and durations with transfers as they would be alone on their rank's link (int64[n])."""
    timeline = replay(graph)
    if cluster.tiers[0].link is Link.TCP:
        return timeline, unshared_ns(graph, timeline.start_ns, timeline.end_ns)
    return timeline, graph.dur_ns


def _assembled(
    graph: Graph,
    optimizer: BoolArray,
    ranks: int,
    layout: Layout,
    cluster: Cluster,
    calibration: Calibration,
    health: Health,
) -> Base:
    """What the final graph tells of overlap, noise and jitter, beside what was found on the way."""
    timeline, alone = _replayed(graph, cluster)
    share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns)
    chosen = representatives(graph)
    spread = serialised(graph) if cluster.tiers[0].link is Link.TCP else graph
    return Base(
        graph=graph,
        dur_ns=graph.dur_ns,
        spread=spread,
        spread_ns=alone,
        ranks=ranks,
        layout=layout,
        cluster=cluster,
        calibration=calibration,
        slowdown=overlap.measure(graph, share, cluster.device.overlap_slowdown),
        share=share,
        noise=_across_nodes(measure_noise(graph), ranks, cluster),
        folded=fold(keep_nodes(spread, chosen)),
        chosen=chosen,
        optimizer=optimizer,
        jitter_s=_jitter_s(graph, timeline),
        step_s=float(np.median(step_times_ns(graph, timeline.start_ns, timeline.end_ns))) * 1e-9,
        health=health,
    )


def _has_replicas(graph: Graph) -> bool:
    """Whether a collective of the dp axis was recorded, were it over one rank (HSDP with a single replica)."""
    return any(item.group >= 0 and graph.groups[item.group].axis == "dp" for item in graph.collectives)


def _with_replicas(graph: Graph, optimizer: BoolArray, health: Health) -> tuple[Graph, BoolArray]:
    """The graph with all-reduces over replicas, which move nothing yet, and the optimizer's nodes in it."""
    out = replicate(graph)
    count = (len(out) - len(graph)) // 2
    health.guessed["all-reduces over replicas inserted behind reduce-scatters"] += count
    marks = np.zeros(len(out), np.bool_)
    marks[np.flatnonzero(~np.isin(out.instance, np.arange(len(graph.collectives), len(out.collectives))))] = optimizer
    return out, marks


def _with_buckets(
    graph: Graph, optimizer: BoolArray, size_bytes: int, cluster: Cluster, calibration: Calibration, health: Health
) -> tuple[Graph, BoolArray]:
    """The graph with other gradient buckets, and the optimizer's nodes in it."""

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
        return graph, optimizer
    health.guessed["gradient buckets merged or split"] += len(set(out.instance.tolist()) - set(graph.instance.tolist()))
    origin = out.layer
    layer = graph.layer[origin] if len(graph.layer) else graph.layer
    return replace(out, layer=layer), optimizer[origin]


def _across_nodes(noise: Noise, ranks: int, cluster: Cluster) -> Noise:
    """Measured noise, with the prior's spread between ranks where all of them shared one node.

    Nodes differ more than the ranks of one do (9 % at 64,000 ranks, PRISM), and one node can't tell by how much.
    """
    if noise.source == PRIOR_NOISE.source or cluster.backend != "nccl" or ranks > cluster.node_size:
        return noise
    static = max(noise.static_cv, PRIOR_NOISE.static_cv)
    return replace(noise, static_cv=static, source=f"{noise.source}; spread between nodes from the prior")


def _jitter_s(graph: Graph, timeline: Timeline) -> float:
    """Standard deviation of step times, as if PRIOR_STEPS more steps had shown PRIOR_JITTER."""
    times = step_times_ns(graph, timeline.start_ns, timeline.end_ns) * 1e-9
    prior = PRIOR_JITTER * float(np.median(times))
    seen = float(((times - np.median(times)) ** 2).sum())
    return float(np.sqrt((PRIOR_STEPS * prior**2 + seen) / (PRIOR_STEPS + len(times) - 1)))


def _model(job: Job, key: str) -> float | None:
    """A number of the manifest's model, of one rank."""
    model = job.manifest.get("model")
    value = model.get(key) if isinstance(model, Mapping) else None
    return float(value) / max(1, job.world_size) if isinstance(value, int | float) and value > 0 else None


def _warn(found: Sequence[Evidence], cluster: Cluster, health: Health) -> None:
    if not found:
        health.note("No transfer of the trace could be used for calibration: all communication costs are the prior's.")
    elif cluster.tiers[0].link is Link.TCP:
        health.note("Transfers are as measured between these ranks; on another network than theirs, give --cluster.")
    if cluster.backend == "nccl" and found:
        largest = max(item.ranks for item in found)
        if largest <= cluster.node_size:
            health.note(f"All measured groups fit one domain of {cluster.node_size}: costs beyond it are the prior's.")


STANDS_OUT = 0.05
"""A rank whose own delay takes this share of the measured time is named."""


def _warn_straggler(timeline: Timeline, health: Health) -> None:
    """Say so where a slow rank is stretched along: its delay shows as communication of the ranks that wait for it."""
    worst = max(stragglers(timeline), key=lambda found: found.shorter_by_ns, default=None)
    if worst is not None and worst.shorter_by_ns > STANDS_OUT * timeline.makespan_ns:
        share = worst.shorter_by_ns / timeline.makespan_ns
        health.note(
            f"Rank {worst.rank} holds the job up for {share:.0%} of the measured time and is stretched along, as waiting "
            f"that counts as communication; see what it costs with whatif --set rank{worst.rank}.delay=none."
        )


def has_data_axis(graph: Graph) -> bool:
    """Whether any collective of the job belongs to a data axis, so that growing it costs something."""
    axes = {axis_of(graph.groups[item.group].axis) for item in graph.collectives if item.group >= 0}
    return bool(axes & set(DATA_AXES))


def _warn_data_axis(graph: Graph, health: Health) -> None:
    """Say so where growing the data axis would add ranks that never talk, or what they say has no cost model."""
    unmodelled = sum(item.kind not in FAMILY for item in graph.collectives)
    if unmodelled:
        health.guessed["collectives of a kind without a cost model, which keep their measured time"] += unmodelled
    if not has_data_axis(graph):
        health.note(
            "The trace holds no collective of a data axis, so more data-parallel ranks cost nothing here; "
            "record the job with at least two of them to have gradients synchronised."
        )


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
