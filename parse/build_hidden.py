"""Turns collectives that one rank's trace lacks into a member of it, placed by how long the other members waited.

A record can be lost while the kernel ran. The others then seem to transfer for as long as they waited: what exceeds the
usual transfer of the same payload is the time until the missing rank arrived. Only what the trace shows in the middle of
a rank's window counts, and only where exactly one rank is missing, so that there is no doubt whom the others awaited.
"""

from __future__ import annotations

import numpy as np

from scaletrace.parse.build_draft import Columns, Draft
from scaletrace.parse.build_meet import MemberNodes
from scaletrace.parse.events import Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, SYNCHRONISING, Job
from scaletrace.parse.waits import Instances, instances_of

FEWEST = 2
"""Complete instances alike from which a usual transfer is known."""
LEAST_WAIT_NS = 50_000
NEAR_NS, IDLE_NS, LAG_NS = 25_000, 50_000, 2_000
"""What starts this near to the end of a lost collective, after its stream was idle for longer, had awaited it."""
PLACED = "collectives that one rank's trace lacks, placed by the waits of the others"
_ANCHORS = tuple(
    int(kind)
    for kind in (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT, NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER)
)


def hidden_members(draft: Draft, job: Job, found: list[MemberNodes], health: Health) -> MemberNodes | None:
    """Members that must have been there, with nodes and an edge from what their rank had just done; None without any."""
    if bool(job.collectives.matched.all()):
        return None
    nodes = draft.nodes()
    candidates = _candidates(job, found, nodes)
    rows = []
    for one in candidates:
        anchor = _anchor(nodes, one[1], one[2])
        if anchor >= 0:
            rows.append((*one, anchor))
    if not rows:
        return None
    health.guessed[PLACED] += len(rows)
    instance, rank, arrived, transfer, followed = np.array(rows, np.int64).T
    arrive, moved = _add(draft, nodes, instance, rank, arrived, transfer, followed)
    _release(draft, nodes, rank, arrived + transfer, moved)
    draft.contradict(EdgeSource.HIDDEN, len(rows), 0)
    none = np.zeros(len(rows), np.bool_)
    return MemberNodes(instance, arrive, moved, arrived, arrived + transfer, none, none)


def _candidates(job: Job, found: list[MemberNodes], nodes: Columns) -> list[tuple[int, int, int, int]]:
    """(instance, missing rank, when it must have arrived, usual transfer) of instances that lack exactly one rank."""
    table, each = job.collectives, instances_of(job)
    first = np.flatnonzero(np.r_[True, table.instance[1:] != table.instance[:-1]])
    whole = table.matched[first] & (each.transfer_ns > 0)
    synchronising = np.isin(each.kind, [KINDS.index(kind) for kind in SYNCHRONISING])
    present = {trace.rank for trace in job.ranks}
    members = {group.id: present.intersection(group.members) for group in job.groups}
    if len(job.groups) == 1:
        members[-1] = members[job.groups[0].id]
    alike, windows = _alike(job, each, found, nodes), _windows(job)
    start, end = _seen(found)
    out = []
    for at in np.flatnonzero(~table.matched[first] & synchronising).tolist():
        group = int(each.group[at])
        seen = set(table.rank[table.instance == at].tolist())
        missing = members.get(group, set()) - seen
        same = whole & (alike == alike[at])
        if len(missing) != 1 or same.sum() < FEWEST or at not in start:
            continue
        rank, usual = missing.pop(), int(np.median(each.transfer_ns[same]))
        arrived = end[at] - usual
        low, high = windows.get((group, rank), (0, 0))
        if low < start[at] and end[at] < high and arrived - start[at] > max(LEAST_WAIT_NS, usual // 2):
            out.append((at, rank, arrived, usual))
    return out


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
    """First start and last end of what each rank recorded of each group."""
    table = job.collectives
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for group in np.unique(table.group).tolist():
        for rank in np.unique(table.rank[table.group == group]).tolist():
            mine = (table.group == group) & (table.rank == rank)
            out[group, rank] = (int(table.start_ns[mine].min()), int(table.end_ns[mine].max()))
    return out


def _seen(found: list[MemberNodes]) -> tuple[dict[int, int], dict[int, int]]:
    """Latest start and earliest end of the recorded members of each instance."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for one in found:
        for instance, begun, ended in zip(
            one.instance.tolist(), one.start_ns.tolist(), one.end_ns.tolist(), strict=True
        ):
            start[instance] = max(start.get(instance, begun), begun)
            end[instance] = min(end.get(instance, ended), ended)
    return start, end


def _anchor(nodes: Columns, rank: int, time_ns: int) -> int:
    """The node of a rank that ended last before a time: what the missing member most likely followed; -1 without."""
    mine = np.flatnonzero((nodes["rank"] == rank) & np.isin(nodes["kind"], _ANCHORS) & (nodes["end_ns"] <= time_ns))
    return int(mine[nodes["end_ns"][mine].argmax()]) if len(mine) else -1


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


def _release(draft: Draft, nodes: Columns, rank: IntArray, end_ns: IntArray, moved: Int32Array) -> None:
    """Edges to the kernels that started when a lost collective ended, after their stream had stood idle before it."""
    device = np.isin(nodes["kind"], (int(NodeKind.KERNEL), int(NodeKind.COPY)))
    for one, end, node in zip(rank.tolist(), end_ns.tolist(), moved.tolist(), strict=True):
        mine = np.flatnonzero(device & (nodes["rank"] == one))
        start = nodes["start_ns"][mine]
        near = mine[(start >= end - NEAR_NS) & (start <= end + NEAR_NS)]
        busy = mine[(nodes["end_ns"][mine] > end - IDLE_NS) & (start < end - NEAR_NS)]
        free = near[~np.isin(nodes["lane"][near], nodes["lane"][busy])]
        first = free[np.unique(nodes["lane"][free], return_index=True)[1]] if len(free) else free
        if len(first):
            lag = np.minimum(nodes["start_ns"][first] - end, LAG_NS)
            draft.contradict(EdgeSource.HIDDEN, len(first), 0)
            draft.add_edges(np.full(len(first), node, np.int32), first, lag, EdgeKind.EVENT_WAIT, EdgeSource.HIDDEN)
