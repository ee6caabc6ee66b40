"""Turns one rank without a device (gloo, or no communication at all) into draft nodes and edges.

The main thread becomes a chain of operators and gaps, cut where it issues a collective and where it waits for one.
Spans of gloo lie on worker threads that take works in order; the recorded end of a span is the worker's, not the moment
at which the caller is released, so that a caller may go on up to milliseconds earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_threads import add_joins, add_side_ops, find_joins, side_ops
from scaletrace.parse.build_waits import Waits, Works, busiest_thread, find_waits, find_works
from scaletrace.parse.build_works import OWN_WAIT_NS, RankWorks, add_works, issue_edges, wait_edges
from scaletrace.parse.cats import OP_CATS
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import LOADER_WAIT, THREAD_WAIT, EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import gap_names, layers_at, loader_spans, outermost, spans_of, step_of, thread_name
from scaletrace.parse.job import Job, RankTrace


def add_cpu_rank(
    draft: Draft, job: Job, trace: RankTrace, shift_ns: int, instance_of: dict[int, int], health: Health
) -> RankWorks:
    """Add the main thread, the works, the operators of other threads, and the edges between them."""
    events, works = trace.events, find_works(job, trace)
    thread = busiest_thread(events, works.row)
    ops = side_ops(events, np.concatenate(([thread], works.lane)))
    waits = find_waits(events, works, thread)
    joins = find_joins(events, ops, thread, waits.to_ns)
    count = len(waits.to_ns)
    both = replace(
        waits,
        from_ns=np.concatenate((waits.from_ns, joins.from_ns)),
        to_ns=np.concatenate((waits.to_ns, joins.to_ns)),
    )
    steps = [(s.number, s.start_ns, s.end_ns) for s in trace.steps]
    points = _host_points(events, works, both, thread, steps)
    first = draft.count
    names = ["wait for communication"] * count + [LOADER_WAIT if one else THREAD_WAIT for one in joins.loading.tolist()]
    host_ids, wait_ids = _add_main(draft, trace, points, both, names, thread, steps, shift_ns)
    main = np.arange(first, draft.count, dtype=np.int32)
    arrive, transfer = add_works(draft, trace, works, steps, instance_of, shift_ns)
    issue_edges(draft, works, arrive, transfer, points, host_ids)
    wait_edges(draft, works, waits, transfer, wait_ids, health)
    node = add_side_ops(draft, trace, ops, main, shift_ns, health)
    add_joins(draft, ops, joins, node, wait_ids[count:], health)
    return RankWorks(trace.rank, works, arrive, transfer, waits.hidden)


def _host_points(
    events: Events, works: Works, waits: Waits, thread: int, steps: list[tuple[int, int, int]]
) -> IntArray:
    """Moments at which the main thread is cut: operators, issues, waits, fetches of batches and step boundaries."""
    ops = events.in_cats(*OP_CATS) & (events.lane == thread) & (events.ts_ns != TIME_UNKNOWN)
    ops[works.row] = False
    rows = outermost(events, np.flatnonzero(ops))
    bounds = [time for _, start, end in steps for time in (start, end)]
    fetch = loader_spans(events)
    parts = (
        events.ts_ns[rows],
        events.end_ns[rows],
        works.issue_ns,
        waits.from_ns,
        waits.to_ns,
        np.array(bounds, np.int64),
        fetch.start_ns[fetch.lane == thread],
        fetch.end_ns[fetch.lane == thread],
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


def _wait_names(draft: Draft, chain: _Chain, names: list[str]) -> Int32Array:
    """Name code of each WAIT node; of several waits that end at once the last one's."""
    out = np.full(len(chain.waiting), -1, np.int32)
    inside = np.flatnonzero(chain.of_wait >= 0)
    out[np.searchsorted(chain.waiting, chain.of_wait[inside])] = [draft.name(names[at]) for at in inside.tolist()]
    return out


def _add_main(
    draft: Draft,
    trace: RankTrace,
    points: IntArray,
    waits: Waits,
    names: list[str],
    thread: int,
    steps: list[tuple[int, int, int]],
    shift_ns: int,
) -> tuple[Int32Array, Int32Array]:
    """Nodes between the points, in one chain; returns the node that ends at each point and the WAIT of each wait.

    names: what each wait is called. The first point gets an ORIGIN, so that what is issued there need not wait for the
    stretch after it.
    """
    events = trace.events
    none = np.full(len(waits.to_ns), -1, np.int32)
    if not len(points):
        return none[:0], none
    if len(points) == 1:
        lane = draft.lane(trace.rank, thread_name(events, thread), False) if thread >= 0 else -1
        return _add_origin(draft, trace.rank, lane, int(step_of(points, steps)[0]), int(points[0]) + shift_ns), none
    chain = _chain(points, waits)
    count, waiting = len(chain.at), chain.waiting
    row = _operators(events, thread, chain.at)
    row = np.where(row >= 0, row, loader_spans(events).at(np.full(count, thread, np.int32), chain.at))
    name = draft.name_codes(events.strings, np.where(row >= 0, events.name[np.maximum(row, 0)], -1))
    between = np.flatnonzero(row < 0)
    name[between] = gap_names(draft, events, np.full(len(between), thread, np.int32), chain.at[between])
    step = step_of(chain.at, steps)
    layer = layers_at(draft, events, np.full(count, thread, np.int32), chain.at)
    order = np.argsort(np.concatenate((np.arange(count) * 2, waiting * 2 + 1)), kind="stable")
    wait_kind, wait_name = np.full(len(waiting), int(NodeKind.WAIT)), _wait_names(draft, chain, names)

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
