"""Turns collectives that one rank's trace lacks into a member of it, placed by how long the other members waited.

A record can be lost while the kernel ran. The others then seem to transfer for as long as they waited: what exceeds the
usual transfer of the same payload is the time until the missing rank arrived. What on that rank began or returned when the
others ended had awaited it. Only what the trace shows in the middle of
a rank's window counts, and only where exactly one rank is missing, so that there is no doubt whom the others awaited.
"""

from __future__ import annotations

import numpy as np

from scaletrace.parse.build_draft import Columns, Draft
from scaletrace.parse.build_meet import MemberNodes
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, SYNCHRONISING, Job
from scaletrace.parse.waits import Instances, instances_of

FEWEST = 2
"""Complete instances alike from which a usual transfer is known."""
LEAST_WAIT_NS = 50_000
NEAR_NS, IDLE_NS, LAG_NS = 25_000, 50_000, 2_000
"""What starts this near to the end of a lost collective, after its stream was idle for longer, had awaited it."""
SLACK_SHARE = 8
"""Members end apart, by up to an eighth of an all-to-all in real jobs."""
PLACED = "collectives that one rank's trace lacks, placed by the waits of the others"
_ANCHORS = tuple(
    int(kind)
    for kind in (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT, NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER)
)
_AWAIT = tuple(
    int(kind) for kind in (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE, NodeKind.TRANSFER, NodeKind.WAIT)
)


def hidden_members(draft: Draft, job: Job, found: list[MemberNodes], health: Health) -> MemberNodes | None:
    """Members that must have been there, with nodes and an edge from what their rank had just done; None without any."""
    if bool(job.collectives.matched.all()):
        return None
    nodes = draft.nodes()
    rows = np.array(_candidates(job, found, nodes), np.int64).reshape(-1, 4)
    followed = _anchors(nodes, rows[:, 1], rows[:, 2])
    rows, followed = rows[followed >= 0], followed[followed >= 0]
    if not len(rows):
        return None
    health.guessed[PLACED] += len(rows)
    instance, rank, arrived, transfer = rows.T
    arrive, moved = _add(draft, nodes, instance, rank, arrived, transfer, followed)
    slack = np.maximum(_spread(found, instance), transfer // SLACK_SHARE)
    _release(draft, nodes, rank, arrived + transfer, slack, moved)
    draft.contradict(EdgeSource.HIDDEN, len(rows), 0)
    none = np.zeros(len(rows), np.bool_)
    return MemberNodes(instance, arrive, moved, arrived, arrived + transfer, none, none)


def _candidates(job: Job, found: list[MemberNodes], nodes: Columns) -> list[tuple[int, int, int, int]]:
    """(instance, missing rank, when it had arrived, transfer) of instances that lack exactly one rank.

    Where the others took no longer than usual they did not wait for it: it was there when the last of them came.
    """
    table, each = job.collectives, instances_of(job)
    first = np.flatnonzero(np.r_[True, table.instance[1:] != table.instance[:-1]])
    size = np.diff(np.r_[first, len(table)])
    synchronising = np.isin(each.kind, [KINDS.index(kind) for kind in SYNCHRONISING])
    present = {trace.rank for trace in job.ranks}
    members = {group.id: present.intersection(group.members) for group in job.groups}
    if len(job.groups) == 1:
        members[-1] = members[job.groups[0].id]
    start, end = _seen(found, len(each))
    usual = _usual(_alike(job, each, found, nodes), table.matched[first] & (each.transfer_ns > 0), each.transfer_ns)
    waited = end - usual - start
    arrived = np.where(waited > np.maximum(LEAST_WAIT_NS, usual // 2), end - usual, start)
    likely = ~table.matched[first] & synchronising & (usual > 0) & (end > start)
    windows = _windows(job) if likely.any() else {}
    out = []
    for at in np.flatnonzero(likely).tolist():
        group = int(each.group[at])
        seen = set(table.rank[first[at] : first[at] + size[at]].tolist())
        missing = members.get(group, set()) - seen
        if len(missing) != 1:
            continue
        rank = missing.pop()
        low, high = windows.get((group, rank), (0, 0))
        if low < start[at] and end[at] < high:
            out.append((at, rank, int(arrived[at]), int(end[at] - arrived[at])))
    return out


def _usual(alike: IntArray, whole: BoolArray, transfer_ns: IntArray) -> IntArray:
    """For each instance the median transfer of the whole ones that move the same, int64; 0 where these are too few."""
    at = np.flatnonzero(whole)
    at = at[np.lexsort((transfer_ns[at], alike[at]))]
    count = np.bincount(alike[at], minlength=int(alike.max(initial=-1)) + 1)
    first = np.cumsum(count) - count
    middle = at[np.minimum(first + count // 2, max(len(at) - 1, 0))] if len(at) else np.zeros(len(count), np.int64)
    return np.where(count[alike] >= FEWEST, transfer_ns[middle[alike]], 0)


def _alike(job: Job, each: Instances, found: list[MemberNodes], nodes: Columns) -> IntArray:
    """A number for each instance that those share which move the same: by payload, where it is unknown by their place
    among the collectives of their kind in a step."""
    step = np.full(len(each), -1, np.int64)
    for one in found:
        step[one.instance] = nodes["step"][one.arrive]
    begun = np.full(len(each), np.iinfo(np.int64).max)
    np.minimum.at(begun, job.collectives.instance, job.collectives.start_ns)
    kind, group = each.kind.astype(np.int64), each.group.astype(np.int64)
    order = np.lexsort((begun, step, group, kind))
    key = np.stack((kind, group, step), axis=1)[order]
    fresh = np.r_[True, (key[1:] != key[:-1]).any(axis=1)] if len(order) else np.zeros(0, np.bool_)
    place = np.empty(len(each), np.int64)
    place[order] = np.arange(len(order)) - np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
    known = each.bytes >= 0
    moved = np.stack((kind, group, np.where(known, each.bytes, place), known), axis=1)
    return np.asarray(np.unique(moved, axis=0, return_inverse=True)[1].reshape(-1), np.int64)


def _windows(job: Job) -> dict[tuple[int, int], tuple[int, int]]:
    """First start and last end of what each rank recorded of each group, by (group, rank)."""
    table = job.collectives
    order = np.lexsort((table.rank, table.group))
    group, rank = table.group[order], table.rank[order]
    first = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (rank[1:] != rank[:-1])])
    low, high = np.minimum.reduceat(table.start_ns[order], first), np.maximum.reduceat(table.end_ns[order], first)
    keys = zip(group[first].tolist(), rank[first].tolist(), strict=True)
    return dict(zip(keys, zip(low.tolist(), high.tolist(), strict=True), strict=True))


def _seen(found: list[MemberNodes], count: int) -> tuple[IntArray, IntArray]:
    """Latest start and earliest end of the recorded members of each instance, int64[count]; end before start without any."""
    start, end = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    instance = np.concatenate([one.instance for one in found])
    known = np.unique(instance)
    start[known], end[known] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    np.maximum.at(start, instance, np.concatenate([one.start_ns for one in found]))
    np.minimum.at(end, instance, np.concatenate([one.end_ns for one in found]))
    return start, end


def _anchors(nodes: Columns, rank: IntArray, time_ns: IntArray) -> IntArray:
    """The node of each rank that ended last before each time: what the missing member most likely followed; -1 without."""
    out = np.full(len(rank), -1, np.int64)
    usable = np.isin(nodes["kind"], _ANCHORS)
    for one in np.unique(rank).tolist():
        ask, mine = np.flatnonzero(rank == one), np.flatnonzero(usable & (nodes["rank"] == one))
        mine = mine[np.argsort(nodes["end_ns"][mine], kind="stable")]
        at = np.searchsorted(nodes["end_ns"][mine], time_ns[ask], side="right") - 1
        out[ask[at >= 0]] = mine[at[at >= 0]]
    return out


def _add(
    draft: Draft,
    nodes: Columns,
    instance: IntArray,
    rank: IntArray,
    arrived: IntArray,
    transfer: IntArray,
    anchor: IntArray,
) -> tuple[Int32Array, Int32Array]:
    """ARRIVE and TRANSFER nodes on a lane of their own, and the edge from the anchor."""
    lanes = {one: draft.lane(one, "collectives without a record", True) for one in np.unique(rank).tolist()}
    common = {
        "rank": rank,
        "lane": np.array([lanes[one] for one in rank.tolist()], np.int32),
        "name": draft.name("collective without a record (inferred)"),
        "step": nodes["step"][anchor],
        "instance": instance,
    }
    kind = int(NodeKind.ARRIVE)
    arrive = draft.add_nodes(len(rank), kind=kind, start_ns=arrived, end_ns=arrived, **common)
    kind = int(NodeKind.TRANSFER)
    moved = draft.add_nodes(
        len(rank), kind=kind, dur_ns=transfer, start_ns=arrived, end_ns=arrived + transfer, **common
    )
    lag = arrived - nodes["end_ns"][anchor]
    draft.add_edges(anchor, arrive, lag, EdgeKind.EVENT_WAIT, EdgeSource.HIDDEN)
    draft.add_edges(arrive, moved, 0, EdgeKind.STREAM, EdgeSource.ORDER)
    return arrive, moved


def _spread(found: list[MemberNodes], instance: IntArray) -> IntArray:
    """By how much the ends of the recorded members of each instance differ: so much later the lost one may have ended."""
    all_of, ends = (np.concatenate([getattr(one, name) for one in found]) for name in ("instance", "end_ns"))
    return np.array([int(np.ptp(ends[all_of == one])) for one in instance.tolist()], np.int64)


def _release(
    draft: Draft, nodes: Columns, rank: IntArray, end_ns: IntArray, slack_ns: IntArray, moved: Int32Array
) -> None:
    """Edges to what awaited a lost collective: kernels whose stream had stood idle until its end, and blocking calls."""
    at = np.flatnonzero(np.isin(nodes["kind"], _AWAIT) & np.isin(nodes["rank"], rank))
    at = at[np.lexsort((nodes["start_ns"][at], nodes["lane"][at]))]
    idle_since = np.full(len(at), np.iinfo(np.int64).min)
    same = nodes["lane"][at[1:]] == nodes["lane"][at[:-1]]
    idle_since[1:][same] = nodes["end_ns"][at[:-1]][same]
    order = np.argsort(nodes["start_ns"][at], kind="stable")
    at, idle_since = at[order], idle_since[order]
    waits = nodes["kind"][at] == int(NodeKind.WAIT)
    usable = nodes["kind"][at] != int(NodeKind.TRANSFER)
    for one, end, slack, node in zip(rank.tolist(), end_ns.tolist(), slack_ns.tolist(), moved.tolist(), strict=True):
        low, high = np.searchsorted(nodes["start_ns"][at], (end - NEAR_NS, end + slack + NEAR_NS + 1))
        here = slice(int(low), int(high))
        mine = usable[here] & (nodes["rank"][at[here]] == one)
        begun = at[here][mine & ~waits[here] & (idle_since[here] <= end - IDLE_NS)]
        returned = at[here][mine & waits[here] & (nodes["start_ns"][at[here]] >= end)]
        for to, kind, most in ((begun, EdgeKind.EVENT_WAIT, LAG_NS), (returned, EdgeKind.HOST_SYNC, NEAR_NS)):
            lag = np.minimum(nodes["start_ns"][to] - end, slack + most)
            draft.contradict(EdgeSource.HIDDEN, len(to), 0)
            draft.add_edges(np.full(len(to), node, np.int32), to, lag, kind, EdgeSource.HIDDEN)
