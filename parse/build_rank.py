"""Turns the calls and kernels of one rank into draft nodes and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    MERGED_REMAINDER_NS,
    NEAR_MINIMUM_NS,
    SLOW_LAUNCH_NS,
    Constants,
    RankGpu,
    estimate,
    find_kernels,
    in_record,
    named_works,
    recorded_waits,
)
from scaletrace.parse.cats import ANNOTATION_CATS, OP_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import (
    LAUNCHES,
    Call,
    Calls,
    find_calls,
    layers_at,
    loader_spans,
    op_spans,
    step_of,
    thread_name,
)
from scaletrace.parse.job import RankTrace
from scaletrace.parse.streams import CONTRADICTED_NS, Kernels, infer_streams
from scaletrace.parse.syncs import UNEXPLAINED, SyncEdges, infer_syncs


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
    layer = layers_at(draft, events, calls.thread, calls.start_ns)
    host = _add_host(draft, rank, parts, call_step, layer)
    node_in, node_out = _add_kernels(draft, rank, kernels, call_step, layer)
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


@dataclass(frozen=True, slots=True)
class _Slots:
    """Three nodes a call, in order of chains: the host time before it, the call, and what follows inside it.

    The third is the WAIT of a blocking call, or what a call still did after its launch was submitted.
    dur, end int64[c, 3];  present bool[c, 3];  waits, free, launching, first bool[c]
    """

    dur: IntArray
    end: IntArray
    present: BoolArray
    waits: BoolArray
    free: BoolArray
    launching: BoolArray
    first: BoolArray
    before: IntArray


def _slots(events: Events, parts: RankParts, order: IntArray) -> _Slots:
    """Cut the time of the calls into slots; a blocking call keeps a constant of its own, never its measured length.

    A launch has submitted its kernel after a constant time, but for slow ones (a module is loaded, the queue is full)
    whose kernel starts when the call is over.
    """
    calls, syncs, constants = parts.calls, parts.syncs, parts.constants
    start, end, meaning = calls.start_ns[order], calls.end_ns[order], calls.meaning[order]
    full = end - start
    launching = (np.diff(parts.kernels.ptr) > 0)[order] & np.isin(meaning, LAUNCHES)
    awaited = np.clip(syncs.awaited_ns[order], start, end)
    free = syncs.is_sync[order] & (meaning == Call.FREE)
    waits = syncs.is_sync[order] & ~free
    waits &= (syncs.awaited_ns[order] >= 0) | (syncs.status[order] == UNEXPLAINED)
    slow = launching & (full > SLOW_LAUNCH_NS) & (_first_start(parts.kernels)[order] >= end - NEAR_MINIMUM_NS)
    main = np.where(launching & ~slow, np.minimum(full, constants.launch_ns), full)
    main = np.where(waits, np.minimum(main, constants.sync_own_ns), np.where(free, 0, main))
    tail = np.where(free, end - awaited, np.where(waits, 0, full - main))
    chain = calls.chain[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = chain[1:] != chain[:-1]
    before = np.zeros(len(order), np.int64)
    before[1:] = start[1:] - end[:-1]
    before[first] = _lead(events, calls.thread[order][first], start[first])
    merged = np.zeros(len(order), np.bool_)
    merged[:-1] = (launching & ~waits & (tail > 0) & (tail <= MERGED_REMAINDER_NS))[:-1] & (before[1:] > 0) & ~first[1:]
    gap = np.maximum(before, 0)
    gap[1:] += np.where(merged[:-1], tail[:-1], 0)
    dur = np.stack((gap, main, np.where(merged, 0, tail)), axis=1)
    ends = np.stack((start, np.where(free, awaited, start + main), np.where(merged, end - tail, end)), axis=1)
    present = np.stack((gap > 0, np.ones(len(order), np.bool_), waits | (dur[:, 2] > 0)), axis=1)
    return _Slots(dur, ends, present, waits, free, launching, first, before)


def _first_start(kernels: Kernels) -> IntArray:
    """Start of the first device record of each call, int64[c]; the earliest possible time where a call has none."""
    out = np.full(len(kernels.ptr) - 1, np.iinfo(np.int64).min)
    has = np.diff(kernels.ptr) > 0
    out[has] = kernels.start_ns[kernels.order[kernels.ptr[:-1][has]]]
    return out


def _host_kinds(slots: _Slots) -> npt.NDArray[np.uint8]:
    kind = np.full(slots.dur.shape, int(NodeKind.HOST), np.uint8)
    kind[slots.launching, 1] = int(NodeKind.LAUNCH)
    kind[slots.free, 1] = int(NodeKind.WAIT)
    kind[slots.waits, 2] = int(NodeKind.WAIT)
    return kind


def _host_names(
    draft: Draft, events: Events, calls: Calls, order: IntArray, gap: IntArray
) -> tuple[Int32Array, BoolArray]:
    """Names of the slots: the operator that the host was in when it came to the call, and twice the call.

    Also which of the first slots are spent on fetching a batch; they are named after the data loader.
    """
    names = np.empty((len(order), 3), np.int32)
    names[:, 1] = draft.name_codes(events.strings, events.name[calls.row[order]])
    names[:, 2] = names[:, 1]
    op = op_spans(events).at(calls.thread[order], calls.start_ns[order])
    loader = loader_spans(events).at(calls.thread[order], calls.start_ns[order] - gap // 2)
    op = np.where(loader >= 0, loader, op)
    names[:, 0] = draft.name_codes(events.strings, np.where(op >= 0, events.name[np.maximum(op, 0)], -1))
    names[:, 0][op < 0] = draft.name("between operators")
    return names, loader >= 0


def _add_host(draft: Draft, rank: RankInput, parts: RankParts, call_step: Int32Array, layer: Int32Array) -> HostNodes:
    """Nodes of the host: for each call up to three, chained in program order."""
    events, calls = rank.trace.events, parts.calls
    c = len(calls)
    order = np.lexsort((np.arange(c), calls.chain))
    slots = _slots(events, parts, order)
    thread = calls.thread[order]
    lanes = {int(t): draft.lane(rank.trace.rank, thread_name(events, int(t)), False) for t in np.unique(thread)}
    release = np.full((c, 3), NO_RELEASE, np.int64)
    led = slots.first & slots.present[:, 0]
    bare = slots.first & ~led
    release[led, 0] = (calls.start_ns[order] - slots.before)[led] + rank.shift_ns
    release[bare, 1] = calls.start_ns[order][bare] + rank.shift_ns
    event = np.repeat(calls.row[order], 3).reshape(c, 3)
    event[:, 0] = -1
    mask = slots.present.ravel()
    names, loading = _host_names(draft, events, calls, order, slots.dur[:, 0])
    ids = draft.add_nodes(
        int(mask.sum()),
        dur_ns=slots.dur.ravel()[mask],
        release_ns=release.ravel()[mask],
        kind=_host_kinds(slots).ravel()[mask],
        rank=rank.trace.rank,
        lane=np.repeat(np.array([lanes[int(t)] for t in thread], np.int32), 3)[mask],
        name=names.ravel()[mask],
        step=np.repeat(call_step[order], 3)[mask],
        layer=np.repeat(layer[order], 3)[mask],
        event=event.ravel()[mask],
        start_ns=(slots.end - slots.dur).ravel()[mask] + rank.shift_ns,
        end_ns=slots.end.ravel()[mask] + rank.shift_ns,
    )
    flat = np.full(3 * c, -1, np.int32)
    flat[mask] = ids
    table = flat.reshape(c, 3)
    back = np.empty(c, np.int64)
    back[order] = np.arange(c)
    _program_edges(draft, table, mask, slots.first, slots.before, thread, loading)
    over = np.where(slots.waits, table[:, 2], table[:, 1])
    return HostNodes(table[:, 1][back], over[back], slots.dur[:, 1][back])


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
    draft: Draft,
    table: Int32Array,
    mask: BoolArray,
    first: BoolArray,
    before: IntArray,
    thread: Int32Array,
    loading: BoolArray,
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
    fetch = crossing & loading[of_call[dst]] & has_gap[of_call[dst]]
    hand = crossing & changed[of_call[dst]] & ~fetch
    for kind, pick in ((EdgeKind.PROGRAM, ~hand & ~fetch), (EdgeKind.HAND_OVER, hand), (EdgeKind.DATALOADER, fetch)):
        draft.add_edges(ids[dst[pick] - 1], ids[dst[pick]], lag[pick], kind, EdgeSource.ORDER)


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
