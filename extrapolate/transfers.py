"""Turns the collectives of a graph into costs: what each moves, over which group, and how its time changes with scale.

A transfer's new time is its measured time multiplied by the ratio of two model costs. Only where there is no measured
time to speak of (a group of one rank) the model's own seconds are taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.cluster import Cluster, place
from scaletrace.extrapolate.costs import FAMILY, NOT_TREE, Calibration, Cost, Provenance, collective_seconds
from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import (
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    NodeKind,
    edges_by_destination,
)
from scaletrace.parse.health import Health

Floats = npt.NDArray[np.float64]
SMALLEST_BYTES, LARGEST_BYTES = 4.0, 2.0**40
CLEAN = 0.4
"""Quantile of equal transfers that tells what one takes by itself: contention and late members only ever add."""


def whole_bytes(item: GraphCollective, group_size: int) -> int:
    """Bytes of the whole vector (costs.collective_seconds), -1 where the trace doesn't say."""
    if item.kind == "all_gather":
        return item.bytes_out if item.bytes_out >= 0 else item.bytes_in * group_size if item.bytes_in >= 0 else -1
    if item.kind == "reduce_scatter":
        return item.bytes_in if item.bytes_in >= 0 else item.bytes_out * group_size if item.bytes_out >= 0 else -1
    return max(item.bytes_in, item.bytes_out)


def with_groups(graph: Graph, ranks: int, health: Health) -> Graph:
    """The graph with every collective in a group: those of unknown group are taken to span all ranks."""
    lost = [item for item in graph.collectives if item.group < 0]
    if not lost:
        return graph
    health.guessed["collectives of unknown group taken to span all ranks"] += len(lost)
    world = len(graph.groups)
    collectives = tuple(replace(item, group=world) if item.group < 0 else item for item in graph.collectives)
    return replace(graph, groups=(*graph.groups, GraphGroup("", ranks, 1)), collectives=collectives)


@jit
def _alone(start: IntArray, end: IntArray, order: IntArray) -> Floats:
    """Share of each transfer in the time that its rank's link is busy: dt / (transfers under way), summed.

    start, end int64[m] of one rank; order int64[2m]: positions of all starts (i) and ends (m + i), by time.
    """
    m = len(start)
    active = np.zeros(m, np.bool_)
    out = np.zeros(m)
    count, last = 0, np.int64(0)
    for at in order:
        i = at if at < m else at - m
        now = start[i] if at < m else end[i]
        if count > 0 and now > last:
            share = (now - last) / count
            for j in range(m):
                if active[j]:
                    out[j] += share
        last = now
        if at < m:
            active[i] = True
            count += 1
        else:
            active[i] = False
            count -= 1
    return out


def unshared_ns(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Durations with every transfer cut to what it would take alone on its rank's link; int64[n].

    Transfers of one rank that overlap share its link; serial transfers of these lengths end when the last of them did.
    """
    out = graph.dur_ns.copy()
    transfers = np.flatnonzero(graph.kind == NodeKind.TRANSFER)
    for rank in np.unique(graph.rank[transfers]):
        mine = transfers[graph.rank[transfers] == rank]
        start, end = start_ns[mine], end_ns[mine]
        times = np.concatenate((start, end))
        is_start = np.concatenate((np.ones(len(mine)), np.zeros(len(mine))))
        order = np.lexsort((is_start, times)).astype(np.int64)
        zero = start == end
        out[mine] = np.where(zero, 0, np.round(_alone(start, end, order))).astype(np.int64)
    return out


def serialised(graph: Graph) -> Graph:
    """The graph in which transfers of one rank take turns on its link, in the order in which they began."""
    transfers = np.flatnonzero(graph.kind == NodeKind.TRANSFER)
    order = transfers[np.lexsort((transfers, graph.rank[transfers]))]
    same = graph.rank[order[1:]] == graph.rank[order[:-1]]
    src, dst = order[:-1][same], order[1:][same]
    ptr, pred, lag, kind, source = edges_by_destination(
        len(graph),
        np.concatenate((graph.pred, src)),
        np.concatenate((graph.edge_dst, dst)),
        np.concatenate((graph.lag_ns, np.zeros(len(src), np.int64))),
        np.concatenate((graph.edge_kind, np.full(len(src), int(EdgeKind.OCCUPANCY), np.uint8))),
        np.concatenate((graph.edge_source, np.full(len(src), int(EdgeSource.REWRITE), np.uint8))),
    )
    return replace(graph, pred_ptr=ptr, pred=pred, lag_ns=lag, edge_kind=kind, edge_source=source)


def transfer_by_instance(graph: Graph, dur_ns: IntArray) -> Floats:
    """Transfer of each collective in ns, NaN without a member; float64[len(collectives)].

    The median of its members, which end together; of gathers between hosts the shortest, as they end one after another
    and what the last ones wait beside the transfer depends on how they arrived (gloo.candidates).
    """
    device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)
    out = np.full(len(graph.collectives), np.nan)
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    if not len(nodes):
        return out
    order = nodes[np.argsort(graph.instance[nodes], kind="stable")]
    instance = graph.instance[order]
    found, first = np.unique(instance, return_index=True)
    for at, members in zip(found.tolist(), np.split(order, first[1:]), strict=True):
        each = dur_ns[members]
        apart = graph.collectives[at].kind == "all_gather" and not device[graph.lane[members]].any()
        out[at] = each.min() if apart else np.median(each)
    return out


_ALGORITHM = re.compile(
    r"ncclDevKernel_([A-Za-z]+)_\w*?(RING|TREE|NVLS_TREE|NVLS|PAT)_(LL128|LL|SIMPLE)\b", re.IGNORECASE
)


def algorithm_of(kernel: str) -> str:
    """The algorithm that an NCCL kernel's name tells, NOT_TREE where it rules only the tree out, "" where it says nothing.

    NCCL since 2.19 compiles one kernel for all algorithms of a gather or broadcast, and two for a reduction: TREE_LL
    for trees, RING_LL for all others, SHARP included (device/generate.py, best_kernel). Other protocols in a name mean
    that it was built with exact names.
    """
    found = _ALGORITHM.search(kernel)
    if not found:
        return ""
    kind, algorithm, protocol = found[1].lower(), found[2].lower(), found[3].lower()
    if algorithm != "ring" or protocol != "ll":
        return algorithm
    return NOT_TREE if kind in ("allreduce", "reduce", "reducescatter") else ""


def _algorithms(graph: Graph) -> list[str]:
    """The algorithm of each collective, as the kernel of one of its members names it."""
    out = [""] * len(graph.collectives)
    by_name = [algorithm_of(name) for name in graph.names]
    for node in np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0)).tolist():
        if graph.name[node] >= 0:
            out[int(graph.instance[node])] = by_name[int(graph.name[node])]
    return out


def evidence(graph: Graph, dur_ns: IntArray) -> list[Evidence]:
    """What the graph's own transfers say about costs: one piece per kind, size and group, the median of its instances.

    The smaller half counts (CLEAN).
    """
    transfer = transfer_by_instance(graph, dur_ns)
    seen: dict[tuple[str, int, int, int, str], list[float]] = {}
    for item, ns, algorithm in zip(graph.collectives, transfer.tolist(), _algorithms(graph), strict=True):
        if item.group < 0 or item.kind not in FAMILY or not ns > 0:
            continue
        group = graph.groups[item.group]
        size = whole_bytes(item, group.size)
        if size > 0 and group.size > 1:
            key = (item.kind, size, group.size, max(1, group.stride), algorithm)
            seen.setdefault(key, []).append(ns)
    return [
        Evidence(
            kind,
            size,
            ranks,
            float(np.quantile(times, CLEAN)) * 1e-9,
            stride=stride,
            algorithm=algorithm,
            weight=len(times) ** 0.5,
        )
        for (kind, size, ranks, stride, algorithm), times in seen.items()
    ]


def with_sizes(graph: Graph, dur_ns: IntArray, cluster: Cluster, health: Health) -> Graph:
    """The graph with every size known: a missing one is what the cost model says moves in the measured time."""
    transfer = transfer_by_instance(graph, dur_ns)
    items = list(graph.collectives)
    for at, item in enumerate(items):
        if item.group < 0 or item.kind not in FAMILY or whole_bytes(item, graph.groups[item.group].size) >= 0:
            continue
        group = graph.groups[item.group]
        size = _invert(item.kind, group, float(transfer[at]) * 1e-9, cluster)
        shard = max(1, size // max(1, group.size))
        small_in, small_out = item.kind == "all_gather", item.kind == "reduce_scatter"
        items[at] = replace(item, bytes_in=shard if small_in else size, bytes_out=shard if small_out else size)
        health.guessed["sizes of collectives taken from their time, since the trace doesn't carry them"] += 1
    return replace(graph, collectives=tuple(items))


def _invert(kind: str, group: GraphGroup, seconds: float, cluster: Cluster) -> int:
    """Bytes for which the model takes `seconds`, by bisection; the smallest where latency alone takes longer."""
    if group.size < 2 or not seconds > 0:
        return int(SMALLEST_BYTES)
    low, high = np.log(SMALLEST_BYTES), np.log(LARGEST_BYTES)
    for _ in range(50):
        middle = (low + high) / 2
        cost = collective_seconds(kind, float(np.exp(middle)), group.size, cluster, stride=max(1, group.stride))
        low, high = (middle, high) if cost.seconds < seconds else (low, middle)
    return int(np.exp(low))


UNMODELLED = Cost(1e-9, 0.0, 0.0, "unmodelled", Provenance.PRIOR, 0.5)
"""Stands for a collective of another size whose kind has no cost model: it keeps its measured time, which may be off."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Durations at another scale, with the cost of each collective there (None where it has no model).

    moving float64[collectives]: how hard a transfer moves data, relative to the measured scale (1 = as hard): the share
    of its time that bytes take, there over here.
    """

    dur_ns: IntArray
    costs: tuple[Cost | None, ...]
    moving: Floats

    @property
    def worst(self) -> Provenance:
        """The weakest provenance of any collective that takes time."""
        return max((cost.provenance for cost in self.costs if cost and cost.seconds > 0), default=Provenance.MEASURED)

    def errors(self) -> Floats:
        """Relative error of each collective's time, float64[len(collectives)]; 0 where nothing was modelled."""
        return np.array([cost.rel_error if cost else 0.0 for cost in self.costs])


def rescale(
    old: Graph, new: Graph, dur_ns: IntArray, cluster: Cluster, calibration: Calibration | None, nics: int | None = None
) -> Scaled:
    """Durations of `new`, which is `old` with other groups and sizes; `dur_ns` int64[n] belongs to `old`."""
    cache: dict[tuple[str, int, int, int], Cost] = {}

    def cost_of(item: GraphCollective, groups: Sequence[GraphGroup]) -> Cost | None:
        if item.group < 0 or item.kind not in FAMILY:
            return None
        group = groups[item.group]
        key = (item.kind, max(1, whole_bytes(item, group.size)), group.size, max(1, group.stride))
        if key not in cache:
            cache[key] = collective_seconds(
                key[0], key[1], key[2], cluster, stride=key[3], calibration=calibration, nics=nics
            )
        return cache[key]

    change = _Change.nothing(len(new.collectives))
    grown = any(_larger(old, was, new, now) for was, now in zip(old.collectives, new.collectives, strict=True))
    costs: list[Cost | None] = []
    for at, (was, now) in enumerate(zip(old.collectives, new.collectives, strict=True)):
        before, after = cost_of(was, old.groups), cost_of(now, new.groups)
        costs.append(
            _unchanged(after) if after and (was, old.groups[was.group]) == (now, new.groups[now.group]) else after
        )
        if before is not None and after is not None:
            # More ranks never make the same bytes faster; only a prior beyond a slow measured tier would say so.
            # Those that fill a partly filled node do.
            floor = _larger(old, was, new, now) and _even(old.groups[was.group], cluster)
            change.set(at, before, after, grown, floor)
        elif now.group >= 0 and new.groups[now.group].size != old.groups[was.group].size:
            costs[-1] = UNMODELLED
    return Scaled(_changed(new, dur_ns, change), tuple(costs), change.moving)


@dataclass(frozen=True, slots=True)
class _Change:
    """What becomes of each collective's time, float64[collectives]: measured × ratio + absolute (ns).

    evens_out  bool[collectives]: all members take as long as the last one there
    """

    ratio: Floats
    absolute: Floats
    moving: Floats
    evens_out: BoolArray

    @classmethod
    def nothing(cls, count: int) -> _Change:
        return cls(np.ones(count), np.zeros(count), np.ones(count), np.zeros(count, np.bool_))

    def set(self, at: int, before: Cost, after: Cost, grown: bool, floor: bool) -> None:
        """One collective's change by its costs; `floor`: it takes no less than measured."""
        if not before.seconds > 0:
            self.moving[at] = after.wire_share
            self.ratio[at], self.absolute[at] = 0.0, after.seconds * 1e9
            return
        self.moving[at] = min(1.0, after.wire_share / max(before.wire_share, 1e-9))
        self.evens_out[at] = before.last_s > 0 and (grown or before.seconds != after.seconds)
        ratio = after.seconds / (before.seconds - (before.last_s if self.evens_out[at] else 0.0))
        self.ratio[at] = max(1.0, ratio) if floor else ratio


def _larger(old: Graph, was: GraphCollective, new: Graph, now: GraphCollective) -> bool:
    return was.group >= 0 and now.group >= 0 and new.groups[now.group].size > old.groups[was.group].size


def beyond_ns(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> Floats:
    """Of each transfer's time what exceeds CLEAN of those like it, 0 where its rank moved something else; float64[n].

    Over TCP that is a thread waiting for a core or a packet that is late: it depends on the host and not on what is
    moved, so another size or group does not stretch it.
    """
    out = np.zeros(len(graph))
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    transfer = transfer_by_instance(graph, graph.dur_ns)
    like: dict[tuple[str, int, int, int], list[int]] = {}
    for at, item in enumerate(graph.collectives):
        if item.group >= 0 and transfer[at] > 0:
            group = graph.groups[item.group]
            like.setdefault((item.kind, whole_bytes(item, group.size), group.size, group.stride), []).append(at)
    beyond = np.zeros(len(transfer))
    for members in like.values():
        each = transfer[members]
        beyond[members] = np.maximum(0.0, each - np.quantile(each, CLEAN, method="lower"))
    beyond[graph.instance[nodes[unshared_ns(graph, start_ns, end_ns)[nodes] != graph.dur_ns[nodes]]]] = 0.0
    out[nodes] = np.minimum(beyond[graph.instance[nodes]], graph.dur_ns[nodes])
    return out


def _changed(graph: Graph, dur_ns: IntArray, change: _Change) -> IntArray:
    """Durations with the change applied to the transfers."""
    out = dur_ns.copy()
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    instance = graph.instance[nodes]
    changed = (change.ratio != 1.0) | (change.absolute != 0.0) | change.evens_out
    nodes, instance = nodes[changed[instance]], instance[changed[instance]]
    # Where members end one after another, which of them is last differs elsewhere: all take as long as the last one
    # there, in proportion to the one that had nothing to wait for here. So it is in groups that stay as they are, once
    # the job has more ranks: two alone may arrive together and have nothing to wait for, two of many hardly do.
    shortest = np.full(len(change.ratio), np.iinfo(np.int64).max)
    np.minimum.at(shortest, instance, dur_ns[nodes])
    was_ns = np.where(change.evens_out[instance], shortest[instance], dur_ns[nodes])
    out[nodes] = np.round(was_ns * change.ratio[instance] + change.absolute[instance]).astype(np.int64)
    return out


def _even(group: GraphGroup, cluster: Cluster) -> bool:
    return place(group.size, cluster, max(1, group.stride)).even


def _unchanged(cost: Cost) -> Cost:
    """A cost at the measured scale: the measured time itself is used, so the model's error doesn't matter."""
    return replace(cost, provenance=Provenance.MEASURED, rel_error=0.0)


def instance_of_hubs(graph: Graph) -> Int32Array:
    """`graph.instance` with hubs given the instance of the members that they join."""
    instance = graph.instance.copy()
    hubs = np.flatnonzero((graph.kind == NodeKind.RENDEZVOUS) & (instance < 0))
    for hub in hubs.tolist():
        preds = graph.pred[graph.pred_ptr[hub] : graph.pred_ptr[hub + 1]]
        if len(preds):
            instance[hub] = graph.instance[preds[0]]
    return instance
