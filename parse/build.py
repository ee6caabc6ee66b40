"""Turns a Job into a Graph: nodes and edges of all ranks, their rendezvous, and a count of all that was inferred."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.build_cpu import RankCpu, add_cpu_rank
from scaletrace.parse.build_draft import Draft, finish
from scaletrace.parse.build_gpu import RankGpu
from scaletrace.parse.build_host import RankInput
from scaletrace.parse.build_rank import add_rank, external_kernels, read_rank
from scaletrace.parse.build_stalls import Columns, add_occupancy, add_tight_ends, insert_stalls, residuals, time_sliced
from scaletrace.parse.cats import DEVICE_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import (
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    Measured,
    NodeKind,
)
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, Clock, Job, RankTrace

HUB_FROM = 3
"""Members from which a full rendezvous goes through one hub instead of an edge per pair."""
OVERLAP_NS = 1_000


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """drop: edge sources to leave out, so that an experiment can show what each is worth. stalls: add STALL nodes."""

    drop: frozenset[EdgeSource] = frozenset()
    stalls: bool = True


@dataclass(frozen=True, slots=True)
class Quality:
    """How well the graph explains the trace, before any replay.

    explained_starts      share of kernel starts within 20 µs of what their predecessors explain
    unexplained_stall_ns  per rank: sum of the STALL nodes;  window_ns: what they are a share of
    offered, contradicted edges by source: how many a rule offered, how many the trace refutes
    """

    explained_starts: float
    explained_tight: float
    unexplained_stall_ns: dict[int, int]
    window_ns: int
    offered: dict[str, int]
    contradicted: dict[str, int]
    time_sliced_ranks: tuple[int, ...] = ()

    @property
    def worst_stall_fraction(self) -> float:
        """Unexplained stall of the worst rank as a share of the window."""
        return max(self.unexplained_stall_ns.values(), default=0) / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, slots=True)
class Built:
    """A graph with what was measured beside it, how well it explains the trace, and the job it came from."""

    graph: Graph
    measured: Measured
    quality: Quality
    job: Job
    health: Health = field(default_factory=Health)


def build(job: Job, options: BuildOptions | None = None) -> Built:
    """The dependency graph of a job. Measured times choose structure, durations and refutations, never a start."""
    options = options or BuildOptions()
    health, draft = Health(), Draft()
    group_index = _add_groups(draft, job)
    inputs = _inputs(draft, job, group_index)
    gpus: list[RankGpu] = []
    found: list[MemberNodes] = []
    for rank in inputs:
        if rank.trace.events.in_cats(*DEVICE_CATS).any():
            part = read_rank(rank, health)
            rank.shift_ns -= part.device_shift_ns
            gpus.append(add_rank(draft, rank, part, health))
            found.append(_gpu_members(job, gpus[-1], rank))
        else:
            cpu = add_cpu_rank(draft, job, rank.trace, rank.shift_ns, rank.instance_of, health)
            found.append(_cpu_members(job, cpu, rank.shift_ns))
    members = _members(found)
    if members.hidden.any():
        health.guessed["point-to-point transfers that hid under other work (taken as the quickest that did not)"] += (
            int(members.hidden.sum())
        )
    transfers = _add_rendezvous(draft, members)
    _explain(draft, gpus, members, transfers)
    nodes, edges = _tables(draft, gpus, members, transfers, options)
    residual = residuals(nodes, edges)
    sliced = time_sliced(nodes, residual)
    if sliced:
        health.note(
            f"the device of rank {', '.join(map(str, sliced))} stands still at regular intervals with work ready, as one does that another "
            "process shares: its stalls can't be predicted"
        )
    if options.stalls:
        nodes, edges = insert_stalls(draft, nodes, edges, residual, sliced)
    graph, measured, cyclic = finish(draft, nodes, edges)
    if not len(graph):
        health.note("nothing to replay: no operators, runtime calls or device records with a known time")
    if cyclic:
        health.dropped["edges that close a cycle"] += cyclic
        draft.contradict(EdgeSource.MATCH, 0, cyclic)
    quality = _quality(draft, nodes, residual, [trace.rank for trace in job.ranks], sliced)
    return Built(graph, _with_steps(graph, measured), quality, job, health)


def _add_groups(draft: Draft, job: Job) -> dict[int, int]:
    index, host = {}, {trace.rank: trace.host for trace in job.ranks}
    for group in job.groups:
        index[group.id] = len(draft.groups)
        nodes = len({host[rank] for rank in group.members if host.get(rank)}) or 1
        draft.groups.append(GraphGroup(group.axis, group.size, group.stride, nodes, group.description))
    return index


def _inputs(draft: Draft, job: Job, group_index: dict[int, int]) -> list[RankInput]:
    """One input a rank: its shift onto the job's clock and which of its rows belong to which collective."""
    table = job.collectives
    _, first = np.unique(table.instance, return_index=True)
    position = {int(table.instance[row]): at for at, row in enumerate(first.tolist())}
    only_group = 0 if len(job.groups) == 1 else -1
    for row in first.tolist():
        draft.collectives.append(
            GraphCollective(
                KINDS[int(table.kind[row])],
                group_index.get(int(table.group[row]), only_group),
                int(table.bytes_in[row]),
                int(table.bytes_out[row]),
            )
        )
    out = []
    for trace in job.ranks:
        clock = job.clocks.get(trace.rank)
        rows = np.flatnonzero((table.rank == trace.rank) & (table.event >= 0))
        of_row = {
            int(event): position[int(instance)]
            for event, instance in zip(table.event[rows], table.instance[rows], strict=True)
        }
        shift = _shift_ns(clock, trace) if clock is not None else 0
        out.append(RankInput(trace, shift, table.event[rows].astype(np.int64), of_row))
    return out


def _shift_ns(clock: Clock, trace: RankTrace) -> int:
    """What brings a rank's times onto the job's clock, drift included as it stands in the middle of the window."""
    known = trace.events.ts_ns[trace.events.ts_ns != TIME_UNKNOWN]
    if not len(known):
        return -clock.offset_ns
    middle = known[len(known) // 2 :][:1]
    return int((clock.to_job_ns(middle) - middle)[0])


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


def _gpu_members(job: Job, gpu: RankGpu, rank: RankInput) -> MemberNodes:
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


def _cpu_members(job: Job, cpu: RankCpu, shift_ns: int) -> MemberNodes:
    works = cpu.works
    start, end = works.start_ns + shift_ns, works.end_ns + shift_ns
    alone = works.kind == KINDS.index("send")
    return MemberNodes(job.collectives.instance[works.member], cpu.arrive, cpu.transfer, start, end, alone, cpu.hidden)


def _members(found: list[MemberNodes]) -> Members:
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


def _add_rendezvous(draft: Draft, members: Members) -> IntArray:
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


def _shown(members: Members, transfer_ns: IntArray) -> IntArray:
    """Transfers, of which the hidden ones take at most what the quickest one does that somebody waited for."""
    if not members.hidden.any():
        return transfer_ns
    seen = transfer_ns[~members.hidden & (transfer_ns > 0)]
    least = int(seen.min()) if len(seen) else int(transfer_ns[members.hidden].min())
    return np.where(members.hidden, np.minimum(transfer_ns, least), transfer_ns)


def _tables(
    draft: Draft, gpus: list[RankGpu], members: Members, began: IntArray, options: BuildOptions
) -> tuple[Columns, Columns]:
    """Node and edge columns with transfers cut to what remains after the wait, external starts and dropped sources."""
    nodes, edges = draft.nodes(), draft.edges()
    if len(members.transfer):
        nodes["start_ns"][members.transfer] = began
        transfer_ns = _shown(members, np.maximum(members.end_ns - began, 0))
        nodes["dur_ns"][members.transfer] = transfer_ns
        nodes["end_ns"][members.transfer] = began + transfer_ns
    for gpu in gpus:
        at = gpu.node_in[external_kernels(gpu)]
        nodes["release_ns"][at] = nodes["start_ns"][at]
    if options.drop:
        keep = ~np.isin(edges["edge_source"], np.array([int(s) for s in options.drop], np.uint8))
        edges = {key: value[keep] for key, value in edges.items()}
    return nodes, edges


def _explain(draft: Draft, gpus: list[RankGpu], members: Members, began: IntArray) -> None:
    """Two rounds of fallbacks for starts that no rule explains: a fitting end, then a full GPU."""
    for add in (add_tight_ends, add_occupancy):
        nodes, edges = _tables(draft, gpus, members, began, BuildOptions())
        residual = residuals(nodes, edges)
        for gpu in gpus:
            add(draft, gpu, residual)


def _quality(draft: Draft, nodes: Columns, residual: IntArray, ranks: list[int], sliced: tuple[int, ...]) -> Quality:
    count = len(residual)
    device = np.isin(nodes["kind"][:count], [int(k) for k in (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE)])
    device &= nodes["release_ns"][:count] < 0
    late = np.abs(residual[device])
    stall = nodes["kind"] == int(NodeKind.STALL)
    top = max(ranks, default=0) + 1
    by_rank = np.bincount(nodes["rank"][stall], weights=nodes["dur_ns"][stall], minlength=top).astype(np.int64)
    window = int(nodes["end_ns"].max() - nodes["start_ns"].min()) if count else 0
    return Quality(
        explained_starts=float((late <= 20_000).mean()) if len(late) else 1.0,
        explained_tight=float((late <= 5_000).mean()) if len(late) else 1.0,
        unexplained_stall_ns={rank: int(by_rank[rank]) for rank in ranks},
        window_ns=window,
        offered=dict(draft.offered),
        contradicted=dict(draft.contradicted),
        time_sliced_ranks=sliced,
    )


def _with_steps(graph: Graph, measured: Measured) -> Measured:
    """Bounds of each step: first start to last device end (host end where no device works) over all ranks."""
    bounds: dict[int, tuple[int, int]] = {}
    for number in np.unique(graph.step[graph.step >= 0]).tolist():
        at = np.flatnonzero(graph.step == number)
        bounds[int(number)] = (int(measured.start_ns[at].min()), int(measured.end_ns[at].max()))
    return Measured(measured.start_ns, measured.end_ns, measured.known, bounds)
