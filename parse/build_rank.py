"""Turns the calls and kernels of one rank into draft nodes and the edges between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_gpu import (
    COARSE_CLOCK_NS,
    ENTRY_LAG_NS,
    EXTERNAL_GAP_NS,
    EXTERNAL_NS,
    GRAPH_LATENCY_NS,
    IN_GRAPH_GAP_NS,
    RankGpu,
    estimate,
    find_kernels,
    in_record,
    named_works,
    recorded_waits,
)
from scaletrace.parse.build_host import Beside, HostNodes, RankInput, RankParts, add_host
from scaletrace.parse.build_threads import add_joins, add_side_ops, find_joins, side_ops
from scaletrace.parse.build_waits import Waits, calling_thread, find_waits, find_works
from scaletrace.parse.build_works import RankWorks, add_works, issue_edges, wait_edges
from scaletrace.parse.cats import ANNOTATION_CATS, OP_CATS
from scaletrace.parse.events import Events, Int32Array
from scaletrace.parse.graph import LOADER, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import (
    Call,
    Calls,
    chains_of,
    find_calls,
    layers_at,
    loader_spans,
    step_of,
    with_host_waits,
)
from scaletrace.parse.job import Job, RankTrace
from scaletrace.parse.streams import CONTRADICTED_NS, Kernels, infer_streams
from scaletrace.parse.syncs import EXPLAINED, SyncEdges, infer_syncs


def read_rank(job: Job, rank: RankInput, health: Health) -> RankParts:
    """Find what one rank called, what ran on its device and on other threads, and the constants between them."""
    events = rank.trace.events
    calls, beside = _beside(job, rank.trace, find_calls(events, health))
    properties = rank.trace.header.get("deviceProperties")
    kernels, shift = find_kernels(events, calls, rank.comm_rows, properties, health)
    if len(shift) and shift.any():
        health.repaired["ranks whose device clock was shifted onto the host clock"] += 1
        health.note(f"rank {rank.trace.rank}: device clock corrected by up to {int(np.abs(shift).max()) / 1000:.0f} us")
    src, stream, synced = recorded_waits(events, calls, kernels, health)
    coarse = bool(len(shift) and shift.any()) or not (events.ts_ns[calls.row] % 1000).any()
    syncs = infer_syncs(calls, kernels, synced, COARSE_CLOCK_NS if coarse else CONTRADICTED_NS)
    constants = estimate(calls, kernels, syncs, rank.job_launch_ns)
    middle = int(np.median(shift)) if len(shift) else 0
    return RankParts(calls, kernels, _with_waits(syncs, calls, beside), constants, src, stream, middle, beside)


def _beside(job: Job, trace: RankTrace, calls: Calls) -> tuple[Calls, Beside]:
    """What happens on other threads, and the calls with the moments at which the host hands over to them or waits.

    Where the host begins and ends to fetch a batch it is cut as well, so that this time stands for itself.
    """
    events = trace.events
    works = find_works(job, trace)
    thread = calling_thread(events, job, works) if len(works.row) else _main_thread(events, calls)
    ops = side_ops(events, np.concatenate((np.unique(calls.thread), works.lane)))
    waits = find_waits(events, works, thread) if len(works.row) else _no_waits()
    joins = find_joins(events, ops, thread, waits.to_ns)
    marks = loader_spans(events)
    cut = np.flatnonzero(marks.lane == thread)
    host = job.collectives.host_event[works.member]
    point = np.zeros(len(waits.to_ns), np.int64)
    point[waits.point] = works.row[waits.work]
    # what starts a stretch stands before the waits in it, in case both start at once
    row = (np.where(host >= 0, host, works.row), marks.row[cut], point, ops.row[joins.op], marks.row[cut])
    start = (works.issue_ns, marks.start_ns[cut], waits.from_ns, joins.from_ns, marks.end_ns[cut])
    end = (works.issue_ns, marks.start_ns[cut], waits.to_ns, joins.to_ns, marks.end_ns[cut])
    meaning = (Call.ISSUE, Call.ISSUE, Call.HOST_WAIT, Call.HOST_WAIT, Call.ISSUE)
    count = [len(part) for part in row]
    on = np.full(sum(count), thread, np.int32)
    on[: len(host)] = np.where(host >= 0, events.lane[np.maximum(host, 0)], thread)
    extra = Calls(
        np.concatenate(row).astype(np.int32),
        on,
        np.repeat(np.array([int(one) for one in meaning], np.uint8), count),
        chains_of(calls, on),
        np.concatenate(start),
        np.concatenate(end),
    )
    merged, place = with_host_waits(calls, extra)
    issue, _, wait, join, _ = np.split(place, np.cumsum(count)[:-1])
    return merged, Beside(works, waits, ops, joins, issue, wait, join)


def _main_thread(events: Events, calls: Calls) -> int:
    """Of the threads that make calls the one that steps and fetches batches, else the one with most calls; -1 without."""
    marks = [code for code, text in enumerate(events.strings) if text.startswith(("ProfilerStep", LOADER))]
    stepping = np.isin(events.name, marks) & events.in_cats(*ANNOTATION_CATS, *OP_CATS)
    lanes = events.lane[stepping & np.isin(events.lane, calls.thread)]
    lanes = lanes if len(lanes) else calls.thread
    return int(np.bincount(lanes).argmax()) if len(lanes) else -1


def _no_waits() -> Waits:
    none = np.zeros(0, np.int64)
    return Waits(none, none, none.astype(np.int32), none.astype(np.int32), none.astype(np.bool_))


def _with_waits(syncs: SyncEdges, calls: Calls, beside: Beside) -> SyncEdges:
    """The waits for other threads among the blocking calls: they end with what they awaited, never by their length."""
    at = np.concatenate((beside.wait, beside.join))
    if not len(at):
        return syncs
    is_sync, status, awaited = syncs.is_sync.copy(), syncs.status.copy(), syncs.awaited_ns.copy()
    is_sync[at], status[at], awaited[at] = True, EXPLAINED, calls.end_ns[at]
    return replace(syncs, is_sync=is_sync, status=status, awaited_ns=awaited)


def add_rank(draft: Draft, rank: RankInput, parts: RankParts, health: Health) -> tuple[RankGpu, RankWorks]:
    """Add all nodes and edges of one rank with a device; collectives get ARRIVE and TRANSFER without rendezvous yet."""
    events, calls, kernels = rank.trace.events, parts.calls, parts.kernels
    steps = [(s.number, s.start_ns, s.end_ns) for s in rank.trace.steps]
    call_step = step_of(calls.start_ns, steps)
    layer = layers_at(draft, events, calls.thread, calls.start_ns)
    first = draft.count
    host = add_host(draft, rank, parts, call_step, layer)
    main = np.arange(first, draft.count, dtype=np.int32)
    node_in, node_out = _add_kernels(draft, rank, kernels, call_step, layer)
    gpu = RankGpu(rank.trace.rank, kernels, calls, node_in, node_out, parts.constants)
    _launch_edges(draft, gpu, host, health)
    _stream_order(draft, gpu)
    _cross_stream(draft, gpu, events, parts, health)
    _sync_edges(draft, gpu, parts.syncs, host)
    return gpu, _add_beside(draft, rank, parts.beside, host, main, health)


def _add_beside(
    draft: Draft, rank: RankInput, beside: Beside, host: HostNodes, main: Int32Array, health: Health
) -> RankWorks:
    """Nodes of works and operators on other threads, and their edges from and to the main thread."""
    trace, works = rank.trace, beside.works
    steps = [(s.number, s.start_ns, s.end_ns) for s in trace.steps]
    arrive, transfer = add_works(draft, trace, works, steps, rank.instance_of, rank.shift_ns)
    points, first = np.unique(works.issue_ns, return_index=True)
    issue_edges(draft, works, arrive, transfer, points, host.call[beside.issue[first]])
    wait_edges(draft, works, beside.waits, transfer, host.out[beside.wait], health)
    node = add_side_ops(draft, trace, beside.ops, main, rank.shift_ns, health)
    add_joins(draft, beside.ops, beside.joins, node, host.out[beside.join], health)
    return RankWorks(trace.rank, works, arrive, transfer, beside.waits.hidden)


def _stream_name(events: Events, row: int) -> str:
    found = events.lanes[int(events.lane[row])]
    stream = int(events.stream[row])
    return f"stream {stream}" if stream >= 0 else found.name or f"stream {found.tid}"


def _of_call(kernels: Kernels, values: Int32Array) -> Int32Array:
    """A column of the calls for each kernel's launch, -1 without a launch."""
    if not len(values):
        return np.full(len(kernels), -1, np.int32)
    return np.where(kernels.call >= 0, values[np.maximum(kernels.call, 0)], -1).astype(np.int32)


def _add_kernels(
    draft: Draft, rank: RankInput, kernels: Kernels, call_step: Int32Array, call_layer: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Nodes of the device records: KERNEL or COPY, and ARRIVE with TRANSFER for communication."""
    events, comm = rank.trace.events, kernels.is_comm
    start, end = kernels.start_ns + rank.shift_ns, kernels.end_ns + rank.shift_ns
    _, example = np.unique(kernels.stream, return_index=True)
    names = [_stream_name(events, int(row)) for row in kernels.row[example]]
    lanes = np.array([draft.lane(rank.trace.rank, name, True) for name in names], np.int32)
    instance = np.full(len(kernels), -1, np.int32)
    instance[comm] = [rank.instance_of.get(int(row), -1) for row in kernels.row[comm]]
    columns: dict[str, npt.NDArray[Any]] = {
        "lane": lanes[kernels.stream],
        "name": draft.name_codes(events.strings, events.name[kernels.row]),
        "step": _of_call(kernels, call_step),
        "layer": _of_call(kernels, call_layer),
        "event": kernels.row,
        "instance": instance,
        "blocks": kernels.blocks,
        "start_ns": start,
    }
    draft.note_fill(columns["name"][~comm], kernels.fill[~comm])
    kind = np.where(comm, int(NodeKind.ARRIVE), np.where(kernels.is_copy, int(NodeKind.COPY), int(NodeKind.KERNEL)))
    node_in = draft.add_nodes(
        len(kernels),
        dur_ns=np.where(comm, 0, end - start),
        kind=kind,
        rank=rank.trace.rank,
        end_ns=np.where(comm, start, end),
        **columns,
    )
    pick = np.flatnonzero(comm)
    transfer = draft.add_nodes(
        len(pick),
        dur_ns=(end - start)[pick],
        kind=int(NodeKind.TRANSFER),
        rank=rank.trace.rank,
        end_ns=end[pick],
        **{key: value[pick] for key, value in columns.items()},
    )
    node_out = node_in.copy()
    node_out[pick] = transfer
    draft.add_edges(node_in[pick], transfer, 0, EdgeKind.STREAM, EdgeSource.ORDER)
    return node_in, node_out


def _launch_edges(draft: Draft, gpu: RankGpu, host: HostNodes, health: Health) -> None:
    """From a launch to its first kernel on each stream, at one latency a rank; a slow graph launch keeps its own."""
    kernels, calls, latency = gpu.kernels, gpu.calls, gpu.constants.launch_ns
    launched = np.flatnonzero(kernels.call >= 0)
    order = launched[np.lexsort((kernels.start_ns[launched], kernels.stream[launched], kernels.call[launched]))]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (kernels.call[order][1:] != kernels.call[order][:-1]) | (
        kernels.stream[order][1:] != kernels.stream[order][:-1]
    )
    k = order[is_first]
    call = kernels.call[k]
    submit = host.submit_ns[call]
    lag = np.maximum(latency - submit, 0)
    graph = np.flatnonzero(calls.meaning[call] == Call.GRAPH_LAUNCH)
    reach = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], kernels.end_ns)))
    for i in graph.tolist():
        before = reach[np.searchsorted(kernels.start_ns, kernels.start_ns[k[i]])]
        idle_since = max(int(calls.start_ns[call[i]]), int(before) if before <= kernels.start_ns[k[i]] else 0)
        own = int(kernels.start_ns[k[i]] - calls.start_ns[call[i]])
        if kernels.start_ns[k[i]] - idle_since > GRAPH_LATENCY_NS and own > latency:
            lag[i] = own - submit[i]
            health.guessed["graph launches with a latency of their own"] += 1
    draft.add_edges(host.call[call], gpu.node_in[k], lag, EdgeKind.LAUNCH, EdgeSource.RECORDED)


def _stream_order(draft: Draft, gpu: RankGpu) -> None:
    """Each stream is a queue with one gap a rank; overlapping neighbours (dependent launch) keep a negative lag."""
    kernels = gpu.kernels
    order = np.lexsort((kernels.start_ns, kernels.stream))
    a, b = order[:-1], order[1:]
    same = kernels.stream[a] == kernels.stream[b]
    a, b = a[same], b[same]
    gap = kernels.start_ns[b] - kernels.end_ns[a]
    in_graph = (kernels.call[a] >= 0) & (kernels.call[a] == kernels.call[b]) & (gap < IN_GRAPH_GAP_NS)
    overlap = gap < -1_000
    lag = np.where(overlap | in_graph, gap, gpu.constants.gap_ns)
    draft.contradict(EdgeSource.ORDER, len(gap), 0)
    if overlap.any():
        draft.offered["overlapping neighbours on one stream"] += int(overlap.sum())
    draft.add_edges(gpu.node_out[a], gpu.node_in[b], lag, EdgeKind.STREAM, EdgeSource.ORDER)


def external_kernels(gpu: RankGpu) -> Int32Array:
    """Kernels whose cause lies before the window, so that their measured start is an input of the replay.

    These are device records without a launch that no launched one precedes on their stream, unless they follow their
    neighbour at once, and the rank's first launched kernel where nothing precedes it on its stream and it starts long
    after its launch.
    """
    kernels, calls = gpu.kernels, gpu.calls
    order = np.lexsort((kernels.start_ns, kernels.stream))
    launched = kernels.call[order] >= 0
    seen = np.cumsum(launched)
    first = np.ones(len(order), np.bool_)
    first[1:] = kernels.stream[order][1:] != kernels.stream[order][:-1]
    seen_before_stream = np.maximum.accumulate(np.where(first, seen - launched, 0))
    gap = np.full(len(order), EXTERNAL_NS)
    gap[1:] = kernels.start_ns[order][1:] - kernels.end_ns[order][:-1]
    external = ~launched & (seen == seen_before_stream) & (first | (gap > EXTERNAL_GAP_NS))
    out: Int32Array = order[external].astype(np.int32)
    known = np.flatnonzero(kernels.call >= 0)
    if len(known) and not kernels.is_comm[known[0]] and first[order == known[0]].all():
        k = known[0]
        if kernels.start_ns[k] - calls.start_ns[kernels.call[k]] > gpu.constants.launch_ns + EXTERNAL_NS:
            out = np.append(out, k).astype(np.int32)
    return out


def _cross_stream(draft: Draft, gpu: RankGpu, events: Events, parts: RankParts, health: Health) -> None:
    found = infer_streams(
        parts.calls,
        parts.kernels,
        in_record(events, parts.calls, parts.kernels),
        parts.recorded_src,
        parts.recorded_stream,
        named_works(events, parts.calls, parts.kernels),
    )
    if found.unresolved_waits:
        health.unmatched["stream waits that no rule resolves (dependency unknown)"] += found.unresolved_waits
    if found.second_choices:
        health.guessed["dependencies whose first candidate the trace refutes, so that another was taken"] += (
            found.second_choices
        )
    for source in EdgeSource:
        pick = found.source == source
        if found.offered[source]:
            draft.contradict(source, int(found.offered[source]), int(found.contradicted[source]))
        if pick.any():
            draft.add_edges(
                gpu.node_out[found.src[pick]], gpu.node_in[found.dst[pick]], ENTRY_LAG_NS, EdgeKind.EVENT_WAIT, source
            )


def _sync_edges(draft: Draft, gpu: RankGpu, syncs: SyncEdges, host: HostNodes) -> None:
    """Awaited work ends, then the blocking call does, one constant later (cudaFree then still unmaps by itself)."""
    free = gpu.calls.meaning[syncs.dst] == Call.FREE
    lag = np.where(free, 0, gpu.constants.sync_tail_ns)
    draft.contradict(EdgeSource.BLOCKING_CALL, syncs.offered, syncs.contradicted)
    draft.add_edges(gpu.node_out[syncs.src], host.out[syncs.dst], lag, EdgeKind.HOST_SYNC, EdgeSource.BLOCKING_CALL)
