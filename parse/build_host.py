"""Turns the calls of one rank into the host nodes of the draft: the time before each call, the call, and its waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_gpu import MERGED_REMAINDER_NS, NEAR_MINIMUM_NS, SLOW_LAUNCH_NS, Constants
from scaletrace.parse.build_threads import Joins, SideOps
from scaletrace.parse.build_waits import Waits, Works
from scaletrace.parse.build_works import OWN_WAIT_NS
from scaletrace.parse.cats import ANNOTATION_CATS, OP_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import LOADER_WAIT, NO_RELEASE, THREAD_WAIT, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.host import LAUNCHES, Call, Calls, gap_names, loader_spans, op_spans, thread_name
from scaletrace.parse.job import RankTrace
from scaletrace.parse.streams import Kernels
from scaletrace.parse.syncs import UNEXPLAINED, SyncEdges


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
class Beside:
    """What a rank with a device does on other threads: works of gloo, operators, and the main thread's waits for them.

    issue, wait, join  int32: the entries of `calls` that stand for the issue of each work, and for each wait and join
    """

    works: Works
    waits: Waits
    ops: SideOps
    joins: Joins
    issue: Int32Array
    wait: Int32Array
    join: Int32Array


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
    beside: Beside


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
    main = np.where(meaning == Call.HOST_WAIT, np.minimum(full, OWN_WAIT_NS), main)
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
    between = np.flatnonzero(op < 0)
    names[between, 0] = gap_names(
        draft, events, calls.thread[order][between], calls.start_ns[order][between] - gap[between] // 2
    )
    waiting = calls.meaning[order] == Call.HOST_WAIT
    if waiting.any():
        fetching = loader_spans(events).at(calls.thread[order], calls.start_ns[order]) >= 0
        gloo = np.array([text.startswith("gloo:") for text in events.strings], np.bool_)
        gloo_wait = gloo[events.name[calls.row[order]]]
        for what, text in (
            (gloo_wait, "wait for communication"),
            (~gloo_wait & fetching, LOADER_WAIT),
            (~gloo_wait & ~fetching, THREAD_WAIT),
        ):
            if (waiting & what).any():
                names[waiting & what, 1:] = draft.name(text)
    return names, loader >= 0


def add_host(draft: Draft, rank: RankInput, parts: RankParts, call_step: Int32Array, layer: Int32Array) -> HostNodes:
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
