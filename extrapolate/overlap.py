"""Turns a replay into how long kernels ran beside collectives and transfers beside kernels, and durations into slowed ones.

A collective that waits for its members holds multiprocessors and nothing else; one that moves data also takes memory
bandwidth. The two are measured apart (κ of each, by kernel), since they part ways with scale: a gather over a thousand
ranks mostly waits for hops. A transfer beside which a kernel runs on one of its ranks is slower by μ. Measured durations
hold the slowdown of the measured overlap, which is taken out first: dur' = dur · (1 - lost(f)) / (1 - lost(f')), with f
the shares of a kernel beside a waiting and beside a moving collective, or of a transfer beside kernels.
What κ, μ and `lost` are is said in interference.py, which holds the priors of a device where a trace can't tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.compute import compute_nodes, device_lanes
from scaletrace.extrapolate.interference import COLLECTIVE_SLOWDOWN, lost
from scaletrace.jit import jit
from scaletrace.parse.build import Built
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, GraphCollective, NodeKind
from scaletrace.parse.job import Job
from scaletrace.replay.engine import replay
from scaletrace.replay.timeline import Timeline

Floats = npt.NDArray[np.float64]
PAIRS_WANTED = 5
"""A kernel counts as evidence where it ran at least this often with, and as often without, a resident collective."""
MOSTLY, HARDLY = 0.8, 0.05
LARGEST_KAPPA = 2.0
SPREAD = 0.5
"""How far kernels of a device are apart in κ (one sigma, relative to its prior); guessed, as the band of the prior is."""
MEASURED = 0.9
"""From this evidence on κ is called measured."""


@jit
def _covered(start: IntArray, end: IntArray, low: IntArray, high: IntArray, weight: Floats) -> Floats:
    """Weighted ns of each [start, end) that the sorted disjoint intervals [low, high) cover."""
    out = np.zeros(len(start))
    count = len(low)
    before = np.zeros(count + 1)
    for k in range(count):
        before[k + 1] = before[k] + (high[k] - low[k]) * weight[k]
    for i in range(len(start)):
        first = np.searchsorted(high, start[i], side="right")
        last = np.searchsorted(low, end[i], side="left")
        if first >= last or first >= count:
            continue
        total = before[last] - before[first]
        total -= max(0, start[i] - low[first]) * weight[first]
        total -= max(0, high[last - 1] - end[i]) * weight[last - 1]
        out[i] = max(0.0, total)
    return out


def union(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Disjoint intervals, sorted, that cover the same as [low, high)."""
    keep = high > low
    low, high = low[keep], high[keep]
    if not len(low):
        return low, high
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.ones(len(low), np.bool_)
    new[1:] = low[1:] > high[:-1]
    firsts = np.flatnonzero(new)
    return low[firsts], high[np.append(firsts[1:], len(low)) - 1]


def covered(start: IntArray, end: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """ns of each [start, end) that the union of [low, high) covers; all int64."""
    low, high = union(low, high)
    return _covered(start, end, low, high, np.ones(len(low))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Stays:
    """How long each member of a collective was resident: waiting from `low_ns` to `moving_ns`, then moving to `high_ns`.

    rank, instance int64[m]; the times int64[m].
    """

    rank: IntArray
    instance: IntArray
    low_ns: IntArray
    moving_ns: IntArray
    high_ns: IntArray


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a graph's structure overlap is asked of, found once for all durations and sizes.

    transfers int64[t]: every TRANSFER node;  source, target int64[e]: arrivals and the transfers (positions) they lead to
    kernels   by rank the kernels on a device, int64;  compute: by rank what computes (compute.compute_nodes)
    """

    transfers: IntArray
    source: IntArray
    target: IntArray
    kernels: Mapping[int, IntArray]
    compute: Mapping[int, IntArray]


def plan(graph: Graph) -> Plan:
    """The plan of a graph."""
    nodes = np.flatnonzero(graph.kind == NodeKind.TRANSFER)
    into = graph.edge_dst
    own = (graph.kind[into] == NodeKind.TRANSFER) & (graph.kind[graph.pred] == NodeKind.ARRIVE)
    own &= graph.rank[graph.pred] == graph.rank[into]
    kernels = np.flatnonzero((graph.kind == NodeKind.KERNEL) & device_lanes(graph))
    return Plan(
        nodes,
        graph.pred[own].astype(np.int64),
        np.searchsorted(nodes, into[own]),
        _by_rank(graph, kernels),
        _by_rank(graph, np.flatnonzero(compute_nodes(graph))),
    )


def _by_rank(graph: Graph, nodes: IntArray) -> dict[int, IntArray]:
    rank = graph.rank[nodes]
    return {int(each): nodes[rank == each] for each in np.flatnonzero(np.bincount(rank[rank >= 0]))}


def resident(graph: Graph, start_ns: IntArray, end_ns: IntArray, made: Plan | None = None) -> Stays:
    """Every member's stay, from its arrival to the end of its transfer."""
    made = made or plan(graph)
    nodes = made.transfers
    begin = start_ns[nodes].copy()
    np.minimum.at(begin, made.target, start_ns[made.source])
    return Stays(
        graph.rank[nodes].astype(np.int64),
        graph.instance[nodes].astype(np.int64),
        begin,
        start_ns[nodes],
        end_ns[nodes],
    )


def overlap_share(
    graph: Graph, start_ns: IntArray, end_ns: IntArray, moving: Floats | None = None, made: Plan | None = None
) -> npt.NDArray[np.float64]:
    """Shares of every device kernel beside a waiting and beside a moving collective of its rank; float64[n, 2].

    Of a transfer between devices the second is its share beside kernels, of the member that has most of them.
    moving: for each collective how much of its transfer moves data as hard as it did where it was measured (default
    all of it); the rest counts as waiting. Where several transfers overlap, the first counts.
    """
    out = np.zeros((len(graph), 2))
    made = made or plan(graph)
    stays = resident(graph, start_ns, end_ns, made)
    for rank, mine in made.kernels.items():
        stay = np.flatnonzero(stays.rank == rank)
        order = stay[np.argsort(stays.moving_ns[stay], kind="stable")]
        reached = np.maximum.accumulate(stays.high_ns[order]) if len(order) else np.zeros(0, np.int64)
        low = np.maximum(stays.moving_ns[order], np.concatenate(([np.iinfo(np.int64).min], reached[:-1])))
        weight = np.ones(len(order)) if moving is None else moving[stays.instance[order]]
        whole = np.maximum(1, end_ns[mine] - start_ns[mine])
        moves = _covered(start_ns[mine], end_ns[mine], low, np.maximum(low, stays.high_ns[order]), weight) / whole
        stayed = covered(start_ns[mine], end_ns[mine], stays.low_ns[stay], stays.high_ns[stay]) / whole
        out[mine, 1] = moves
        out[mine, 0] = np.maximum(0.0, stayed - moves)
    out[made.transfers, 1] = _beside_kernels(made, stays, start_ns, end_ns)
    return out


def _beside_kernels(made: Plan, stays: Stays, start_ns: IntArray, end_ns: IntArray) -> Floats:
    """Share of every transfer beside which a kernel runs on one of its ranks, where they are devices; float64[t].

    Members of one instance move together: the one that has kernels beside it for longest slows all.
    """
    share = np.zeros(len(made.transfers))
    for rank, mine in made.kernels.items():
        stay = np.flatnonzero(stays.rank == rank)
        whole = np.maximum(1, stays.high_ns[stay] - stays.moving_ns[stay])
        beside = covered(stays.moving_ns[stay], stays.high_ns[stay], start_ns[mine], end_ns[mine])
        share[stay] = beside / whole
    known = stays.instance >= 0
    most = np.zeros(int(stays.instance.max(initial=-1)) + 1)
    np.maximum.at(most, stays.instance[known], share[known])
    share[known] = most[stays.instance[known]]
    return share


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much slower compute runs beside a resident collective (κ): beside a waiting and beside a moving one.

    default  κ of kernels without evidence;  by_name  κ of kernels that the trace itself tells;  pairs  their number
    transfers  how much slower transfers are beside kernels (μ)
    evidence   how much of the kernels' time has a κ that the trace tells instead of the prior, 0 to 1
    """

    default: tuple[float, float]
    by_name: Mapping[str, tuple[float, float]]
    source: str
    pairs: int = 0
    transfers: float = COLLECTIVE_SLOWDOWN
    evidence: float = 0.0

    @property
    def provenance(self) -> str:
        """ "given", "prior", "measured", or "mixed (n kernels)" where only a part of the time is measured."""
        if self.source == "given" or not self.pairs:
            return "given" if self.source == "given" else "prior"
        return "measured" if self.evidence >= MEASURED else f"mixed ({_kernels(self.pairs)})"

    def per_node(self, graph: Graph) -> Floats:
        """κ of every node, (0, μ) of transfers; float64[n, 2]."""
        by_code = np.array([self.by_name.get(name, self.default) for name in graph.names] + [self.default])
        out = by_code[graph.name]
        out[graph.kind == NodeKind.TRANSFER] = 0.0, self.transfers
        return np.asarray(out)


def operands(job: Job, graph: Graph) -> IntArray:
    """Of every kernel a number for the dimensions of the operator that launched it, -1 where none are recorded; int64[n].

    One kernel of a library serves products of many depths on the same grid; only their operators tell them apart.
    All are -1 for a rewritten graph, whose nodes may stand on other ranks than their events.
    """
    out = np.full(len(graph), -1, np.int64)
    if not _as_recorded(job, graph):
        return out
    numbers: dict[str, int] = {}
    for trace in job.ranks:
        events = trace.events
        nodes = np.flatnonzero((graph.kind == NodeKind.KERNEL) & (graph.rank == trace.rank) & (graph.event >= 0))
        texts = events.texts("Input Dims")
        ops = np.flatnonzero(events.in_cats("cpu_op") & (events.external_id >= 0) & (texts >= 0))
        if not len(nodes) or not len(ops):
            continue
        ops = ops[np.argsort(events.external_id[ops], kind="stable")]
        wanted = events.external_id[graph.event[nodes]]
        at = np.minimum(np.searchsorted(events.external_id[ops], wanted), len(ops) - 1)
        hit = events.external_id[ops[at]] == wanted
        used, of_node = np.unique(texts[ops[at[hit]]], return_inverse=True)
        codes = [numbers.setdefault(events.strings[int(text)], len(numbers)) for text in used]
        out[nodes[hit]] = np.array(codes, np.int64)[of_node.reshape(-1)]
    return out


def _as_recorded(job: Job, graph: Graph) -> bool:
    """Whether every kernel's event is a kernel of its name on its own rank."""
    for trace in job.ranks:
        events = trace.events
        nodes = np.flatnonzero((graph.kind == NodeKind.KERNEL) & (graph.rank == trace.rank) & (graph.event >= 0))
        rows = graph.event[nodes]
        if len(rows) and int(rows.max()) >= len(events):
            return False
        codes = {text: code for code, text in enumerate(events.strings)}
        own = np.array([codes.get(name, -1) for name in graph.names], np.int64)
        if not np.array_equal(own[graph.name[nodes]], events.name[rows].astype(np.int64)):
            return False
    return True


def beside_nothing(graph: Graph, timeline: Timeline, dur_ns: IntArray, given: float | None = None) -> IntArray:
    """Durations with transfers as they would be without kernels beside them, which the cost models know nothing of.

    given: μ to take out; None: that which the trace tells (transfer_slowdown)
    """
    share = overlap_share(graph, timeline.start_ns, timeline.end_ns)
    share[graph.kind != NodeKind.TRANSFER] = 0.0
    found = transfer_slowdown(graph, share, dur_ns) if given is None else given
    return apply(dur_ns, np.full_like(share, found), share, np.zeros_like(share))


def of_job(built: Built, graph: Graph, prior: float) -> Slowdown | None:
    """What overlap costs a job's kernels, as its own replay runs them; None where nothing overlaps.

    graph: that of `built`, whose groups may have other names;  prior: κ of its device
    """
    timeline = replay(graph)
    share = overlap_share(graph, timeline.start_ns, timeline.end_ns)
    return measure(graph, share, prior, operands=operands(built.job, graph)) if share.any() else None


def measure(
    graph: Graph, share: Floats, prior: float, dur_ns: IntArray | None = None, operands: IntArray | None = None
) -> Slowdown:
    """κ from kernels that ran both with and without a resident collective, of the same name and grid.

    operands: further tells kernels apart that do other work under one name (`operands`).

    For each such kernel κ = ratio of medians - 1, once for waiting and once for moving collectives, as far as its runs
    agree (`Pair.trust`). The defaults are the time-weighted means, drawn to the prior as if that were worth PAIRS_WANTED
    kernels, and what a kernel's own runs leave open is the default. What comes out negative counts in the mean and is
    not applied. μ is that of transfer_slowdown.
    """
    durations = graph.dur_ns if dur_ns is None else dur_ns
    apart = np.zeros(len(graph), np.int64) if operands is None else operands
    found = [_pairs(graph, share, durations, apart, column, prior) for column in (0, 1)]
    names = sorted({pair.name for rows in found for pair in rows})
    transfers = transfer_slowdown(graph, share, durations)
    if not names:
        return Slowdown((prior, prior), {}, "prior of the device", transfers=transfers)
    default = _drawn(found[0], prior), _drawn(found[1], prior)
    by_name = {}
    for name in names:
        own = [[pair for pair in rows if pair.name == name] for rows in found]
        by_name[name] = (_mean(own[0], default[0]), _mean(own[1], default[1]))
    source = f"{_kernels(len(names))} with and without a resident collective, drawn to the prior of the device"
    return Slowdown(default, by_name, source, len(names), transfers, _evidence(graph, durations, found[1]))


def _kernels(count: int) -> str:
    return f"{count} kernel{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class Pair:
    """What one kernel's runs beside a collective in one state, and beside none, tell: κ, their time, and how far to
    trust it.

    trust  variance of κ among kernels over that plus the variance of this one, by the scatter and number of its runs
    """

    name: str
    kappa: float
    time_ns: float
    trust: float


def _pairs(graph: Graph, share: Floats, durations: IntArray, apart: IntArray, column: int, prior: float) -> list[Pair]:
    """Kernels with enough runs beside a collective in that state and beside none."""
    kernels = np.flatnonzero((graph.kind == NodeKind.KERNEL) & device_lanes(graph) & (durations > 0))
    blocks = graph.blocks if len(graph.blocks) else np.zeros(len(graph), np.int32)
    key = np.stack([graph.name[kernels].astype(np.int64) * (2**31) + blocks[kernels], apart[kernels]], axis=1)
    _, number = np.unique(key, axis=0, return_inverse=True)
    order = np.argsort(number.reshape(-1), kind="stable")
    _, first = np.unique(number.reshape(-1)[order], return_index=True)
    out: list[Pair] = []
    for group in np.split(kernels[order], first[1:]):
        free = durations[group[share[group].sum(axis=1) <= HARDLY]]
        beside = durations[group[(share[group, column] >= MOSTLY) & (share[group, 1 - column] <= HARDLY)]]
        if min(len(beside), len(free)) >= PAIRS_WANTED:
            ratio = float(np.median(beside) / np.median(free))
            unsure = ratio**2 * (_median_error(beside) ** 2 + _median_error(free) ** 2)
            spread = (SPREAD * prior) ** 2
            trust = spread / (spread + unsure) if spread + unsure > 0 else 1.0
            out.append(Pair(graph.name_of(int(group[0])), ratio - 1.0, float(durations[group].sum()), trust))
    return out


def _median_error(values: IntArray) -> float:
    """Relative standard error of a median, from the scatter of the values around it."""
    middle = float(np.median(values))
    scatter = 1.4826 * float(np.median(np.abs(values - middle)))
    return float(np.sqrt(np.pi / 2 / len(values))) * scatter / middle


def _evidence(graph: Graph, durations: IntArray, rows: Sequence[Pair]) -> float:
    """How much of all kernels' time has a κ beside moving collectives that was measured: its own, else the default's."""
    kernels = (graph.kind == NodeKind.KERNEL) & device_lanes(graph)
    own = sum(pair.time_ns * pair.trust for pair in rows) / max(1.0, float(durations[kernels].sum()))
    told = sum(pair.trust for pair in rows)
    return own + (1 - own) * told / (told + PAIRS_WANTED)


def transfer_slowdown(graph: Graph, share: Floats, durations: IntArray) -> float:
    """μ from collectives of one kind, size and group that ran at least twice beside kernels and twice beside none.

    The mean of ratio of medians - 1, each counted as often as its rarer state was seen, drawn to the prior as if that
    were worth PAIRS_WANTED runs: few transfers of a step have nothing beside them, and contention only adds to those.
    """
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0) & (durations > 0))
    nodes = nodes[device_lanes(graph)[nodes]]
    _, first = np.unique(graph.instance[nodes], return_index=True)
    alike: dict[GraphCollective, list[int]] = {}
    for node in nodes[first].tolist():
        alike.setdefault(graph.collectives[int(graph.instance[node])], []).append(node)
    total, weight = COLLECTIVE_SLOWDOWN * PAIRS_WANTED, float(PAIRS_WANTED)
    for runs in alike.values():
        each = np.array(runs)
        free, beside = each[share[each, 1] <= HARDLY], each[share[each, 1] >= MOSTLY]
        count = min(len(beside), len(free))
        if count >= 2:
            ratio = float(np.median(durations[beside]) / np.median(durations[free]))
            total += count * min(LARGEST_KAPPA, max(0.0, ratio - 1.0))
            weight += count
    return total / weight


def _mean(rows: Sequence[Pair], otherwise: float) -> float:
    """Time-weighted κ, between none and LARGEST_KAPPA; what the runs of a kernel leave open is `otherwise`."""
    total = sum(pair.time_ns for pair in rows)
    if not total:
        return otherwise
    mean = sum((pair.trust * pair.kappa + (1 - pair.trust) * otherwise) * pair.time_ns for pair in rows) / total
    return min(LARGEST_KAPPA, max(0.0, mean))


def _drawn(rows: Sequence[Pair], prior: float) -> float:
    """The mean of all kernels, drawn to the prior; a kernel whose runs scatter counts for less than one."""
    told = sum(pair.trust for pair in rows)
    weight = sum(pair.trust * pair.time_ns for pair in rows)
    own = sum(pair.trust * pair.kappa * pair.time_ns for pair in rows) / weight if weight else prior
    return (min(LARGEST_KAPPA, max(0.0, own)) * told + prior * PAIRS_WANTED) / (told + PAIRS_WANTED)


def lost_shares(kappa: Floats, share: Floats) -> Floats:
    """Of every node the share of its run that it would not need with nothing beside it; float64[n]."""
    return np.asarray((share * kappa / (1 + kappa)).sum(axis=1))


def apply(dur_ns: IntArray, kappa: Floats, was: Floats, now: Floats) -> IntArray:
    """Durations with the overlap `was` taken out and `now` put in (float64[n, 2]); bits stay where the overlap does."""
    out = dur_ns.copy()
    _apply(out, kappa, was, now)
    return out


@jit
def _apply(dur_ns: IntArray, kappa: Floats, was: Floats, now: Floats) -> None:
    for v in range(len(dur_ns)):
        if was[v, 0] == now[v, 0] and was[v, 1] == now[v, 1]:
            continue
        before = 1 - lost(was[v, 0], kappa[v, 0]) - lost(was[v, 1], kappa[v, 1])
        after = 1 - lost(now[v, 0], kappa[v, 0]) - lost(now[v, 1], kappa[v, 1])
        dur_ns[v] = np.int64(np.round(dur_ns[v] * before / after))
