"""Turns the blocking calls of one rank into what they awaited: the kernels whose ends let them return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.host import Call, Calls
from scaletrace.parse.streams import CONTRADICTED_NS, Kernels, dense_threads

SYNC_TAIL_CAP_NS = 60_000
SHORT_CALL_NS = 20_000
LOOK_BACK = 400
QUEUE_LEAST, QUEUE_MOST, BLOCKED_LAUNCH_NS = 700, 1_100, 100_000
"""A device queue holds about a thousand launches; a launch into a full one blocks until one of the oldest is through."""
_LAUNCH = int(Call.LAUNCH)
_COPY, _FREE, _DEVICE_SYNC = int(Call.COPY), int(Call.FREE), int(Call.DEVICE_SYNC)
_STREAM_SYNC, _EVENT_SYNC = int(Call.STREAM_SYNC), int(Call.EVENT_SYNC)

NOTHING_AWAITED, EXPLAINED, UNEXPLAINED = 0, 1, 2
"""What a blocking call waited for: nothing was outstanding; a kernel whose end fits; outstanding work, but none fits."""


@dataclass(frozen=True, slots=True)
class SyncEdges:
    """Which kernel (src) each blocking call (dst, index into Calls) awaited, and how well that explains it.

    status  uint8[c]: NOTHING_AWAITED, EXPLAINED or UNEXPLAINED;  is_sync bool[c]: the call blocks
    awaited_ns int64[c]: latest end of the awaited work, -1 without
    """

    src: Int32Array
    dst: Int32Array
    status: ByteArray
    is_sync: BoolArray
    awaited_ns: IntArray
    offered: int
    contradicted: int


@jit
def _latest_launched(launched: Int32Array, top: int, end: IntArray, before: int) -> int:
    """Of the last launched kernels the one that ends last, but not after `before`; -1 without."""
    best = -1
    for j in range(top - 1, max(-1, top - LOOK_BACK - 1), -1):
        k = int(launched[j])
        if end[k] <= before and (best < 0 or end[k] > end[best]):
            best = k
    return best


@jit
def _queue_head(launched: Int32Array, top: int, end: IntArray, call_end: int) -> int:
    """The kernel about a thousand launches back whose end let a launch into a full queue return; -1 where none fits."""
    best = -1
    for j in range(max(0, top - QUEUE_MOST), top - QUEUE_LEAST):
        k = int(launched[j])
        if call_end - SYNC_TAIL_CAP_NS <= end[k] <= call_end and (best < 0 or end[k] > end[best]):
            best = k
    return best


@jit
def _awaited_stream(
    last: Int32Array, current: int, recorded: int, end: IntArray, s: int, e: int, tolerance: int
) -> int:
    """The kernel that a stream synchronisation awaited: of the recorded stream, else of the one whose end fits best."""
    if recorded >= 0:
        return int(last[recorded])
    mine = int(last[current]) if current >= 0 else -1
    if e - s <= SHORT_CALL_NS:
        return mine
    if mine >= 0 and s < end[mine] <= e + tolerance and e - end[mine] <= SYNC_TAIL_CAP_NS:
        return mine
    best = -1
    for t in range(len(last)):
        k = int(last[t])
        if k >= 0 and s < end[k] <= e + tolerance and (best < 0 or end[k] > end[best]):
            best = k
    return best if best >= 0 else mine


@jit
def _status(what: int, awaited: int, s: int, e: int, last: Int32Array, end: IntArray) -> int:
    """How well the awaited end explains a blocking call over [s, e)."""
    if awaited > s:
        return EXPLAINED if e - awaited <= SYNC_TAIL_CAP_NS or what == _FREE else UNEXPLAINED
    outstanding = False
    for k in last:
        outstanding |= k >= 0 and end[k] > s
    return UNEXPLAINED if outstanding and e - s > SHORT_CALL_NS and what != _FREE else NOTHING_AWAITED


@jit
def _await(edges: Int32Array, count: IntArray, kernel: int, call: int, end: IntArray, before: int) -> int:
    """Add the edge from a kernel to a call, unless the trace refutes it; returns the awaited end, -1 where refuted."""
    count[1] += 1
    if end[kernel] > before:
        count[2] += 1
        return -1
    edges[count[0], 0], edges[count[0], 1] = kernel, call
    count[0] += 1
    return int(end[kernel])


@jit
def _walk_syncs(
    meaning: ByteArray,
    thread: Int32Array,
    call_start: IntArray,
    call_end: IntArray,
    sync_stream: Int32Array,
    ptr: IntArray,
    order: IntArray,
    stream: Int32Array,
    is_comm: BoolArray,
    is_copy: BoolArray,
    end: IntArray,
    streams: int,
    tolerance: int,
) -> tuple[Int32Array, IntArray, ByteArray, BoolArray, IntArray]:
    """Edges (kernel, call), counters (edges, offered, refuted), status, whether the call blocks, awaited end."""
    c = len(meaning)
    status, is_sync, awaited = np.zeros(c, np.uint8), np.zeros(c, np.bool_), np.full(c, -1, np.int64)
    edges, count = np.empty((c * max(streams, 1) + 1, 2), np.int32), np.zeros(3, np.int64)
    last = np.full(streams, -1, np.int32)
    current = np.full(int(thread.max()) + 1 if c else 1, -1, np.int32)
    launched, top = np.empty(len(stream) + 1, np.int32), 0
    for i in range(c):
        what, s, e = meaning[i], call_start[i], call_end[i]
        k, before = -1, e + tolerance
        if what == _COPY and ptr[i + 1] > ptr[i] and e - s > SHORT_CALL_NS:
            own = int(order[ptr[i]])
            if is_copy[own] and e - SYNC_TAIL_CAP_NS <= end[own] <= e + max(2000, tolerance - 3000):
                is_sync[i] = True
                k = own
        elif what == _LAUNCH and e - s > BLOCKED_LAUNCH_NS and top > QUEUE_LEAST:
            k = _queue_head(launched, top, end, e)
            is_sync[i] = k >= 0
        elif what in (_DEVICE_SYNC, _FREE):
            is_sync[i] = True
            for t in range(streams):
                if last[t] >= 0:
                    awaited[i] = max(awaited[i], _await(edges, count, last[t], i, end, before))
        elif what == _STREAM_SYNC:
            is_sync[i] = True
            k = _awaited_stream(last, current[thread[i]], sync_stream[i], end, s, e, tolerance)
        elif what == _EVENT_SYNC and e - s > SHORT_CALL_NS:
            is_sync[i] = True
            k = _latest_launched(launched, top, end, before)
        if k >= 0:
            awaited[i] = _await(edges, count, k, i, end, before)
        if is_sync[i]:
            status[i] = _status(what, awaited[i], s, e, last, end)
        for at in range(ptr[i], ptr[i + 1]):
            x = order[at]
            last[stream[x]] = x
            launched[top] = x
            top += 1
            if not is_comm[x]:
                current[thread[i]] = stream[x]
    return edges[: count[0]], count, status, is_sync, awaited


def infer_syncs(
    calls: Calls, kernels: Kernels, sync_stream: Int32Array, tolerance_ns: int = CONTRADICTED_NS
) -> SyncEdges:
    """What each blocking call of one rank awaited; `sync_stream` int32[c] is the recorded stream, -1 where unknown.

    tolerance_ns: by how much work may end after the call that awaited it before that refutes the edge; device and host
    clocks must agree to that.
    """
    edges, count, status, is_sync, awaited = _walk_syncs(
        calls.meaning,
        dense_threads(calls),
        calls.start_ns,
        calls.end_ns,
        sync_stream,
        kernels.ptr,
        kernels.order,
        kernels.stream,
        kernels.is_comm,
        kernels.is_copy,
        kernels.end_ns,
        kernels.stream_count,
        tolerance_ns,
    )
    return SyncEdges(edges[:, 0], edges[:, 1], status, is_sync, awaited, int(count[1]), int(count[2]))
