"""Turns the calls and kernels of one rank into draft nodes and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_gpu import (
    COARSE_CLOCK_NS,
    ENTRY_LAG_NS,
    EXTERNAL_GAP_NS,
    EXTERNAL_NS,
    GRAPH_LATENCY_NS,
    IN_GRAPH_GAP_NS,
    MERGED_REMAINDER_NS,
    Constants,
    RankGpu,
    _in_record,
    estimate,
    find_kernels,
    recorded_waits,
)
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import ANNOTATION_CATS, OP_CATS, Call, Calls, find_calls, op_spans, step_of
from scaletrace.parse.job import RankTrace
from scaletrace.parse.streams import CONTRADICTED_NS, Kernels, infer_streams
from scaletrace.parse.syncs import UNEXPLAINED, SyncEdges, infer_syncs

_SOURCE_KIND = np.zeros(len(EdgeSource), np.uint8)
_SOURCE_KIND[:] = int(EdgeKind.EVENT_WAIT)


@dataclass(frozen=True, slots=True)
class HostNodes:
    """Draft ids of the nodes of each call: the call itself and where it is over (the WAIT of a blocking call).

    submit_ns int64[c]: duration of the call's own node, after which a launch counts as submitted
    """

    call: Int32Array
    out: Int32Array
    submit_ns: IntArray


@dataclass(slots=True)
class RankInput:
    """One rank on its way into the draft; `shift_ns` brings its times onto the job's clock."""

    trace: RankTrace
    shift_ns: int
    comm_rows: IntArray
    instance_of: dict[int, int] = field(default_factory=dict)
    job_launch_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RankParts:
    """Calls, kernels, blocking calls and constants of one rank, before any node exists.

    device_shift_ns: what was added to device times to fit the host's; the job's clock is the devices', so the whole
    rank moves back by it.
    """

    calls: Calls
    kernels: Kernels
    syncs: SyncEdges
    constants: Constants
    recorded_src: Int32Array
    recorded_stream: Int32Array
    device_shift_ns: int


def read_rank(rank: RankInput, health: Health) -> RankParts:
    """Find what one rank called, what ran on its device, and the constants between them."""
    events = rank.trace.events
    calls = find_calls(events, health)
    kernels, shift = find_kernels(events, calls, rank.comm_rows, health)
    if len(shift) and shift.any():
        health.repaired["ranks whose device clock was shifted onto the host clock"] += 1
        health.note(f"rank {rank.trace.rank}: device clock corrected by up to {int(np.abs(shift).max()) / 1000:.0f} us")
    src, stream, synced = recorded_waits(events, calls, kernels, health)
    coarse = bool(len(shift) and shift.any()) or not (events.ts_ns[calls.row] % 1000).any()
    syncs = infer_syncs(calls, kernels, synced, COARSE_CLOCK_NS if coarse else CONTRADICTED_NS)
    constants = estimate(calls, kernels, syncs, rank.job_launch_ns)
    middle = int(np.median(shift)) if len(shift) else 0
    return RankParts(calls, kernels, syncs, constants, src, stream, middle)


def add_rank(draft: Draft, rank: RankInput, parts: RankParts, health: Health) -> RankGpu:
    """Add all nodes and edges of one rank with a device; collectives get ARRIVE and TRANSFER without rendezvous yet."""
    events, calls, kernels = rank.trace.events, parts.calls, parts.kernels
    steps = [(s.number, s.start_ns, s.end_ns) for s in rank.trace.steps]
    call_step = step_of(calls.start_ns, steps)
    host = _add_host(draft, rank, parts, call_step)
    node_in, node_out = _add_kernels(draft, rank, kernels, call_step)
    blocks = _full_gpu_blocks(rank.trace)
    gpu = RankGpu(rank.trace.rank, kernels, calls, node_in, node_out, blocks, parts.constants)
    _launch_edges(draft, gpu, host, health)
    _stream_order(draft, gpu)
    _cross_stream(draft, gpu, events, parts, health)
    _sync_edges(draft, gpu, parts.syncs, host)
    return gpu


def _full_gpu_blocks(trace: RankTrace) -> int:
    devices = trace.header.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        count = devices[0].get("numSms")
        if isinstance(count, int) and count > 0:
            return min(count, 80)
    return 80


def _add_host(draft: Draft, rank: RankInput, parts: RankParts, call_step: Int32Array) -> HostNodes:
    """Three slots a call: the host time before it, the call, and what follows inside it (a wait, a slow return)."""
    events, calls, constants = rank.trace.events, parts.calls, parts.constants
    c = len(calls)
    order = np.lexsort((np.arange(c), calls.chain))
    chain, start, end = calls.chain[order], calls.start_ns[order], calls.end_ns[order]
    meaning, thread = calls.meaning[order], calls.thread[order]
    dur, kind = np.zeros((c, 3), np.int64), np.zeros((c, 3), np.uint8)
    present = np.zeros((c, 3), np.bool_)
    kind[:, 0], kind[:, 1], kind[:, 2] = int(NodeKind.HOST), int(NodeKind.HOST), int(NodeKind.HOST)
    full = end - start
    main = full.copy()
    launching = (np.diff(parts.kernels.ptr) > 0)[order] & np.isin(meaning, (Call.LAUNCH, Call.GRAPH_LAUNCH, Call.COPY))
    kind[launching, 1] = int(NodeKind.LAUNCH)
    main[launching] = np.minimum(full, constants.launch_ns)[launching]
    sync = parts.syncs.is_sync[order]
    awaited, status = parts.syncs.awaited_ns[order], parts.syncs.status[order]
    free = sync & (meaning == Call.FREE)
    waits = sync & ~free & ((awaited >= 0) | (status == UNEXPLAINED))
    main[waits] = np.minimum(main, constants.sync_own_ns)[waits]
    kind[waits, 2] = int(NodeKind.WAIT)
    main[free] = 0
    kind[free, 1] = int(NodeKind.WAIT)
    tail = np.where(free, end - np.clip(awaited, start, end), np.where(waits, 0, full - main))
    first = np.ones(c, np.bool_)
    first[1:] = chain[1:] != chain[:-1]
    before = np.zeros(c, np.int64)
    before[1:] = start[1:] - end[:-1]
    before[first] = _lead(events, thread[first], start[first])
    small = launching & ~waits & (tail > 0) & (tail <= MERGED_REMAINDER_NS)
    merged = np.zeros(c, np.bool_)
    merged[:-1] = small[:-1] & (before[1:] > 0) & ~first[1:]
    dur[:, 0] = np.maximum(before, 0)
    dur[1:, 0] += np.where(merged[:-1], tail[:-1], 0)
    dur[:, 1], dur[:, 2] = main, np.where(merged, 0, tail)
    present[:, 0] = dur[:, 0] > 0
    present[:, 1] = True
    present[:, 2] = waits | (dur[:, 2] > 0)
    node_end = np.empty((c, 3), np.int64)
    node_end[:, 0], node_end[:, 2] = start, end
    node_end[:, 1] = np.where(free, np.clip(awaited, start, end), start + main)
    node_end[merged, 2] = (end - tail)[merged]
    event = np.full((c, 3), -1, np.int32)
    event[:, 1] = calls.row[order]
    event[:, 2] = calls.row[order]
    names = np.empty((c, 3), np.int32)
    names[:, 1] = draft.name_codes(events.strings, events.name[calls.row[order]])
    names[:, 2] = names[:, 1]
    op = op_spans(events).at(thread, start)
    names[:, 0] = draft.name_codes(events.strings, np.where(op >= 0, events.name[np.maximum(op, 0)], -1))
    names[:, 0][op < 0] = draft.name("between operators")
    lanes = {int(t): draft.lane(rank.trace.rank, _thread_name(events, int(t)), False) for t in np.unique(thread)}
    lane = np.array([lanes[int(t)] for t in thread], np.int32)
    release = np.full((c, 3), NO_RELEASE, np.int64)
    led = first & present[:, 0]
    release[led, 0] = (start - before)[led] + rank.shift_ns
    release[first & ~led, 1] = start[first & ~led] + rank.shift_ns
    mask = present.ravel()
    ids = draft.add_nodes(
        int(mask.sum()),
        dur_ns=dur.ravel()[mask],
        release_ns=release.ravel()[mask],
        kind=kind.ravel()[mask],
        rank=rank.trace.rank,
        lane=np.repeat(lane, 3)[mask],
        name=names.ravel()[mask],
        step=np.repeat(call_step[order], 3)[mask],
        event=event.ravel()[mask],
        start_ns=(node_end - dur).ravel()[mask] + rank.shift_ns,
        end_ns=node_end.ravel()[mask] + rank.shift_ns,
    )
    slot = np.full(3 * c, -1, np.int32)
    slot[mask] = ids
    table = slot.reshape(c, 3)
    call_node, out = np.empty(c, np.int32), np.empty(c, np.int32)
    call_node[order] = table[:, 1]
    sync_point = np.where(waits, table[:, 2], table[:, 1])
    out[order] = sync_point
    _program_edges(draft, table, mask, first, before, thread)
    submit = np.empty(c, np.int64)
    submit[order] = main
    return HostNodes(call_node, out, submit)


def _lead(events: Events, threads: Int32Array, start: IntArray) -> IntArray:
    """Host time of each thread before its first call at `start`, back to the first operator or annotation on it."""
    marks = events.in_cats(*OP_CATS, *ANNOTATION_CATS) & (events.ts_ns != TIME_UNKNOWN)
    out = np.zeros(len(threads), np.int64)
    for at, (thread, until) in enumerate(zip(threads.tolist(), start.tolist(), strict=True)):
        rows = np.flatnonzero(marks & (events.lane == thread))
        if len(rows):
            out[at] = max(until - int(events.ts_ns[rows].min()), 0)
    return out


def _program_edges(
    draft: Draft, table: Int32Array, mask: BoolArray, first: BoolArray, before: IntArray, thread: Int32Array
) -> None:
    """Chain all nodes of one thread of control; a call that starts before the last one is over keeps a negative lag."""
    c = len(first)
    ids = table.ravel()[mask]
    head = np.zeros((c, 3), np.bool_)
    has_gap = table[:, 0] >= 0
    head[has_gap, 0], head[~has_gap, 1] = True, True
    starts_call = head.ravel()[mask]
    of_call = np.repeat(np.arange(c), 3)[mask]
    linked = np.ones(len(ids), np.bool_)
    linked[starts_call & first[of_call]] = False
    dst = np.flatnonzero(linked[1:]) + 1 if len(ids) else np.zeros(0, np.int64)
    crossing = starts_call[dst]
    lag = np.where(crossing, np.minimum(before[of_call[dst]], 0), 0)
    changed = np.zeros(c, np.bool_)
    changed[1:] = thread[1:] != thread[:-1]
    hand = crossing & changed[of_call[dst]]
    for kind, pick in ((EdgeKind.PROGRAM, ~hand), (EdgeKind.HAND_OVER, hand)):
        draft.add_edges(ids[dst[pick] - 1], ids[dst[pick]], lag[pick], kind, EdgeSource.ORDER)


def _thread_name(events: Events, lane: int) -> str:
    found = events.lanes[lane]
    return found.name or f"thread {found.tid}"


def _stream_name(events: Events, row: int) -> str:
    found = events.lanes[int(events.lane[row])]
    stream = int(events.stream[row])
    return f"stream {stream}" if stream >= 0 else found.name or f"stream {found.tid}"


def _add_kernels(
    draft: Draft, rank: RankInput, kernels: Kernels, call_step: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Nodes of the device records: KERNEL or COPY, and ARRIVE with TRANSFER for communication."""
    events = rank.trace.events
    start, end = kernels.start_ns + rank.shift_ns, kernels.end_ns + rank.shift_ns
    lanes = np.zeros(kernels.stream_count, np.int32)
    for stream in range(kernels.stream_count):
        row = int(kernels.row[np.flatnonzero(kernels.stream == stream)[0]])
        lanes[stream] = draft.lane(rank.trace.rank, _stream_name(events, row), True)
    step = np.where(kernels.call >= 0, call_step[np.maximum(kernels.call, 0)], -1) if len(call_step) else -1
    lane, name = lanes[kernels.stream], draft.name_codes(events.strings, events.name[kernels.row])
    instance = np.full(len(kernels), -1, np.int32)
    for k in np.flatnonzero(kernels.is_comm):
        instance[k] = rank.instance_of.get(int(kernels.row[k]), -1)
    comm = kernels.is_comm
    kind = np.where(comm, int(NodeKind.ARRIVE), np.where(kernels.is_copy, int(NodeKind.COPY), int(NodeKind.KERNEL)))
    node_in = draft.add_nodes(
        len(kernels),
        dur_ns=np.where(comm, 0, end - start),
        kind=kind,
        rank=rank.trace.rank,
        lane=lane,
        name=name,
        step=step,
        event=kernels.row,
        instance=instance,
        blocks=kernels.blocks,
        start_ns=start,
        end_ns=np.where(comm, start, end),
    )
    pick = np.flatnonzero(comm)
    step_of_kernel = np.broadcast_to(np.asarray(step, np.int32), (len(kernels),))
    transfer = draft.add_nodes(
        len(pick),
        dur_ns=(end - start)[pick],
        kind=int(NodeKind.TRANSFER),
        rank=rank.trace.rank,
        lane=lane[pick],
        name=name[pick],
        step=step_of_kernel[pick],
        event=kernels.row[pick],
        instance=instance[pick],
        blocks=kernels.blocks[pick],
        start_ns=start[pick],
        end_ns=end[pick],
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
    lag = latency - submit
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
    out = order[external].astype(np.int32)
    known = np.flatnonzero(kernels.call >= 0)
    if len(known) and not kernels.is_comm[known[0]] and first[order == known[0]].all():
        k = known[0]
        if kernels.start_ns[k] - calls.start_ns[kernels.call[k]] > gpu.constants.launch_ns + EXTERNAL_NS:
            out = np.append(out, np.int32(k))
    return out


def _cross_stream(draft: Draft, gpu: RankGpu, events: Events, parts: RankParts, health: Health) -> None:
    found = infer_streams(
        parts.calls,
        parts.kernels,
        _in_record(events, parts.calls, parts.kernels),
        parts.recorded_src,
        parts.recorded_stream,
        np.full(len(parts.calls), -1, np.int32),
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
