"""Turns one rank's collectives into works, and the idle stretches of its main thread into waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.cats import ANNOTATION_CATS, DEVICE_CATS, OP_CATS, RUNTIME_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.job import Job, RankTrace

BLOCKED_NS = 60_000
EARLY_BLOCKED_NS = 300_000
EARLY_NS = 9_000_000
LATE_RELEASE_NS = 1_500_000
LATE_SHARE, EARLY_SHARE = 0.1, 0.25
"""Of the blocked stretch: where ranks outnumber cores, whoever waits or notes an end stands in a queue for milliseconds."""
ON_MAIN_NS = 30_000


@dataclass(frozen=True, slots=True)
class Works:
    """The collectives of one rank in order of issue (w rows): the span that carries the time and the issuing call.

    issue_ns  start of the issuing call (of the span where no call is known);  on_main bool: the span lies on the
    calling thread, where it ends when the caller has waited
    """

    member: Int32Array
    row: Int32Array
    issue_ns: IntArray
    start_ns: IntArray
    end_ns: IntArray
    lane: Int32Array
    on_main: BoolArray
    kind: npt.NDArray[np.uint8]


def find_works(job: Job, trace: RankTrace) -> Works:
    """The works of one rank from the job's table of collectives: those that a span on a thread of the host carries."""
    table, events = job.collectives, trace.events
    mine = np.flatnonzero((table.rank == trace.rank) & (table.event >= 0))
    if len(mine):
        mine = mine[~events.in_cats(*DEVICE_CATS)[table.event[mine]]]
    row, host = table.event[mine], table.host_event[mine]
    start = events.ts_ns[row]
    issue = np.where(host >= 0, events.ts_ns[np.maximum(host, 0)], start)
    order = np.lexsort((row, np.minimum(issue, start)))
    mine, row, host, start, issue = mine[order], row[order], host[order], start[order], issue[order]
    caller = np.where(host >= 0, events.lane[np.maximum(host, 0)], busiest_thread(events) if len(mine) else -1)
    return Works(
        mine.astype(np.int32),
        row.astype(np.int32),
        np.minimum(issue, start),
        start,
        events.end_ns[row],
        events.lane[row].astype(np.int32),
        events.lane[row] == caller,
        table.kind[mine],
    )


def calling_thread(events: Events, job: Job, works: Works) -> int:
    """The lane from which most works are issued; the busiest thread where no call is known."""
    host = job.collectives.host_event[works.member]
    lanes = events.lane[host[host >= 0]]
    return int(np.bincount(lanes).argmax()) if len(lanes) else busiest_thread(events, works.row)


def busiest_thread(events: Events, without: IntArray | Int32Array | None = None) -> int:
    """The lane with most operators, -1 without any; rows `without` do not count."""
    ops = events.in_cats(*OP_CATS) & (events.ts_ns != TIME_UNKNOWN)
    if without is not None:
        ops[without] = False
    counts = np.bincount(events.lane[ops], minlength=1)
    return int(counts.argmax()) if counts.sum() else -1


@jit
def _leaves(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Cut a thread at every start and end: (from, to, innermost interval or -1); intervals sorted by (start, longest)."""
    n = len(start)
    stack, top = np.empty(n + 1, np.int64), 0
    at, to, inner = np.empty(2 * n + 1, np.int64), np.empty(2 * n + 1, np.int64), np.empty(2 * n + 1, np.int64)
    count = 0
    now = start[0] if n else 0
    i = 0
    while i < n or top > 0:
        closing = end[stack[top - 1]] if top > 0 else np.iinfo(np.int64).max
        opening = start[i] if i < n else np.iinfo(np.int64).max
        moment = min(closing, opening)
        if moment > now:
            at[count], to[count] = now, moment
            inner[count] = stack[top - 1] if top > 0 else -1
            count += 1
            now = moment
        if closing <= opening:
            top -= 1
        else:
            stack[top] = i
            top += 1
            i += 1
    return at[:count], to[:count], inner[:count]


@jit
def _match_waits(
    at: IntArray, to: IntArray, idle: BoolArray, issue: IntArray, start: IntArray, end: IntArray, on_main: BoolArray
) -> tuple[IntArray, IntArray, BoolArray]:
    """Which leaf of the main thread each work was awaited in (-1 none), the binding work of each leaf, and early ones.

    A leaf in which nothing runs and that is long enough waits for the work whose end fits its end best; a work that
    ends later than the leaf counts where the leaf is long (the caller is released before the worker notes the end).
    A span on the main thread itself ends exactly where the caller has waited for it.
    """
    waited = np.full(len(issue), -1, np.int64)
    binding = np.full(len(at), -1, np.int64)
    early = np.zeros(len(at), np.bool_)
    low = 0
    for i in range(len(at)):
        if not idle[i] or to[i] - at[i] <= BLOCKED_NS:
            continue
        while low < len(issue) and waited[low] >= 0:
            low += 1
        best = -1
        for w in range(low, len(issue)):
            if issue[w] > at[i] + 1000:
                break
            ends = at[i] - 5000 <= end[w] <= to[i] + 1000 and (not on_main[w] or abs(end[w] - to[i]) <= ON_MAIN_NS)
            if waited[w] < 0 and ends and (best < 0 or end[w] > end[best]):
                best = w
        if best >= 0 and to[i] - end[best] > max(LATE_RELEASE_NS, LATE_SHARE * (to[i] - at[i])):
            best = -1
        if best < 0 and to[i] - at[i] > EARLY_BLOCKED_NS:
            for w in range(low, len(issue)):
                if issue[w] > at[i] + 1000:
                    break
                open_end = (
                    waited[w] < 0
                    and not on_main[w]
                    and to[i] < end[w] <= to[i] + max(EARLY_NS, EARLY_SHARE * (to[i] - at[i]))
                )
                if open_end and start[w] < to[i] and (best < 0 or end[w] > end[best]):
                    best = w
            early[i] = best >= 0
        if best < 0:
            continue
        binding[i] = best
        for w in range(low, len(issue)):
            if issue[w] > at[i] + 1000:
                break
            if waited[w] < 0 and end[w] <= end[best] and (not on_main[w] or abs(end[w] - to[i]) <= ON_MAIN_NS):
                waited[w] = i
    return waited, binding, early


@dataclass(frozen=True, slots=True)
class Waits:
    """Moments at which the main thread waited: [from, to) of the blocked stretch (empty where it didn't block).

    work, point  int32 pairs: work w was awaited at point p
    hidden       bool[w]: the caller did not block for the work, so that its span ends when somebody looked
    """

    from_ns: IntArray
    to_ns: IntArray
    work: Int32Array
    point: Int32Array
    hidden: BoolArray


def idle_leaves(
    events: Events, thread: int, without: IntArray | Int32Array
) -> tuple[IntArray, IntArray, BoolArray, IntArray]:
    """A thread cut at every start and end: (from, to, whether nothing works there, innermost row or -1).

    Annotations and the calls of collectives do not work: inside them a thread may stand still. `without`: rows left out.
    """
    mask = events.in_cats(*OP_CATS, *ANNOTATION_CATS, *RUNTIME_CATS)
    mask &= (events.lane == thread) & (events.ts_ns != TIME_UNKNOWN)
    mask[without] = False
    rows = np.flatnonzero(mask)
    rows = rows[np.lexsort((-events.end_ns[rows], events.ts_ns[rows]))]
    at, to, inner = _leaves(events.ts_ns[rows], _nest(events.ts_ns[rows], events.end_ns[rows]))
    quiet = np.array([text.startswith(("c10d", "_c10d")) for text in events.strings], np.bool_)
    row = np.where(inner >= 0, rows[np.maximum(inner, 0)], -1) if len(rows) else inner
    idle = (row < 0) | events.in_cats(*ANNOTATION_CATS)[row] | quiet[events.name[row]]
    idle |= np.isin(row, _callers(events, rows[quiet[events.name[rows]]], rows)) & (row >= 0)
    return at, to, idle, row


def _callers(events: Events, calls: IntArray, rows: IntArray) -> IntArray:
    """Of `rows` (one thread, by start) the functions of the user's own that call a collective: there they may wait for
    it, as Megatron's tensor-parallel functions do. Operators of PyTorch only issue."""
    own = np.array(
        [not text.startswith(("aten::", "c10d", "_c10d")) and "AccumulateGrad" not in text for text in events.strings],
        np.bool_,
    )
    outer = rows[own[events.name[rows]] & events.in_cats(*OP_CATS)[rows]]
    begins = np.sort(events.ts_ns[calls])
    inside = np.searchsorted(begins, events.end_ns[outer]) > np.searchsorted(begins, events.ts_ns[outer])
    return np.asarray(outer[inside], np.int64)


def find_waits(events: Events, works: Works, thread: int) -> Waits:
    """Where the main thread waited for which works; every span on the main thread ends in a wait by definition."""
    at, to, idle, _ = idle_leaves(events, thread, works.row)
    at, to, idle = _cut_at(at, to, idle, works.end_ns[works.on_main])
    waited, _, _ = _match_waits(at, to, idle, works.issue_ns, works.start_ns, works.end_ns, works.on_main)
    leaf = np.unique(waited[waited >= 0])
    point_of = np.full(len(at), -1, np.int32)
    point_of[leaf] = np.arange(len(leaf), dtype=np.int32)
    blocked = np.flatnonzero(waited >= 0)
    lone = np.flatnonzero((waited < 0) & works.on_main)
    from_ns = np.concatenate((at[leaf], works.end_ns[lone]))
    to_ns = np.concatenate((to[leaf], works.end_ns[lone]))
    point = np.concatenate((point_of[waited[blocked]], len(leaf) + np.arange(len(lone), dtype=np.int32)))
    hidden = (waited < 0) & works.on_main
    return Waits(from_ns, to_ns, np.concatenate((blocked, lone)).astype(np.int32), point.astype(np.int32), hidden)


@jit
def _nest(start: IntArray, end: IntArray) -> IntArray:
    """Ends clipped to the enclosing interval's, so that the intervals nest."""
    out = end.copy()
    stack, top = np.empty(len(start) + 1, np.int64), 0
    for i in range(len(start)):
        while top > 0 and out[stack[top - 1]] <= start[i]:
            top -= 1
        if top > 0:
            out[i] = min(out[i], out[stack[top - 1]])
        stack[top] = i
        top += 1
    return out


def _cut_at(at: IntArray, to: IntArray, idle: BoolArray, cuts: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
    """Leaves split at further moments."""
    cuts = np.unique(cuts)
    points = np.union1d(np.concatenate((at, to)), cuts)
    if len(points) < 2:
        return at, to, idle
    new_at, new_to = points[:-1], points[1:]
    index = np.clip(np.searchsorted(at, new_at, side="right") - 1, 0, max(len(at) - 1, 0))
    inside = (new_at >= at[index]) & (new_to <= to[index]) if len(at) else np.zeros(len(new_at), np.bool_)
    return new_at, new_to, np.where(inside, idle[index], True)
