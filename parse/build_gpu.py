"""Turns one rank's calls and device records into nodes and edges of the draft graph."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse.build_draft import group_by
from scaletrace.parse.cats import COPY_CATS, DEVICE_CATS, SET_CATS, SYNC_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.gpu_clock import device_shift
from scaletrace.parse.health import Health
from scaletrace.parse.host import Call, Calls, Spans, spans_of
from scaletrace.parse.kernels import default_rules
from scaletrace.parse.links import launch_of, stream_of_sync
from scaletrace.parse.occupancy import device_from, filling_blocks, grid_blocks
from scaletrace.parse.streams import Kernels
from scaletrace.parse.syncs import EXPLAINED, SyncEdges

COARSE_CLOCK_NS = 25_000
"""How far a device clock may be off its host's where it had to be corrected, or where times are whole microseconds."""
UNRESOLVED = "recorded stream waits whose event is not in the trace (the graph is a lower bound)"
NEAR_MINIMUM_NS = 25_000
IN_GRAPH_GAP_NS = 3_000
GRAPH_LATENCY_NS = 50_000
EXTERNAL_NS = 300_000
EXTERNAL_GAP_NS = 20_000
MERGED_REMAINDER_NS = 5_000
SLOW_LAUNCH_NS = 100_000
ENTRY_LAG_NS = 1_000


@dataclass(frozen=True, slots=True)
class Constants:
    """The lags that one rank uses everywhere: none of them is fitted to a single event."""

    launch_ns: int
    gap_ns: int
    sync_tail_ns: int
    sync_own_ns: int


@dataclass(frozen=True, slots=True)
class RankGpu:
    """What later stages need of one rank: its kernels and the nodes that stand for them.

    node_in, node_out int32[k]: where edges to a kernel end and edges from it begin (ARRIVE and TRANSFER differ)
    """

    rank: int
    kernels: Kernels
    calls: Calls
    node_in: Int32Array
    node_out: Int32Array
    constants: Constants


@lru_cache(maxsize=65536)
def _is_communication(name: str) -> bool:
    rules = default_rules()
    return rules.code(name) in rules.codes_of("communication")


def _communicates(events: Events, rows: IntArray) -> BoolArray:
    """Which of the device records move data between ranks, by the classes of their names."""
    used, inverse = np.unique(events.name[rows], return_inverse=True)
    table = np.array([_is_communication(events.strings[int(code)]) for code in used], np.bool_)
    return table[inverse] if len(rows) else np.zeros(0, np.bool_)


def _call_index(calls: Calls, events: Events, rows: IntArray) -> Int32Array:
    """Index into `calls` of each call row; a call nested in another counts as the outer one; -1 where neither is kept."""
    by_row = np.argsort(calls.row, kind="stable")
    sorted_rows = calls.row[by_row]
    at = np.minimum(np.searchsorted(sorted_rows, rows), max(len(sorted_rows) - 1, 0))
    out = np.full(len(rows), -1, np.int32)
    if not len(sorted_rows):
        return out
    hit = sorted_rows[at] == rows
    out[hit] = by_row[at[hit]]
    nested = np.flatnonzero(~hit & (rows >= 0))
    if len(nested):
        order = np.lexsort((calls.start_ns, calls.thread))
        spans = Spans(order, calls.thread[order], calls.start_ns[order], calls.end_ns[order])
        out[nested] = spans.at(events.lane[rows[nested]], events.ts_ns[rows[nested]])
    return out


def find_kernels(
    events: Events, calls: Calls, comm_rows: IntArray, properties: Any, health: Health
) -> tuple[Kernels, IntArray]:
    """The device records of one rank on its host clock, and what was added to bring them there, int64[k].

    properties: Kineto's `deviceProperties`, None where the trace has none
    """
    gpu = np.flatnonzero(events.in_cats(*DEVICE_CATS) & (events.ts_ns != TIME_UNKNOWN))
    unknown = int((events.in_cats(*DEVICE_CATS) & (events.ts_ns == TIME_UNKNOWN)).sum())
    if unknown:
        health.dropped["device records without a time"] += unknown
    call = _call_index(calls, events, launch_of(events)[gpu])
    is_comm = _communicates(events, gpu) | np.isin(gpu, comm_rows)
    start = events.ts_ns[gpu].copy()
    launched = call >= 0
    shift = device_shift(calls.start_ns[call[launched]], start[launched] - calls.start_ns[call[launched]], start)
    start += shift
    order = np.argsort(start, kind="stable")
    gpu, call, is_comm, start = gpu[order], call[order], is_comm[order], start[order]
    _, stream = np.unique(events.lane[gpu], return_inverse=True)
    ptr, by_call = group_by((call + 1).astype(np.int32), len(calls) + 1)
    dim, device = grid_blocks(events)[gpu], device_from(events, gpu, properties)
    kernels = Kernels(
        row=gpu.astype(np.int32),
        stream=stream.astype(np.int32),
        call=call,
        start_ns=start,
        end_ns=start + events.dur_ns[gpu],
        is_comm=is_comm & ~events.in_cats(*COPY_CATS, *SET_CATS)[gpu],
        is_copy=events.in_cats(*COPY_CATS, *SET_CATS)[gpu],
        blocks=np.clip(dim, 0, 2**31 - 1).astype(np.int32),
        ptr=ptr[1:],
        order=by_call,
        stream_count=int(stream.max()) + 1 if len(stream) else 0,
        fill=filling_blocks(events, gpu, device),
        processors=device.processors,
    )
    _count_links(calls, kernels, health)
    return kernels, shift


def _count_links(calls: Calls, kernels: Kernels, health: Health) -> None:
    """Count what makes the stream of a kernel doubtful; launches and records without each other are the survey's."""
    several = int(((calls.meaning == Call.LAUNCH) & (np.diff(kernels.ptr) > 1)).sum())
    if several:
        health.unmatched["launches with several kernels (stream attribution unreliable)"] += several


def estimate(calls: Calls, kernels: Kernels, syncs: SyncEdges | None, job_launch_ns: int | None) -> Constants:
    """The rank's constants: medians over samples in which nothing else can have delayed the event."""
    calling = np.flatnonzero(np.diff(kernels.ptr) > 0)
    latency = kernels.start_ns[kernels.order[kernels.ptr[calling]]] - calls.start_ns[calling]
    least = int(latency.min()) if len(latency) else 0
    near = latency[latency < least + NEAR_MINIMUM_NS]
    if len(near) < 5 and least > 200_000:
        launch = job_launch_ns if job_launch_ns is not None else 8_000
    else:
        launch = int(np.median(near)) if len(near) else 6_000
    by_stream = np.lexsort((kernels.start_ns, kernels.stream))
    a, b = by_stream[:-1], by_stream[1:]
    gap = kernels.start_ns[b] - kernels.end_ns[a]
    waited = (
        (kernels.call[b] < 0) | (calls.start_ns[kernels.call[b]] < kernels.start_ns[b] - 40_000)
        if len(calls)
        else kernels.call[b] < 0
    )
    queued = (kernels.stream[a] == kernels.stream[b]) & (gap >= 0) & (gap < 8_000) & waited & ~kernels.is_comm[b]
    gap_ns = int(np.median(gap[queued])) if queued.any() else 1_000
    tail, own = 10_000, 3_000
    if syncs is not None and syncs.is_sync.any():
        blocking = syncs.is_sync & (calls.meaning != Call.FREE)
        dur = (calls.end_ns - calls.start_ns)[blocking]
        if len(dur):
            own = int(min(np.percentile(dur, 10), 10_000))
        explained = blocking & (syncs.status == EXPLAINED) & (syncs.awaited_ns > calls.start_ns + own)
        tails = np.maximum((calls.end_ns - syncs.awaited_ns)[explained], 0)
        tail = int(np.median(tails)) if len(tails) else tail
    return Constants(max(launch, 0), gap_ns, tail, own)


LOST_LAUNCH = 3


def in_record(events: Events, calls: Calls, kernels: Kernels) -> npt.NDArray[np.uint8]:
    """uint8 per call: 0 outside record_param_comms, 1 inside one that launches nothing, 2 inside a launching one.

    3 (LOST_LAUNCH) is the launch of a collective whose kernel has no record: it is outstanding all the same.
    """
    spans = spans_of(events, events.named("record_param_comms"))
    record = spans.at(calls.thread, calls.start_ns)
    known = np.unique(record[kernels.call[kernels.is_comm & (kernels.call >= 0)]])
    bare = (record >= 0) & (calls.meaning == Call.LAUNCH) & (np.diff(kernels.ptr) == 0) & ~np.isin(record, known)
    launching = np.concatenate((known, record[bare]))
    inside = np.where(record < 0, 0, np.where(np.isin(record, launching), 2, 1))
    _, last = np.unique(record[bare][::-1], return_index=True)
    inside[np.flatnonzero(bare)[::-1][last]] = LOST_LAUNCH
    return inside.astype(np.uint8)


def _first_int(text: str | None, position: int) -> int:
    """The first whole number in one entry of recorded "Concrete Inputs" (a JSON list of texts), -1 without."""
    if text is None:
        return -1
    try:
        inputs = json.loads(text)
    except ValueError:
        return -1
    if not isinstance(inputs, list) or len(inputs) <= position:
        return -1
    found = re.search(r"\d+", str(inputs[position]))
    return int(found[0]) if found is not None else -1


def named_works(events: Events, calls: Calls, kernels: Kernels) -> Int32Array:
    """Kernel of the collective that each stream wait names, int32[c], -1 where inputs were not recorded.

    The first input of a wait's record is the sequence number that the second input of the launch's record holds.
    """
    out = np.full(len(calls), -1, np.int32)
    if "Concrete Inputs" not in events.args:
        return out
    record = spans_of(events, events.named("record_param_comms")).at(calls.thread, calls.start_ns)
    text = np.where(record >= 0, events.texts("Concrete Inputs")[np.maximum(record, 0)], -1)
    used, inverse = np.unique(text, return_inverse=True)
    inputs = [events.strings[int(code)] if code >= 0 else None for code in used]
    named = np.array([_first_int(one, 0) for one in inputs], np.int64)[inverse]
    launched = np.array([_first_int(one, 1) for one in inputs], np.int64)[inverse]
    waits = np.flatnonzero((calls.meaning == Call.STREAM_WAIT) & (named >= 0))
    works = np.flatnonzero(kernels.is_comm & (kernels.call >= 0))
    works = works[launched[kernels.call[works]] >= 0]
    key = launched[kernels.call[works]] * (len(calls) + 1) + kernels.call[works]
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], named[waits] * (len(calls) + 1) + waits) - 1
    hit = at >= 0
    found = works[order[at[hit]]]
    same = launched[kernels.call[found]] == named[waits[hit]]
    out[waits[hit][same]] = found[same]
    return out


def recorded_waits(
    events: Events, calls: Calls, kernels: Kernels, health: Health
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """What sync records state, per call: awaited kernel and waiting stream of a stream wait, stream of a sync (-1)."""
    src = np.full(len(calls), -1, np.int32)
    waiting, synced = src.copy(), src.copy()
    rows = np.flatnonzero(events.in_cats(*SYNC_CATS))
    if not len(rows):
        return src, waiting, synced
    kind, name = events.texts("cuda_sync_kind")[rows], events.name[rows]
    text = np.where(kind >= 0, kind, name)
    is_wait, is_sync = (np.isin(text, _codes(events, label)) for label in ("Stream Wait Event", "Stream Sync"))
    call = _by_correlation(events, calls, events.correlation[rows])
    about = _dense_streams(events, kernels, stream_of_sync(events)[rows])
    sync = np.flatnonzero(is_sync & (call >= 0))
    synced[call[sync]] = about[sync]
    wait_on = events.ints("wait_on_stream")[rows]
    known = is_wait & (call >= 0) & (wait_on >= 0)
    if (is_wait & ~known).any():
        health.unmatched[UNRESOLVED] += int((is_wait & ~known).sum())
    wait = np.flatnonzero(known)
    waiting[call[wait]] = about[wait]
    record = _by_correlation(events, calls, events.ints("wait_on_cuda_event_record_corr_id")[rows][wait])
    on = _dense_streams(events, kernels, wait_on[wait])
    loose = (record < 0) & (on >= 0)
    if loose.any():
        health.guessed["stream waits without their event record: last work of the awaited stream taken"] += int(
            loose.sum()
        )
    src[call[wait]] = _last_before(kernels, len(calls), on, np.where(record >= 0, record, call[wait]))
    return src, waiting, synced


def _codes(events: Events, label: str) -> list[int]:
    return [code for code, text in enumerate(events.strings) if text == label]


def _by_correlation(events: Events, calls: Calls, wanted: IntArray) -> Int32Array:
    """Index into `calls` of the call with each correlation id, -1 without."""
    ids = events.correlation[calls.row]
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], wanted), max(len(ids) - 1, 0))
    if not len(ids):
        return np.full(len(wanted), -1, np.int32)
    return np.where((wanted > 0) & (ids[order][at] == wanted), order[at], -1).astype(np.int32)


def _dense_streams(events: Events, kernels: Kernels, streams: IntArray) -> Int32Array:
    """The dense number of each stream, -1 where it has no work in the trace."""
    ids, first = np.unique(events.stream[kernels.row], return_index=True)
    if not len(ids):
        return np.full(len(streams), -1, np.int32)
    at = np.minimum(np.searchsorted(ids, streams), len(ids) - 1)
    return np.where(ids[at] == streams, kernels.stream[first][at], -1).astype(np.int32)


def _last_before(kernels: Kernels, calls: int, stream: Int32Array, call: Int32Array) -> Int32Array:
    """The last kernel of each stream launched before each call (index into the calls), -1 without."""
    launched = np.flatnonzero(kernels.call >= 0)
    key = kernels.stream[launched].astype(np.int64) * (calls + 1) + kernels.call[launched]
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], stream.astype(np.int64) * (calls + 1) + call) - 1
    found = launched[order[np.maximum(at, 0)]] if len(launched) else np.full(len(at), -1)
    fits = (at >= 0) & (stream >= 0) & (kernels.stream[np.maximum(found, 0)] == stream if len(launched) else False)
    return np.where(fits, found, -1).astype(np.int32)
