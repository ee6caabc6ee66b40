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
LOOK_BACK_WORKS = 16
EDGES, PENDING, HEAD, TAIL, UNRESOLVED, SWAPPED = range(6)
"""Counters of the walk: edges, pending entries, the queue of outstanding works, waits no rule resolves, second choices."""

_LAUNCH, _GRAPH, _COPY = int(Call.LAUNCH), int(Call.GRAPH_LAUNCH), int(Call.COPY)
_STREAM_WAIT = int(Call.STREAM_WAIT)
_RECORDED, _ENTRY, _WORK = int(EdgeSource.RECORDED), int(EdgeSource.ENTRY), int(EdgeSource.WORK_WAIT)
_FUTURE, _CROSS = int(EdgeSource.FUTURE_WAIT), int(EdgeSource.STREAM_WAIT)
_LOST_LAUNCH = 3


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device records of one rank in order of start (k rows), times on the rank's host clock.

    row, stream  int32: row in Events; dense stream number
    call         int32: index into Calls of the launch, -1 where it is not in the trace
    ptr, order   CSR from call to its kernels in order of start
    blocks, fill int32: thread blocks of the grid (0 unknown), and how many of its shape fill the device
    processors   how many blocks put one on every processor of the device
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
    fill: Int32Array
    processors: int

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


def dense_threads(calls: Calls) -> Int32Array:
    """The calling threads numbered from 0, int32[c]."""
    thread: Int32Array = np.unique(calls.thread, return_inverse=True)[1].astype(np.int32)
    return thread


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
    work = int(works[at])
    for j in range(at, head, -1):
        works[j] = works[j - 1]
    works[head] = work
    return int(work)


@jit
def _swap_refuted(count: IntArray, works: Int32Array, work: int, by: int, end: IntArray) -> int:
    """A work that can explain a start before `by`.

    `work` itself where it ends in time; else the oldest outstanding one that does, or one that another stream has
    awaited already. In both cases `work` is outstanding again.
    """
    head, tail = count[HEAD], count[TAIL]
    if end[work] <= by:
        return work
    other = -1
    for j in range(tail - 1, max(-1, head - LOOK_BACK_WORKS - 1), -1):
        if works[j] >= 0 and end[works[j]] <= by and (j >= head or other < 0):
            other = j
    if other < 0:
        return work
    count[SWAPPED] += 1
    found = int(works[other])
    if other >= head:
        for i in range(other, head, -1):
            works[i] = works[i - 1]
        works[head] = work
        return found
    at = head - 1
    while works[at] != work and at > 0:
        at -= 1
    for i in range(at, head - 1):
        works[i] = works[i + 1]
    works[head - 1] = work
    count[HEAD] -= 1
    return found


@jit
def _any_in_time(pend: IntArray, first: int, pending: int, end: IntArray, by: int) -> bool:
    """Whether the trace leaves any candidate of a stream wait standing; else it awaited work that is not here."""
    found = False
    for j in range(first, pending):
        found |= pend[j, 3] == pend[first, 3] and end[pend[j, 0]] <= by
    return found


@jit
def _put(count: IntArray, pend: IntArray, kernel: int, stream: int, source: int, group: int) -> None:
    """Append one pending entry."""
    at = count[PENDING]
    pend[at, 0], pend[at, 1], pend[at, 2], pend[at, 3] = kernel, stream, source, group
    count[PENDING] += 1


@jit
def _edge(count: IntArray, edges: Int32Array, src: int, dst: int, source: int) -> None:
    """Append one edge."""
    at = count[EDGES]
    edges[at, 0], edges[at, 1], edges[at, 2] = src, dst, source
    count[EDGES] += 1


@jit
def _open_wait(
    count: IntArray,
    pend: IntArray,
    works: Int32Array,
    wait: int,
    to: int,
    inside: int,
    recorded_src: int,
    recorded_stream: int,
    named_work: int,
    used: IntArray,
    last: Int32Array,
    is_comm: BoolArray,
) -> None:
    """Turn one stream wait into pending entries, by the first rule that fits; count it as unresolved where none does."""
    before = count[PENDING]
    if recorded_stream >= 0:
        if recorded_src >= 0:
            _put(count, pend, recorded_src, recorded_stream, _RECORDED, wait)
    elif to >= 0 and count[HEAD] < count[TAIL]:
        work = _take(works, count[HEAD], count[TAIL], named_work)
        count[HEAD] += 1
        if work >= 0:
            _put(count, pend, work, to, _WORK if inside == 1 else _FUTURE, wait)
    elif to >= 0 and inside == 0:
        for other in _recent(used, last, is_comm, to):
            _put(count, pend, last[other], to, _CROSS, wait)
    count[UNRESOLVED] += count[PENDING] == before


@jit
def _close_waits(
    count: IntArray,
    pend: IntArray,
    works: Int32Array,
    edges: Int32Array,
    k: int,
    s: int,
    by: int,
    comm: bool,
    end: IntArray,
) -> None:
    """Edges into kernel `k` of stream `s` from all pending entries of that stream, which are then done."""
    left, group = 0, -1
    for j in range(count[PENDING]):
        source = pend[j, 2]
        if pend[j, 1] != s or (source != _RECORDED and comm):
            pend[left] = pend[j]
            left += 1
            continue
        work = pend[j, 0]
        if source in (_WORK, _FUTURE):
            work = _swap_refuted(count, works, work, by, end)
        if pend[j, 3] == group:
            n = count[EDGES]
            if n > 0 and edges[n - 1, 1] == k and end[edges[n - 1, 0]] > by and end[work] <= by:
                edges[n - 1, 0] = work
                count[SWAPPED] += 1
            continue
        group = pend[j, 3]
        if source == _CROSS and not _any_in_time(pend, j, count[PENDING], end, by):
            count[UNRESOLVED] += 1
            continue
        _edge(count, edges, work, k, source)
    count[PENDING] = left


@jit
def _enter(
    count: IntArray,
    edges: Int32Array,
    k: int,
    s: int,
    by: int,
    used: IntArray,
    last: Int32Array,
    is_comm: BoolArray,
    end: IntArray,
) -> None:
    """The edge into a collective from the last kernel of its thread's current stream, or of the one before that."""
    best, first = -1, -1
    for t in _recent(used, last, is_comm, s):
        if best < 0:
            first = t
        if best < 0 or (end[last[best]] > by and end[last[t]] <= by):
            best = t
    count[SWAPPED] += best != first
    if best >= 0:
        _edge(count, edges, last[best], k, _ENTRY)


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
) -> tuple[Int32Array, IntArray]:
    """All offered edges (src, dst, source), and the counters.

    Waits become pending entries (kernel, waiting stream, source, group) that the stream's next kernel takes up; of a
    group it takes the first that the trace does not refute.
    """
    capacity = 2 * len(stream) + (len(meaning) + 1) * max(streams, 1) + 1
    edges, pend = np.empty((capacity, 3), np.int32), np.empty((capacity, 4), np.int64)
    works = np.empty(len(stream) + len(meaning) + 1, np.int32)
    last = np.full(streams, -1, np.int32)
    used = np.full((int(thread.max()) + 1 if len(thread) else 1, max(streams, 1)), -1, np.int64)
    count = np.zeros(6, np.int64)
    for i in range(len(meaning)):
        mine = used[thread[i]]
        if meaning[i] == _STREAM_WAIT and in_record[i] < 2:
            rec, to = recorded_stream[i], upcoming[i]
            _open_wait(
                count, pend, works, i, to, in_record[i], recorded_src[i], rec, named_work[i], mine, last, is_comm
            )
        if in_record[i] == _LOST_LAUNCH:
            works[count[TAIL]] = -1  # what awaits it awaits a kernel that is not here, and none of the others
            count[TAIL] += 1
        for at in range(ptr[i], ptr[i + 1]):
            k = order[at]
            s, by = stream[k], start[k] + CONTRADICTED_NS
            if is_comm[k]:
                _enter(count, edges, k, s, by, mine, last, is_comm, end)
                works[count[TAIL]] = k
                count[TAIL] += 1
            _close_waits(count, pend, works, edges, k, s, by, is_comm[k], end)
            if not is_comm[k]:
                mine[s] = i
            last[s] = k
    return edges[: count[EDGES]], count


def infer_streams(
    calls: Calls,
    kernels: Kernels,
    in_record: ByteArray,
    recorded_src: Int32Array,
    recorded_stream: Int32Array,
    awaited_work: Int32Array,
) -> StreamEdges:
    """Cross-stream edges of one rank.

    in_record        uint8[c]: 0 outside any record_param_comms, 1 inside one that launches nothing, 2 inside a launch's,
                     3 the launch of a collective whose kernel was lost
    recorded_src     int32[c]: kernel that a recorded stream wait awaits, -1 none; recorded_stream: the waiting stream, -1
    awaited_work     int32[c]: kernel of the collective that a wait names by sequence number, -1 where it names none
    """
    thread = dense_threads(calls)
    edges, counters = _walk(
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
    src, dst, source = edges[:, 0], edges[:, 1], edges[:, 2].astype(np.uint8)
    slack = np.where(source == _RECORDED, 0, CONTRADICTED_NS)
    refuted = kernels.end_ns[src] > kernels.start_ns[dst] + slack
    count = len(EdgeSource)
    return StreamEdges(
        src[~refuted],
        dst[~refuted],
        source[~refuted],
        np.bincount(source, minlength=count),
        np.bincount(source[refuted], minlength=count),
        int(counters[UNRESOLVED]),
        int(counters[SWAPPED]),
    )
