"""Turns one rank's host events into calls and named stretches of host time, the host side of the graph."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.build_draft import Draft
from scaletrace.parse.cats import ANNOTATION_CATS, OP_CATS, PYTHON_CATS, RUNTIME_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, LOADER
from scaletrace.parse.health import Health

NO_PLACE = ("ProfilerStep", "gloo:")
"""Annotations that do not say where in the program the host is."""
_MODULE = re.compile(r"nn\.Module: (?P<module>[\w.]+)$|\((?P<path>[a-z_][\w]*(\.[\w]+)+)\)$", re.IGNORECASE)
"""A module in an annotation or frame: `nn.Module: Linear_3`, `FSDP::all_gather (blocks.0)`."""


class Call(IntEnum):
    """What a runtime or driver call means for the graph.

    ISSUE and HOST_WAIT are no calls of the runtime: the host hands work to another thread, or waits for it.
    """

    OTHER = 0
    LAUNCH = 1
    GRAPH_LAUNCH = 2
    DEVICE_SYNC = 3
    STREAM_SYNC = 4
    EVENT_SYNC = 5
    FREE = 6
    STREAM_WAIT = 7
    EVENT_RECORD = 8
    COPY = 9
    IGNORED = 10
    ISSUE = 11
    HOST_WAIT = 12


_RULES = (
    (re.compile(r"GraphLaunch"), Call.GRAPH_LAUNCH),
    (re.compile(r"Memcpy|Memset", re.IGNORECASE), Call.COPY),
    (
        re.compile(
            r"Launch(Cooperative)?Kernel|LaunchCooperative|ModuleLaunch|LaunchHostFunc|EnqueueKernel", re.IGNORECASE
        ),
        Call.LAUNCH,
    ),
    (re.compile(r"(Device|Ctx|Context)Synchronize$"), Call.DEVICE_SYNC),
    (re.compile(r"StreamSynchronize$"), Call.STREAM_SYNC),
    (re.compile(r"EventSynchronize$"), Call.EVENT_SYNC),
    (re.compile(r"^(cuda|hip)Free$|^(cuMemFree|cuMemFree_v2)$"), Call.FREE),
    (re.compile(r"StreamWaitEvent"), Call.STREAM_WAIT),
    (re.compile(r"EventRecord"), Call.EVENT_RECORD),
    (
        re.compile(
            r"Query|IsCapturing|GetCaptureInfo|PeekAtLastError|GetLastError|GetAttribute|GetDevice|SetDevice|"
            r"GetDriverEntryPoint|ThreadExchangeStreamCaptureMode|GetFuncBySymbol|GetProperties|^INVALID"
        ),
        Call.IGNORED,
    ),
)
SYNCS = (Call.DEVICE_SYNC, Call.STREAM_SYNC, Call.EVENT_SYNC, Call.FREE)
LAUNCHES = (Call.LAUNCH, Call.GRAPH_LAUNCH, Call.COPY)


@lru_cache(maxsize=4096)
def call_type(name: str) -> Call:
    """The meaning of a runtime or driver call, by its name (CUDA, HIP and driver forms)."""
    for pattern, meaning in _RULES:
        if pattern.search(name):
            return meaning
    return Call.OTHER


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one rank's logical thread of control in order of time (c rows).

    row, thread  int32: row in Events; lane code of the calling thread
    meaning      uint8: Call
    chain        int32: calls of one chain follow each other; threads that overlap in time have chains of their own
    """

    row: Int32Array
    thread: Int32Array
    meaning: ByteArray
    chain: Int32Array
    start_ns: IntArray
    end_ns: IntArray

    def __len__(self) -> int:
        return len(self.row)


def with_host_waits(calls: Calls, extra: Calls) -> tuple[Calls, Int32Array]:
    """The calls with those of `extra` among them in order of time, and where each of `extra` went (int32)."""
    start = np.concatenate((calls.start_ns, extra.start_ns))
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    names = ("row", "thread", "meaning", "chain", "start_ns", "end_ns")
    merged = {name: np.concatenate((getattr(calls, name), getattr(extra, name)))[order] for name in names}
    return Calls(**merged), place[len(calls) :]


def chains_of(calls: Calls, threads: Int32Array) -> Int32Array:
    """The chain of each thread's calls, int32 per thread given; a thread without any call has the main one."""
    lanes, first = np.unique(calls.thread, return_index=True)
    chain = dict(zip(lanes.tolist(), calls.chain[first].tolist(), strict=True))
    return np.array([chain.get(thread, 0) for thread in threads.tolist()], np.int32)


@jit
def _nested(lane: Int32Array, start_ns: IntArray, end_ns: IntArray) -> BoolArray:
    """Which intervals lie inside an earlier one of the same lane; rows sorted by (lane, start, longest first)."""
    out = np.zeros(len(lane), np.bool_)
    reach = np.int64(0)
    for i in range(len(lane)):
        if i == 0 or lane[i] != lane[i - 1]:
            reach = end_ns[i]
        elif end_ns[i] <= reach and start_ns[i] < reach:
            out[i] = True
        else:
            reach = max(reach, end_ns[i])
    return out


def outermost(events: Events, rows: IntArray) -> IntArray:
    """Those of `rows` that no other of them contains on its thread, sorted by (lane, start)."""
    lane, start, end = events.lane[rows], events.ts_ns[rows], events.end_ns[rows]
    order = np.lexsort((-end, start, lane))
    nested = _nested(lane[order], start[order], end[order])
    out: IntArray = rows[order[~nested]]
    return out


def find_calls(events: Events, health: Health) -> Calls:
    """The runtime and driver calls that matter: of threads that launch work, without polls and attribute queries."""
    rows = np.flatnonzero(events.in_cats(*RUNTIME_CATS) & (events.ts_ns != TIME_UNKNOWN))
    meanings = np.zeros(len(events.strings), np.uint8)
    for code in np.unique(events.name[rows]).tolist():
        meanings[code] = int(call_type(events.strings[code]))
    meaning = meanings[events.name[rows]]
    rows = rows[meaning != Call.IGNORED]
    meaning = meanings[events.name[rows]]
    working = np.unique(events.lane[rows[np.isin(meaning, LAUNCHES)]])
    if not len(working):
        working = np.unique(events.lane[rows[np.isin(meaning, SYNCS)]])
    rows = outermost(events, rows[np.isin(events.lane[rows], working)])
    rows = rows[np.argsort(events.ts_ns[rows], kind="stable")]
    start, end, thread = events.ts_ns[rows], events.end_ns[rows], events.lane[rows]
    chain = _chains(thread, start, end, health)
    return Calls(rows.astype(np.int32), thread.astype(np.int32), meanings[events.name[rows]], chain, start, end)


def _chains(thread: Int32Array, start: IntArray, end: IntArray, health: Health) -> Int32Array:
    """Merge threads that take turns (main and autograd) into chain 0; a thread that runs beside it gets its own."""
    chain = np.zeros(len(thread), np.int32)
    lanes, counts = np.unique(thread, return_counts=True)
    next_chain = 1
    merged = np.zeros(len(thread), np.bool_)
    for lane in lanes[np.argsort(-counts, kind="stable")]:
        mine = thread == lane
        both = merged | mine
        rows = np.flatnonzero(both)
        crossing = (start[rows[1:]] < end[rows[:-1]] - 1000) & (mine[rows[1:]] != mine[rows[:-1]])
        if crossing.sum() > max(2, 0.02 * mine.sum()):
            chain[mine] = next_chain
            next_chain += 1
            health.guessed["host threads taken as independent (they overlap the main thread)"] += 1
        else:
            merged = both
    return chain


@dataclass(frozen=True, slots=True)
class Spans:
    """Disjoint intervals of one kind on all threads, for look-ups: sorted by (lane, start)."""

    row: IntArray
    lane: Int32Array
    start_ns: IntArray
    end_ns: IntArray

    def at(self, lane: Int32Array, time_ns: IntArray) -> IntArray:
        """Event row of the interval of `lane` that contains each time, -1 where none does."""
        out = np.full(len(lane), -1, np.int64)
        for code in np.unique(lane):
            ask = np.flatnonzero(lane == code)
            low, high = np.searchsorted(self.lane, code), np.searchsorted(self.lane, code, side="right")
            if high == low:
                continue
            at = low + np.searchsorted(self.start_ns[low:high], time_ns[ask], side="right") - 1
            inside = (at >= low) & (time_ns[ask] < self.end_ns[np.maximum(at, low)])
            out[ask[inside]] = self.row[at[inside]]
        return out


def spans_of(events: Events, mask: BoolArray) -> Spans:
    """The outermost of the masked events as look-up intervals."""
    rows = outermost(events, np.flatnonzero(mask & (events.ts_ns != TIME_UNKNOWN)))
    return Spans(rows, events.lane[rows].astype(np.int32), events.ts_ns[rows], events.end_ns[rows])


def op_spans(events: Events) -> Spans:
    """The outermost operators of each thread."""
    return spans_of(events, events.in_cats(*OP_CATS))


def layers_at(draft: Draft, events: Events, lane: Int32Array, time_ns: IntArray) -> Int32Array:
    """Layer code (index into the draft's layers) of the outermost module active on `lane` at each time, -1 without."""
    mask = events.in_cats(*ANNOTATION_CATS, *PYTHON_CATS)
    found: dict[int, str] = {}
    for code in np.unique(events.name[mask]).tolist():
        match = _MODULE.search(events.strings[code])
        if match is not None:
            found[code] = match["module"] or match["path"]
    if not found:
        return np.full(len(lane), -1, np.int32)
    mask &= np.isin(events.name, list(found))
    row = spans_of(events, mask).at(lane, time_ns)
    table = np.full(len(events.strings), -1, np.int32)
    for code, path in found.items():
        table[code] = draft.layer(path)
    return np.where(row >= 0, table[events.name[np.maximum(row, 0)]], -1).astype(np.int32)


def gap_names(draft: Draft, events: Events, lane: Int32Array, time_ns: IntArray) -> Int32Array:
    """Names of stretches in which no operator runs: after the outermost annotation, where one says more than the step."""
    no_place = [code for code, text in enumerate(events.strings) if text.startswith(NO_PLACE)]
    mask = events.in_cats(*ANNOTATION_CATS) & ~np.isin(events.name, no_place)
    row = spans_of(events, mask).at(lane, time_ns)
    out = np.full(len(lane), draft.name(BETWEEN), np.int32)
    codes, inverse = np.unique(events.name[row[row >= 0]], return_inverse=True)
    if len(codes):
        ids = np.array([draft.name(f"{BETWEEN} in {events.strings[int(code)]}") for code in codes], np.int32)
        out[row >= 0] = ids[inverse]
    return out


def loader_spans(events: Events) -> Spans:
    """The time in which each thread fetches the next batch (`enumerate(DataLoader)#…`)."""
    codes = [code for code, text in enumerate(events.strings) if text.startswith(LOADER)]
    return spans_of(events, np.isin(events.name, codes) & events.in_cats(*OP_CATS, *ANNOTATION_CATS))


def thread_name(events: Events, lane: int) -> str:
    """How a thread's lane is called."""
    found = events.lanes[lane]
    return found.name or f"thread {found.tid}"


def step_of(time_ns: IntArray, steps: list[tuple[int, int, int]]) -> Int32Array:
    """Step number of each host time, -1 outside; `steps` holds (number, start_ns, end_ns)."""
    out = np.full(len(time_ns), -1, np.int32)
    for number, start, end in steps:
        out[(time_ns >= start) & (time_ns < end)] = number
    return out
