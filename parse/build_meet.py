"""Turns the members of all ranks' collectives into rendezvous: who waits for whom, and since when each transfers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_gpu import RankGpu
from scaletrace.parse.build_host import RankInput
from scaletrace.parse.build_works import RankWorks
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.job import KINDS, Job

HUB_FROM = 3
"""Members from which a full rendezvous goes through one hub instead of an edge per pair."""
OVERLAP_NS = 1_000


@dataclass(frozen=True, slots=True)
class Members:
    """The members of all instances seen by at least two ranks, sorted by instance: nodes and measured times."""

    instance: Int32Array
    arrive: Int32Array
    transfer: Int32Array
    start_ns: IntArray
    end_ns: IntArray
    alone: BoolArray
    hidden: BoolArray
    ptr: IntArray


@dataclass(frozen=True, slots=True)
class MemberNodes:
    """One rank's members: row of the job's table, nodes, measured times on the job's clock, and two peculiarities.

    alone: the member waits for nobody;  hidden: its recorded end says when the caller looked, not when data had arrived
    """

    instance: IntArray
    arrive: Int32Array
    transfer: Int32Array
    start_ns: IntArray
    end_ns: IntArray
    alone: BoolArray
    hidden: BoolArray


def gpu_members(job: Job, gpu: RankGpu, rank: RankInput) -> MemberNodes:
    table, kernels = job.collectives, gpu.kernels
    k = np.flatnonzero(kernels.is_comm)
    mine = np.flatnonzero((table.rank == gpu.rank) & (table.event >= 0))
    order = mine[np.argsort(table.event[mine], kind="stable")]
    at = np.minimum(np.searchsorted(table.event[order], kernels.row[k]), max(len(order) - 1, 0))
    hit = table.event[order][at] == kernels.row[k] if len(order) else np.zeros(len(k), np.bool_)
    k, at = k[hit], at[hit]
    start, end = kernels.start_ns[k] + rank.shift_ns, kernels.end_ns[k] + rank.shift_ns
    none = np.zeros(len(k), np.bool_)
    return MemberNodes(table.instance[order[at]], gpu.node_in[k], gpu.node_out[k], start, end, none, none)


def work_members(job: Job, found: RankWorks, shift_ns: int) -> MemberNodes:
    works = found.works
    start, end = works.start_ns + shift_ns, works.end_ns + shift_ns
    alone = works.kind == KINDS.index("send")
    return MemberNodes(
        job.collectives.instance[works.member], found.arrive, found.transfer, start, end, alone, found.hidden
    )


def all_members(found: list[MemberNodes]) -> Members:
    """All members sorted by instance."""
    instance = np.concatenate([one.instance for one in found]) if found else np.zeros(0, np.int64)
    _, dense = np.unique(instance, return_inverse=True)
    order = np.argsort(dense, kind="stable")
    count = int(dense.max()) + 1 if len(dense) else 0
    ptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(dense, minlength=count), out=ptr[1:])
    return Members(
        dense[order].astype(np.int32),
        np.concatenate([one.arrive for one in found])[order] if found else np.zeros(0, np.int32),
        np.concatenate([one.transfer for one in found])[order] if found else np.zeros(0, np.int32),
        np.concatenate([one.start_ns for one in found])[order] if found else np.zeros(0, np.int64),
        np.concatenate([one.end_ns for one in found])[order] if found else np.zeros(0, np.int64),
        np.concatenate([one.alone for one in found])[order] if found else np.zeros(0, np.bool_),
        np.concatenate([one.hidden for one in found])[order] if found else np.zeros(0, np.bool_),
        ptr,
    )


@jit
def _pairs(
    ptr: IntArray, start: IntArray, end: IntArray, hub: Int32Array, alone: BoolArray
) -> tuple[Int32Array, Int32Array, IntArray, int]:
    """Which member awaits which (positions), the latest start each awaits, and how many wait for fewer than all."""
    total = 0
    for i in range(len(ptr) - 1):
        total += (ptr[i + 1] - ptr[i]) ** 2
    src, dst = np.empty(total, np.int32), np.empty(total, np.int32)
    latest = start.copy()
    n, partial = 0, 0
    for i in range(len(ptr) - 1):
        for m in range(ptr[i], ptr[i + 1]):
            awaited = 0
            for p in range(ptr[i], ptr[i + 1]):
                if p != m and (alone[m] or start[p] >= end[m] - OVERLAP_NS):
                    continue
                awaited += 1
                latest[m] = max(latest[m], start[p])
                if p != m and hub[i] == 0:
                    src[n], dst[n] = p, m
                    n += 1
            partial += awaited < ptr[i + 1] - ptr[i]
    return src[:n], dst[:n], latest, partial


def add_rendezvous(draft: Draft, members: Members) -> IntArray:
    """Edges from the ARRIVE of each member to the TRANSFER of those that awaited it; returns when each transfer began.

    A member awaits those that had started before its own end: a collective is not always a barrier.
    """
    if not len(members.instance):
        return np.zeros(0, np.int64)
    ptr = members.ptr
    size = np.diff(ptr)
    latest = np.maximum.reduceat(members.start_ns, ptr[:-1])
    earliest_end = np.minimum.reduceat(members.end_ns, ptr[:-1])
    full = (latest < earliest_end - OVERLAP_NS) & (size >= HUB_FROM) & ~np.logical_or.reduceat(members.alone, ptr[:-1])
    src, dst, began, partial = _pairs(ptr, members.start_ns, members.end_ns, full.astype(np.int32), members.alone)
    draft.contradict(EdgeSource.MATCH, int((size * (size - 1)).sum()), 0)
    if partial:
        draft.offered["members that await fewer than all"] += int(partial)
    draft.add_edges(members.arrive[src], members.transfer[dst], 0, EdgeKind.RENDEZVOUS, EdgeSource.MATCH)
    at = np.flatnonzero(full)
    if len(at):
        hubs = draft.add_nodes(
            len(at),
            kind=int(NodeKind.RENDEZVOUS),
            name=draft.name("rendezvous"),
            start_ns=latest[at],
            end_ns=latest[at],
        )
        inside = np.repeat(full, size)
        hub_of = np.repeat(hubs, size[at])
        draft.add_edges(members.arrive[inside], hub_of, 0, EdgeKind.RENDEZVOUS, EdgeSource.MATCH)
        draft.add_edges(hub_of, members.transfer[inside], 0, EdgeKind.RENDEZVOUS, EdgeSource.MATCH)
    return began


def shown(members: Members, transfer_ns: IntArray) -> IntArray:
    """Transfers, of which the hidden ones take at most what the quickest one does that somebody waited for.

    Members that wait for nobody are measured by each other: a send of gloo ends when the system holds its bytes, which
    tells nothing of when a receive has them.
    """
    out = transfer_ns.copy()
    told = ~members.hidden & (transfer_ns > 0)
    for side in (members.alone, ~members.alone):
        mine = members.hidden & side
        if mine.any():
            seen = transfer_ns[told & side] if (told & side).any() else transfer_ns[told]
            least = int(seen.min()) if len(seen) else int(transfer_ns[mine].min())
            out[mine] = np.minimum(transfer_ns[mine], least)
    return out
