"""Turns a Job into a Graph: nodes and edges of all ranks, their rendezvous, and a count of all that was inferred."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from scaletrace.parse.build_cpu import add_cpu_rank
from scaletrace.parse.build_draft import Columns, Draft, finish
from scaletrace.parse.build_gpu import RankGpu
from scaletrace.parse.build_hidden import hidden_members
from scaletrace.parse.build_host import RankInput
from scaletrace.parse.build_meet import (
    MemberNodes,
    Members,
    add_rendezvous,
    all_members,
    gpu_members,
    shown,
    work_members,
)
from scaletrace.parse.build_rank import add_rank, external_kernels, read_rank
from scaletrace.parse.build_stalls import add_occupancy, add_tight_ends, insert_stalls, residuals, time_sliced
from scaletrace.parse.cats import DEVICE_CATS
from scaletrace.parse.events import TIME_UNKNOWN, IntArray
from scaletrace.parse.graph import (
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    Measured,
    NodeKind,
)
from scaletrace.parse.health import Health
from scaletrace.parse.job import KINDS, Clock, Job, RankTrace


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
            part = read_rank(job, rank, health)
            rank.shift_ns -= part.device_shift_ns
            gpu, works = add_rank(draft, rank, part, health)
            gpus.append(gpu)
            found.append(gpu_members(job, gpu, rank))
        else:
            works = add_cpu_rank(draft, job, rank.trace, rank.shift_ns, rank.instance_of, health)
        found.append(work_members(job, works, rank.shift_ns))
    if (lost := hidden_members(draft, job, found, health)) is not None:
        found.append(lost)
    members = all_members(found)
    if members.hidden.any():
        health.guessed["point-to-point transfers that hid under other work (taken as the quickest that did not)"] += (
            int(members.hidden.sum())
        )
    transfers = add_rendezvous(draft, members)
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
    _tell_missing_marks(job, health)
    quality = _quality(draft, nodes, residual, [trace.rank for trace in job.ranks], sliced)
    return Built(graph, _with_steps(graph, measured), quality, job, health)


def _tell_missing_marks(job: Job, health: Health) -> None:
    """Count the marks of steps that some ranks have and others lack: their step times are of different steps."""
    marked = {trace.rank: {step.number for step in trace.steps} for trace in job.ranks}
    every = set().union(*marked.values())
    lacking = {rank: sorted(every - own) for rank, own in marked.items() if every - own}
    if not lacking:
        return
    health.unmatched["marks of steps that other ranks have"] += sum(map(len, lacking.values()))
    rank, numbers = next(iter(lacking.items()))
    steps = f"step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{', …' * (len(numbers) > 4)}"
    more = f", and {len(lacking) - 1} more ranks lack marks" if len(lacking) > 1 else ""
    health.note(
        f"rank {rank} has no mark for {steps} of other ranks{more}: the step time is the mean of the steps that each rank "
        "marked, with those between them"
    )


def _add_groups(draft: Draft, job: Job) -> dict[int, int]:
    index, host = {}, {trace.rank: trace.host for trace in job.ranks}
    for group in job.groups:
        index[group.id] = len(draft.groups)
        nodes = len({host[rank] for rank in group.members if host.get(rank)}) or 1
        draft.groups.append(GraphGroup(group.axis, group.size, group.stride, nodes, group.description))
    return index


def only_group(job: Job) -> int:
    """The group of collectives that name none, by its place: a job's one group, -1 where it has several or none."""
    return 0 if len(job.groups) == 1 else -1


def _inputs(draft: Draft, job: Job, group_index: dict[int, int]) -> list[RankInput]:
    """One input a rank: its shift onto the job's clock and which of its rows belong to which collective."""
    table = job.collectives
    _, first = np.unique(table.instance, return_index=True)
    position = {int(table.instance[row]): at for at, row in enumerate(first.tolist())}
    only = only_group(job)
    types = _types(job, first)
    for row, dtype in zip(first.tolist(), types, strict=True):
        draft.collectives.append(
            GraphCollective(
                KINDS[int(table.kind[row])],
                group_index.get(int(table.group[row]), only),
                int(table.bytes_in[row]),
                int(table.bytes_out[row]),
                dtype,
            )
        )
    out = []
    for trace in job.ranks:
        rows = np.flatnonzero((table.rank == trace.rank) & (table.event >= 0))
        of_row = {
            int(event): position[int(instance)]
            for event, instance in zip(table.event[rows], table.instance[rows], strict=True)
        }
        aligned, shift = _on_job_clock(trace, job.clocks.get(trace.rank))
        out.append(RankInput(aligned, shift, table.event[rows].astype(np.int64), of_row))
    return out


def _types(job: Job, rows: IntArray) -> list[str]:
    """Element types of the collectives of these rows of the job's table, as one member's record states them; "" unknown."""
    table, out = job.collectives, [""] * len(rows)
    for trace in job.ranks:
        mine = np.flatnonzero((table.rank[rows] == trace.rank) & (table.event[rows] >= 0))
        codes = trace.events.texts("dtype")[table.event[rows][mine]]
        for at, code in zip(mine.tolist(), codes.tolist(), strict=True):
            out[at] = trace.events.strings[code] if code >= 0 else ""
    return out


def _on_job_clock(trace: RankTrace, clock: Clock | None) -> tuple[RankTrace, int]:
    """A rank whose clock runs at the job's rate, and the shift that is left to bring its times onto the job's clock.

    A drifting clock moves every time by its own amount, durations included; a steady one only needs the shift.
    """
    if clock is None or clock.drift_ppm == 0.0:
        return trace, -clock.offset_ns if clock is not None else 0
    events = trace.events
    known = events.ts_ns != TIME_UNKNOWN
    start, end = clock.to_job_ns(events.ts_ns[known]), clock.to_job_ns(events.end_ns[known])
    ts, dur = events.ts_ns.copy(), events.dur_ns.copy()
    ts[known], dur[known] = start, end - start
    bounds = clock.to_job_ns(np.array([(s.start_ns, s.end_ns) for s in trace.steps], np.int64).reshape(-1, 2))
    steps = tuple(
        replace(step, start_ns=low, end_ns=high) for step, (low, high) in zip(trace.steps, bounds.tolist(), strict=True)
    )
    return replace(trace, events=replace(events, ts_ns=ts, dur_ns=dur), steps=steps), 0


def _tables(
    draft: Draft, gpus: list[RankGpu], members: Members, began: IntArray, options: BuildOptions
) -> tuple[Columns, Columns]:
    """Node and edge columns with transfers cut to what remains after the wait, external starts and dropped sources."""
    nodes, edges = draft.nodes(), draft.edges()
    if len(members.transfer):
        nodes["start_ns"][members.transfer] = began
        transfer_ns = shown(members, np.maximum(members.end_ns - began, 0))
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
