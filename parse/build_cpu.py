"""Turns one rank without a device (gloo, or no communication at all) into draft nodes and edges.

The main thread becomes a chain of operators and gaps, cut where it issues a collective and where it waits for one.
Spans of gloo lie on worker threads that take works in order; the recorded end of a span is the worker's, not the moment
at which the caller is released, so that a caller may go on up to milliseconds earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_waits import Waits, Works, busiest_thread, find_waits, find_works
from scaletrace.parse.cats import OP_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import gap_names, layers_at, outermost, spans_of, step_of, thread_name
from scaletrace.parse.job import Job, RankTrace

OWN_WAIT_NS = 20_000
TICK_NS = 1_000


@dataclass(frozen=True, slots=True)
class RankCpu:
    """What later stages need of one rank: for each work its member row, its nodes, and whether its wait was hidden."""

    rank: int
    works: Works
    arrive: Int32Array
    transfer: Int32Array
    hidden: BoolArray


def add_cpu_rank(
    draft: Draft, job: Job, trace: RankTrace, shift_ns: int, instance_of: dict[int, int], health: Health
) -> RankCpu:
    """Add the main thread, the works and the edges between them; operators of other threads are counted, not added."""
    events, works = trace.events, find_works(job, trace)
    thread = busiest_thread(events, works.row)
    beside = events.in_cats(*OP_CATS) & ~np.isin(events.lane, [thread, *np.unique(works.lane).tolist()])
    if beside.any():
        health.dropped["operators on threads beside the main one"] += int(beside.sum())
    waits = find_waits(events, works, thread)
    steps = [(s.number, s.start_ns, s.end_ns) for s in trace.steps]
    points = _host_points(events, works, waits, thread, steps)
    host_ids, wait_ids = _add_main(draft, trace, points, waits, thread, steps, shift_ns)
    arrive, transfer = _add_works(draft, trace, works, waits, steps, instance_of, shift_ns, health)
    _issue_edges(draft, works, arrive, transfer, points, host_ids)
    _wait_edges(draft, works, waits, transfer, wait_ids, health)
    return RankCpu(trace.rank, works, arrive, transfer, waits.hidden)


def _host_points(
    events: Events, works: Works, waits: Waits, thread: int, steps: list[tuple[int, int, int]]
) -> IntArray:
    """Moments at which the main thread is cut: operators, issues, waits and step boundaries."""
    ops = events.in_cats(*OP_CATS) & (events.lane == thread) & (events.ts_ns != TIME_UNKNOWN)
    ops[works.row] = False
    rows = outermost(events, np.flatnonzero(ops))
    bounds = [time for _, start, end in steps for time in (start, end)]
    parts = (
        events.ts_ns[rows],
        events.end_ns[rows],
        works.issue_ns,
        waits.from_ns,
        waits.to_ns,
        np.array(bounds, np.int64),
    )
    return np.unique(np.concatenate(parts))


@dataclass(frozen=True, slots=True)
class _Chain:
    """The main thread between the points: stretches, which of them were blocked, and which end in a wait."""

    at: IntArray
    to: IntArray
    dur: IntArray
    waiting: IntArray
    of_wait: IntArray


def _chain(points: IntArray, waits: Waits) -> _Chain:
    """A blocked stretch keeps a short time of its own; the rest is for the awaited works to explain."""
    at, to = points[:-1], points[1:]
    of_wait = np.searchsorted(points, waits.to_ns) - 1
    blocked = np.zeros(len(at), np.bool_)
    blocked[of_wait[waits.from_ns < waits.to_ns]] = True
    dur = np.where(blocked, np.minimum(to - at, OWN_WAIT_NS), to - at)
    return _Chain(at, to, dur, np.unique(of_wait[of_wait >= 0]), of_wait)


def _operators(events: Events, thread: int, at: IntArray) -> IntArray:
    """Row of the operator that each stretch lies in: a communicating one where there is, else the outermost; or -1."""
    ops = events.in_cats(*OP_CATS) & (events.lane == thread)
    lane = np.full(len(at), thread, np.int32)
    row = spans_of(events, ops).at(lane, at)
    fine = spans_of(events, ops & _communicates(events)).at(lane, at)
    return np.where(fine >= 0, fine, row)


def _add_origin(draft: Draft, rank: int, lane: int, step: int, begin_ns: int) -> Int32Array:
    """The first moment of a thread, which what is issued there depends on."""
    name = draft.name("start of the window")
    where = {"rank": rank, "lane": lane, "name": name, "step": step}
    return draft.add_nodes(
        1, kind=int(NodeKind.ORIGIN), release_ns=begin_ns, start_ns=begin_ns, end_ns=begin_ns, **where
    )


def _add_main(
    draft: Draft,
    trace: RankTrace,
    points: IntArray,
    waits: Waits,
    thread: int,
    steps: list[tuple[int, int, int]],
    shift_ns: int,
) -> tuple[Int32Array, Int32Array]:
    """Nodes between the points, in one chain; returns the node that ends at each point and the WAIT of each wait.

    The first point gets an ORIGIN, so that what is issued there need not wait for the stretch after it.
    """
    events = trace.events
    if len(points) < 2:
        return np.full(len(points), -1, np.int32), np.full(len(waits.to_ns), -1, np.int32)
    chain = _chain(points, waits)
    count, waiting = len(chain.at), chain.waiting
    row = _operators(events, thread, chain.at)
    name = draft.name_codes(events.strings, np.where(row >= 0, events.name[np.maximum(row, 0)], -1))
    between = np.flatnonzero(row < 0)
    name[between] = gap_names(draft, events, np.full(len(between), thread, np.int32), chain.at[between])
    step = step_of(chain.at, steps)
    layer = layers_at(draft, events, np.full(count, thread, np.int32), chain.at)
    order = np.argsort(np.concatenate((np.arange(count) * 2, waiting * 2 + 1)), kind="stable")
    wait_kind, wait_name = np.full(len(waiting), int(NodeKind.WAIT)), draft.name("wait for communication")

    def both(host: IntArray | Int32Array, wait: Any) -> npt.NDArray[Any]:
        return np.concatenate((host, np.broadcast_to(wait, (len(waiting),))))[order]

    lane = draft.lane(trace.rank, thread_name(events, thread), False)
    origin = _add_origin(draft, trace.rank, lane, int(step[0]), int(chain.at[0]) + shift_ns)
    ids = draft.add_nodes(
        count + len(waiting),
        dur_ns=both(chain.dur, 0),
        kind=both(np.full(count, int(NodeKind.HOST)), wait_kind),
        rank=trace.rank,
        lane=lane,
        name=both(name, wait_name),
        step=both(step, step[waiting]),
        layer=both(layer, layer[waiting]),
        event=both(row, -1),
        start_ns=both(chain.at, chain.to[waiting]) + shift_ns,
        end_ns=both(chain.at + chain.dur, chain.to[waiting]) + shift_ns,
    )
    draft.add_edges(np.concatenate((origin, ids[:-1])), ids, 0, EdgeKind.PROGRAM, EdgeSource.ORDER)
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    wait_node = np.full(count, -1, np.int32)
    wait_node[waiting] = ids[back[count:]]
    last = np.where(wait_node >= 0, wait_node, ids[back[:count]])
    of_wait = np.where(chain.of_wait >= 0, wait_node[np.maximum(chain.of_wait, 0)], -1)
    return np.concatenate((origin, last)).astype(np.int32), of_wait.astype(np.int32)


def _communicates(events: Events) -> BoolArray:
    names = np.array([text.startswith(("c10d", "_c10d")) for text in events.strings], np.bool_)
    return names[events.name]


def _add_works(
    draft: Draft,
    trace: RankTrace,
    works: Works,
    waits: Waits,
    steps: list[tuple[int, int, int]],
    instance_of: dict[int, int],
    shift_ns: int,
    health: Health,
) -> tuple[Int32Array, Int32Array]:
    """ARRIVE and TRANSFER of each work on the lane of its worker (of the caller, apart, for point-to-point)."""
    events, count = trace.events, len(works.row)
    lanes = {
        int(code): draft.lane(trace.rank, thread_name(events, int(code)), False)
        for code in np.unique(works.lane[~works.on_main])
    }
    if works.on_main.any():
        lanes[-1] = draft.lane(trace.rank, "point to point", False)
    lane = np.array(
        [lanes[-1 if main else int(code)] for code, main in zip(works.lane, works.on_main, strict=True)], np.int32
    )
    name = draft.name_codes(events.strings, events.name[works.row])
    instance = np.array([instance_of.get(int(row), -1) for row in works.row], np.int32)
    common = {
        "rank": trace.rank,
        "lane": lane,
        "name": name,
        "step": step_of(works.issue_ns, steps),
        "event": works.row,
    }
    start, end = works.start_ns + shift_ns, works.end_ns + shift_ns
    arrive = draft.add_nodes(
        count, kind=int(NodeKind.ARRIVE), start_ns=start, end_ns=start, instance=instance, **common
    )
    transfer = draft.add_nodes(
        count,
        kind=int(NodeKind.TRANSFER),
        dur_ns=end - start,
        start_ns=start,
        end_ns=end,
        instance=instance,
        **common,
    )
    draft.add_edges(arrive, transfer, 0, EdgeKind.STREAM, EdgeSource.ORDER)
    return arrive, transfer


def _issue_edges(
    draft: Draft, works: Works, arrive: Int32Array, transfer: Int32Array, points: IntArray, ends_at: Int32Array
) -> None:
    """From the issuing call to the work at one latency, and from a worker's last work to its next at one gap."""
    if not len(works.row) or not len(points):
        return
    order = np.lexsort((works.start_ns, works.lane))
    order = order[~works.on_main[order]]
    a, b = order[:-1], order[1:]
    same = (works.lane[a] == works.lane[b]) & (works.start_ns[b] >= works.end_ns[a] - TICK_NS)
    a, b = a[same], b[same]
    before = np.full(len(works.row), np.iinfo(np.int64).min)
    before[b] = works.end_ns[a]
    idle = before <= works.issue_ns
    delay = works.start_ns - works.issue_ns
    lag = np.zeros(len(delay), np.int64)
    for group in (works.on_main, ~works.on_main):
        usable = group & idle
        if group.any():
            lag[group] = int(np.median(delay[usable])) if usable.any() else int(np.median(delay[group]))
    at = np.searchsorted(points, works.issue_ns)
    lag = np.minimum(lag, delay)
    draft.add_edges(ends_at[at], arrive, lag, EdgeKind.HAND_OVER, EdgeSource.MATCH)
    gap = works.start_ns[b] - works.end_ns[a]
    queued = ~idle[b]
    typical = int(np.median(gap[queued])) if queued.any() else 0
    draft.add_edges(transfer[a], arrive[b], np.minimum(typical, gap), EdgeKind.STREAM, EdgeSource.ORDER)


def _wait_edges(
    draft: Draft, works: Works, waits: Waits, transfer: Int32Array, wait_ids: Int32Array, health: Health
) -> None:
    """From a work to the wait that it released: one lag for all, or its own negative one where it was released early."""
    if not len(waits.work):
        return
    after = waits.to_ns[waits.point] - works.end_ns[waits.work]
    latest = np.full(len(waits.to_ns), np.iinfo(np.int64).min)
    np.maximum.at(latest, waits.point, works.end_ns[waits.work])
    binds = works.end_ns[waits.work] == latest[waits.point]
    lag = np.zeros(len(after), np.int64)
    main = works.on_main[waits.work]
    for group in (main, ~main):
        usable = group & binds & (after >= 0)
        lag[group] = int(np.median(after[usable])) if usable.any() else 0
    early = after < 0
    if early.any():
        health.guessed["waits released before the recorded end of their span"] += int(early.sum())
    draft.contradict(EdgeSource.WORK_WAIT, len(after), 0)
    draft.add_edges(
        transfer[waits.work], wait_ids[waits.point], np.minimum(lag, after), EdgeKind.EVENT_WAIT, EdgeSource.WORK_WAIT
    )
