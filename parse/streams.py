"""Turns the order of calls on the host into dependencies between streams that no record states.

Without cuda_sync events a trace shows that some stream waited for some event, never which; the position of the call in
the program tells. Rules (docs/method): a collective waits for the last kernel of its thread's current stream (entry);
a wait inside a `record_param_comms` that launches nothing awaits the oldest outstanding collective (work wait); one
outside, while collectives are outstanding, is a future's wait; else one stream waits for the others (stream wait).
Measured times only refute an edge (it would end after the start it explains) and so choose among candidates in the
order of the rules; they never become a lag.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeSource
from scaletrace.parse.host import Call, Calls

CONTRADICTED_NS = 5_000
"""A predecessor that ends later than this after the start it should explain refutes the edge."""
SYNC_TAIL_CAP_NS = 60_000
SHORT_CALL_NS = 20_000
LOOK_BACK_WORKS = 16

_LAUNCH, _GRAPH, _COPY = int(Call.LAUNCH), int(Call.GRAPH_LAUNCH), int(Call.COPY)
_STREAM_WAIT, _DEVICE_SYNC, _FREE = int(Call.STREAM_WAIT), int(Call.DEVICE_SYNC), int(Call.FREE)
_STREAM_SYNC, _EVENT_SYNC = int(Call.STREAM_SYNC), int(Call.EVENT_SYNC)
_RECORDED, _ENTRY, _WORK = int(EdgeSource.RECORDED), int(EdgeSource.ENTRY), int(EdgeSource.WORK_WAIT)
_FUTURE, _CROSS = int(EdgeSource.FUTURE_WAIT), int(EdgeSource.STREAM_WAIT)

NOTHING_AWAITED, EXPLAINED, UNEXPLAINED = 0, 1, 2
"""What a blocking call waited for: nothing was outstanding; a kernel whose end fits; outstanding work, but none fits."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device records of one rank in order of start (k rows), times on the rank's host clock.

    row, stream  int32: row in Events; dense stream number
    call         int32: index into Calls of the launch, -1 where it is not in the trace
    ptr, order   CSR from call to its kernels in order of start
    """

    row: Int32Array
    stream: Int32Array
    call: Int32Array
    start_ns: IntArray
    end_ns: IntArray
    is_comm: BoolArray
    is_copy: BoolArray
    blocks: Int32Array
    ptr: IntArray
    order: IntArray
    stream_count: int

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class StreamEdges:
    """Edges between kernels (indices into Kernels) with their EdgeSource; refuted ones are only counted."""

    src: Int32Array
    dst: Int32Array
    source: ByteArray
    offered: IntArray
    contradicted: IntArray
    unresolved_waits: int
    second_choices: int


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


def next_stream(calls: Calls, kernels: Kernels, thread: Int32Array) -> Int32Array:
    """For each call the stream of the next computing launch of the same thread, -1 where none follows."""
    first = np.full(len(calls), -1, np.int32)
    has = kernels.ptr[1:] > kernels.ptr[:-1]
    first[has] = kernels.order[kernels.ptr[:-1][has]].astype(np.int32)
    launches = has & np.isin(calls.meaning, (_LAUNCH, _GRAPH, _COPY))
    stream = np.where(launches, kernels.stream[np.maximum(first, 0)], -1) if len(kernels) else first
    computing = launches & ~kernels.is_comm[np.maximum(first, 0)] if len(kernels) else launches
    return _look_ahead(thread, np.where(computing, stream, -1).astype(np.int32))


@jit
def _look_ahead(thread: Int32Array, stream: Int32Array) -> Int32Array:
    out = np.full(len(thread), -1, np.int32)
    upcoming = np.full(int(thread.max()) + 1 if len(thread) else 1, -1, np.int32)
    for i in range(len(thread) - 1, -1, -1):
        out[i] = upcoming[thread[i]]
        if stream[i] >= 0:
            upcoming[thread[i]] = stream[i]
    return out


@jit
def _recent(used: IntArray, last: Int32Array, is_comm: BoolArray, without: int) -> IntArray:
    """Streams that computed, but for `without`, the one that the thread used last in front."""
    found, n = np.empty(len(last), np.int64), 0
    for t in range(len(last)):
        if t != without and last[t] >= 0 and not is_comm[last[t]]:
            at = n
            while at > 0 and used[found[at - 1]] < used[t]:
                found[at] = found[at - 1]
                at -= 1
            found[at] = t
            n += 1
    return found[:n]


@jit
def _take(works: Int32Array, head: int, tail: int, wanted: int) -> int:
    """Bring `wanted`, if it is among the outstanding works, to the head of the queue; returns the work there."""
    at = head
    for j in range(head, tail):
        if works[j] == wanted:
            at = j
    work = works[at]
    for j in range(at, head, -1):
        works[j] = works[j - 1]
    works[head] = work
    return work


@jit
def _swap_refuted(works: Int32Array, head: int, tail: int, work: int, by: int, end: IntArray) -> tuple[int, int]:
    """A work that can explain a start before `by`, and the new head of the queue of outstanding ones.

    `work` itself where it ends in time; else the oldest outstanding one that does, or one that another stream has
    awaited already. In both cases `work` is outstanding again.
    """
    if end[work] <= by:
        return work, head
    other, taken = -1, False
    for j in range(tail - 1, max(-1, head - LOOK_BACK_WORKS - 1), -1):
        if end[works[j]] <= by and (j >= head or other < 0):
            other, taken = j, j < head
    if other < 0:
        return work, head
    found = works[other]
    if taken:
        at = head - 1
        while works[at] != work and at > 0:
            at -= 1
        for i in range(at, head - 1):
            works[i] = works[i + 1]
        works[head - 1] = work
        return found, head - 1
    for i in range(other, head, -1):
        works[i] = works[i - 1]
    works[head] = work
    return found, head


@jit
def _any_in_time(pend: IntArray, first: int, pending: int, end: IntArray, by: int) -> bool:
    """Whether the trace leaves any candidate of a stream wait standing; else it awaited work that is not here."""
    found = False
    for j in range(first, pending):
        found |= pend[j, 3] == pend[first, 3] and end[pend[j, 0]] <= by
    return found


@jit
def _put(pend: IntArray, at: int, kernel: int, stream: int, source: int, group: int) -> int:
    """Append one pending entry; returns the new count."""
    pend[at, 0], pend[at, 1], pend[at, 2], pend[at, 3] = kernel, stream, source, group
    return at + 1


@jit
def _walk(
    meaning: ByteArray,
    thread: Int32Array,
    upcoming: Int32Array,
    in_record: ByteArray,
    recorded_src: Int32Array,
    recorded_stream: Int32Array,
    named_work: Int32Array,
    ptr: IntArray,
    order: IntArray,
    stream: Int32Array,
    is_comm: BoolArray,
    start: IntArray,
    end: IntArray,
    streams: int,
) -> tuple[Int32Array, Int32Array, ByteArray, int, int]:
    """All offered edges (src, dst, source), the second choices among them, and the waits that no rule resolves.

    Waits become pending entries (kernel, waiting stream, source, group) that the stream's next kernel takes up; of a
    group it takes the first that the trace does not refute.
    """
    capacity = 2 * len(stream) + (len(meaning) + 1) * max(streams, 1) + 1
    src, dst, source = np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.uint8)
    pend = np.empty((capacity, 4), np.int64)
    works = np.empty(len(stream) + 1, np.int32)
    last = np.full(streams, -1, np.int32)
    threads = int(thread.max()) + 1 if len(thread) else 1
    used = np.full((threads, max(streams, 1)), -1, np.int64)
    n, pending, head, tail, unresolved, swapped = 0, 0, 0, 0, 0, 0
    for i in range(len(meaning)):
        if meaning[i] == _STREAM_WAIT and in_record[i] != 2:
            before, to = pending, upcoming[i]
            if recorded_stream[i] >= 0:
                if recorded_src[i] >= 0:
                    pending = _put(pend, pending, recorded_src[i], recorded_stream[i], _RECORDED, i)
            elif to >= 0 and head < tail:
                work = _take(works, head, tail, named_work[i])
                head += 1
                pending = _put(pend, pending, work, to, _WORK if in_record[i] == 1 else _FUTURE, i)
            elif to >= 0 and in_record[i] == 0:
                for other in _recent(used[thread[i]], last, is_comm, to):
                    pending = _put(pend, pending, last[other], to, _CROSS, i)
            unresolved += pending == before
        for at in range(ptr[i], ptr[i + 1]):
            k = order[at]
            s, by = stream[k], start[k] + CONTRADICTED_NS
            if is_comm[k]:
                best, first = -1, -1
                for t in _recent(used[thread[i]], last, is_comm, s):
                    if best < 0:
                        first = t
                    if best < 0 or (end[last[best]] > by and end[last[t]] <= by):
                        best = t
                swapped += best != first
                if best >= 0:
                    src[n], dst[n], source[n] = last[best], k, _ENTRY
                    n += 1
                works[tail] = k
                tail += 1
            left, group = 0, -1
            for j in range(pending):
                if pend[j, 1] != s or (pend[j, 2] != _RECORDED and is_comm[k]):
                    pend[left] = pend[j]
                    left += 1
                    continue
                work = pend[j, 0]
                if pend[j, 2] == _WORK or pend[j, 2] == _FUTURE:
                    work, head = _swap_refuted(works, head, tail, work, by, end)
                    swapped += work != pend[j, 0]
                if pend[j, 3] == group:
                    if n > 0 and dst[n - 1] == k and end[src[n - 1]] > by and end[work] <= by:
                        src[n - 1] = work
                        swapped += 1
                    continue
                group = pend[j, 3]
                if pend[j, 2] == _CROSS and not _any_in_time(pend, j, pending, end, by):
                    unresolved += 1
                    continue
                src[n], dst[n], source[n] = work, k, pend[j, 2]
                n += 1
            pending = left
            if not is_comm[k]:
                used[thread[i], s] = i
            last[s] = k
    return src[:n], dst[:n], source[:n], swapped, unresolved


def infer_streams(
    calls: Calls,
    kernels: Kernels,
    in_record: ByteArray,
    recorded_src: Int32Array,
    recorded_stream: Int32Array,
    awaited_work: Int32Array,
) -> StreamEdges:
    """Cross-stream edges of one rank.

    in_record        uint8[c]: 0 outside any record_param_comms, 1 inside one that launches nothing, 2 inside a launch's
    recorded_src     int32[c]: kernel that a recorded stream wait awaits, -1 none; recorded_stream: the waiting stream, -1
    awaited_work     int32[c]: kernel of the collective that a wait names by sequence number, -1 where it names none
    """
    _, thread = np.unique(calls.thread, return_inverse=True)
    thread = thread.astype(np.int32)
    src, dst, source, swapped, unresolved = _walk(
        calls.meaning,
        thread,
        next_stream(calls, kernels, thread),
        in_record,
        recorded_src,
        recorded_stream,
        awaited_work,
        kernels.ptr,
        kernels.order,
        kernels.stream,
        kernels.is_comm,
        kernels.start_ns,
        kernels.end_ns,
        kernels.stream_count,
    )
    slack = np.where(source == _RECORDED, 0, CONTRADICTED_NS)
    refuted = kernels.end_ns[src] > kernels.start_ns[dst] + slack
    count = len(EdgeSource)
    return StreamEdges(
        src[~refuted],
        dst[~refuted],
        source[~refuted],
        np.bincount(source, minlength=count),
        np.bincount(source[refuted], minlength=count),
        unresolved,
        swapped,
    )


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
    start: IntArray,
    end: IntArray,
    streams: int,
    tolerance: int,
) -> tuple[Int32Array, Int32Array, ByteArray, BoolArray, IntArray, int, int]:
    c = len(meaning)
    status, is_sync = np.zeros(c, np.uint8), np.zeros(c, np.bool_)
    awaited = np.full(c, -1, np.int64)
    room = c * max(streams, 1) + 1
    src, dst = np.empty(room, np.int32), np.empty(room, np.int32)
    n, offered, contradicted = 0, 0, 0
    last = np.full(streams, -1, np.int32)
    current = np.full(int(thread.max()) + 1 if c else 1, -1, np.int32)
    launched, top = np.empty(len(stream) + 1, np.int32), 0
    for i in range(c):
        what, s, e = meaning[i], call_start[i], call_end[i]
        if what == _COPY and ptr[i + 1] > ptr[i] and e - s > SHORT_CALL_NS:
            k = order[ptr[i]]
            if is_copy[k] and end[k] <= e + max(2000, tolerance - 3000) and end[k] >= e - SYNC_TAIL_CAP_NS:
                is_sync[i], status[i], awaited[i] = True, EXPLAINED, end[k]
                src[n], dst[n] = k, i
                n, offered = n + 1, offered + 1
        elif what in (_DEVICE_SYNC, _FREE):
            is_sync[i] = True
            for t in range(streams):
                k = last[t]
                if k < 0:
                    continue
                offered += 1
                if end[k] > e + tolerance:
                    contradicted += 1
                    continue
                src[n], dst[n] = k, i
                n += 1
                awaited[i] = max(awaited[i], end[k])
        elif what == _STREAM_SYNC:
            is_sync[i] = True
            k = _awaited_stream(last, current[thread[i]], sync_stream[i], end, s, e, tolerance)
            if k >= 0:
                offered += 1
                if end[k] > e + tolerance:
                    contradicted += 1
                else:
                    src[n], dst[n] = k, i
                    n += 1
                    awaited[i] = end[k]
        elif what == _EVENT_SYNC and e - s > SHORT_CALL_NS:
            is_sync[i] = True
            k = -1
            for j in range(top - 1, max(-1, top - 401), -1):
                x = launched[j]
                if end[x] <= e + tolerance and (k < 0 or end[x] > end[k]):
                    k = x
            if k >= 0:
                offered += 1
                src[n], dst[n] = k, i
                n += 1
                awaited[i] = end[k]
        if is_sync[i] and status[i] == 0:
            outstanding = False
            for t in range(streams):
                outstanding |= last[t] >= 0 and end[last[t]] > s
            if awaited[i] > s:
                late = e - awaited[i] <= SYNC_TAIL_CAP_NS or what == _FREE
                status[i] = EXPLAINED if late else UNEXPLAINED
            elif outstanding and e - s > SHORT_CALL_NS and what != _FREE:
                status[i] = UNEXPLAINED
        for at in range(ptr[i], ptr[i + 1]):
            k = order[at]
            last[stream[k]] = k
            launched[top] = k
            top += 1
            if not is_comm[k]:
                current[thread[i]] = stream[k]
    return src[:n], dst[:n], status, is_sync, awaited, offered, contradicted


@jit
def _awaited_stream(
    last: Int32Array,
    current: int,
    recorded: int,
    end: IntArray,
    s: int,
    e: int,
    tolerance: int,
) -> int:
    """The kernel that a stream synchronisation awaited: of the recorded stream, else of the one whose end fits best."""
    if recorded >= 0:
        return last[recorded]
    mine = last[current] if current >= 0 else -1
    if e - s <= SHORT_CALL_NS:
        return mine
    if mine >= 0 and s < end[mine] <= e + tolerance and e - end[mine] <= SYNC_TAIL_CAP_NS:
        return mine
    best = -1
    for t in range(len(last)):
        k = last[t]
        if k >= 0 and s < end[k] <= e + tolerance and (best < 0 or end[k] > end[best]):
            best = k
    return best if best >= 0 else mine


def infer_syncs(
    calls: Calls, kernels: Kernels, sync_stream: Int32Array, tolerance_ns: int = CONTRADICTED_NS
) -> SyncEdges:
    """What each blocking call of one rank awaited; `sync_stream` int32[c] is the recorded stream, -1 where unknown.

    tolerance_ns: by how much work may end after the call that awaited it before that refutes the edge; device and host
    clocks must agree to that.
    """
    _, thread = np.unique(calls.thread, return_inverse=True)
    found = _walk_syncs(
        calls.meaning,
        thread.astype(np.int32),
        calls.start_ns,
        calls.end_ns,
        sync_stream,
        kernels.ptr,
        kernels.order,
        kernels.stream,
        kernels.is_comm,
        kernels.is_copy,
        kernels.start_ns,
        kernels.end_ns,
        kernels.stream_count,
        tolerance_ns,
    )
    return SyncEdges(*found)
