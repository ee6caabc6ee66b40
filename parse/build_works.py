"""Turns the works that a rank hands to other threads (collectives of gloo) into nodes, and into edges from and to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.build_draft import Draft
from scaletrace.parse.build_waits import Waits, Works
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.host import step_of, thread_name
from scaletrace.parse.job import RankTrace

OWN_WAIT_NS = 20_000
TICK_NS = 1_000


@dataclass(frozen=True, slots=True)
class RankWorks:
    """What later stages need of one rank's works: for each its member row, its nodes, and whether its wait was hidden."""

    rank: int
    works: Works
    arrive: Int32Array
    transfer: Int32Array
    hidden: BoolArray


def add_works(
    draft: Draft,
    trace: RankTrace,
    works: Works,
    steps: list[tuple[int, int, int]],
    instance_of: dict[int, int],
    shift_ns: int,
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


def issue_edges(
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


def wait_edges(
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
