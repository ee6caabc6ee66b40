"""Turns a graph into what each rank costs the others: the waits it caused, and the step without its delay.

Two questions, two ranks at times. Who was waited for is measured and answered by parse.stragglers, for `inspect` and
`replay` alike. What a rank's delay costs is replayed without it: little where another rank is as slow and sets the pace
then, much for one that nobody waited for where its work after the last collective ends the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaletrace.parse.build_stalls import TIME_SLICED
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.parse.job import Job
from scaletrace.parse.stragglers import steps_held, straggler_summary
from scaletrace.replay.align import pair, sequences, tokens
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay, replay_columns
from scaletrace.replay.timeline import Timeline

MOST_PEERS = 4
COLUMNS = 16
MOST_ASKED = 3
SHARED = "shares its device with another process"
SHARED_PART = 0.5
_OWN = (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.KERNEL, NodeKind.COPY)


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank: how long each of the others waited for it, and how much sooner the job would end at its peers' pace.

    caused_wait_ns  wall time during which another rank waited for this one, averaged over the other ranks; waits of one
                    rank that overlap (two collectives in flight) count once
    shorter_by_ns  makespan minus the makespan with this rank's own work no slower than the median of its peers'
    each_waited_ns, each_shorter_ns  the two a step, of those that the window holds (parse.stragglers.steps_held)
    cause          the verdict of parse.stragglers; "" where the rank stands out in nothing; SHARED where most of what the others
                    wait are stalls of a device that another process shares, which only the graph tells
    ends_last      whether the window ends with this rank's work
    then_rank      whose work leads most of the critical path once this rank keeps pace; -1 where it was not asked
    clock_doubt_ns  how far a measured wait may be off because of the clocks (parse.stragglers), None where nothing bounds it
    """

    rank: int
    caused_wait_ns: int
    shorter_by_ns: int
    each_waited_ns: int = 0
    each_shorter_ns: int = 0
    cause: str = ""
    ends_last: bool = False
    then_rank: int = -1
    clock_doubt_ns: int | None = 0

    def to_json(self) -> dict[str, Any]:
        """As in `replay --json`; then_rank is None where it was not asked."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return named | {"then_rank": self.then_rank if self.then_rank >= 0 else None}


def waits(timeline: Timeline) -> tuple[IntArray, IntArray]:
    """For each TRANSFER node how long its member waited for others (int64[n], 0 elsewhere), and the rank awaited (-1)."""
    graph, dst = timeline.graph, timeline.graph.edge_dst
    own = (graph.kind[graph.pred] == NodeKind.ARRIVE) & (graph.kind[dst] == NodeKind.TRANSFER)
    own &= graph.edge_kind == EdgeKind.STREAM
    waited, awaited = np.zeros(len(graph), np.int64), np.full(len(graph), -1, np.int64)
    node = dst[own]
    waited[node] = timeline.start_ns[node] - timeline.end_ns[graph.pred[own]]
    binding = timeline.binding[node].copy()
    hub = (binding >= 0) & (graph.kind[binding] == NodeKind.RENDEZVOUS)
    binding[hub] = timeline.binding[binding[hub]]
    late = (waited[node] > 0) & (binding >= 0)
    awaited[node[late]] = graph.rank[binding[late]]
    return waited, awaited


def stragglers(timeline: Timeline) -> list[Straggler]:
    """All ranks, the most costly first. With a single rank there is nobody to keep waiting: an empty list."""
    graph = timeline.graph
    ranks = np.unique(graph.rank[graph.lane >= 0]).tolist()
    if len(ranks) < 2:
        return []
    caused = caused_waits(timeline, ranks)
    paced = peers_pace(graph)
    shorter: dict[int, int] = {}
    for first in range(0, len(ranks), COLUMNS):
        some = ranks[first : first + COLUMNS]
        columns = np.stack([np.where(graph.rank == rank, paced, graph.dur_ns) for rank in some], axis=1)
        end = replay_columns(graph, columns).max(axis=0)
        for at, rank in enumerate(some):
            shorter[rank] = int(timeline.end_ns.max() - end[at])
    found = [Straggler(rank, caused[rank], shorter[rank]) for rank in ranks]
    return sorted(found, key=lambda s: (-s.shorter_by_ns, -s.caused_wait_ns, s.rank))


def judged(timeline: Timeline, job: Job) -> list[Straggler]:
    """`stragglers` with the waits and the verdict that were measured in the job, as `inspect` shows them."""
    found = stragglers(timeline)
    if not found:
        return []
    shares = {share.rank: share for share in straggler_summary(job)}
    steps = steps_held(job)
    graph = timeline.graph
    sliced = _time_sliced_ns(graph)
    last = int(graph.rank[np.argmax(np.where(graph.lane >= 0, timeline.end_ns, timeline.start_ns.min()))])
    out = []
    for one in found:
        share = shares.get(one.rank)
        each = share.caused_wait_ns // (len(found) - 1) if share else 0
        cause = share.cause if share else ""
        if cause and sliced.get(one.rank, 0) >= SHARED_PART * max(each, 1) * steps:
            cause = SHARED
        out.append(
            replace(
                one,
                caused_wait_ns=each * steps,
                each_waited_ns=each,
                each_shorter_ns=one.shorter_by_ns // steps,
                cause=cause,
                clock_doubt_ns=share.clock_doubt_ns if share else None,
            )
        )
    out = [replace(one, ends_last=one.rank == last) for one in out]
    asked = {out[0].rank, *(one.rank for one in out if one.cause)}
    asked = set(sorted(asked, key=lambda rank: [one.rank for one in out].index(rank))[:MOST_ASKED])
    out = [replace(one, then_rank=_leads(graph, one.rank)) if one.rank in asked else one for one in out]
    return sorted(out, key=lambda s: (-s.shorter_by_ns, -s.caused_wait_ns, s.rank))


def _time_sliced_ns(graph: Graph) -> dict[int, int]:
    """By rank the stalls of a device that another process shares (parse.build_stalls), ns of the window."""
    named = np.array([name == TIME_SLICED for name in graph.names] + [False], np.bool_)
    at = graph.nodes(NodeKind.STALL) & named[graph.name]
    return {int(rank): int(graph.dur_ns[at & (graph.rank == rank)].sum()) for rank in np.unique(graph.rank[at])}


def _leads(graph: Graph, rank: int) -> int:
    """The rank with most of the critical path where `rank` keeps the pace of its peers."""
    by_rank = critical_path(without_delay(graph, rank)).time_by("rank")
    return int(max(by_rank, key=lambda key: by_rank[key])) if by_rank else -1


def caused_waits(timeline: Timeline, ranks: list[int]) -> dict[int, int]:
    """For each rank, ns of wall time that another rank spent waiting for it, averaged over the other ranks."""
    waited, awaited = waits(timeline)
    nodes = np.flatnonzero(awaited >= 0)
    end = timeline.start_ns[nodes]
    start = end - waited[nodes]
    pair = awaited[nodes] * (int(max(ranks)) + 1) + timeline.graph.rank[nodes]
    order = np.lexsort((end, start, pair))
    start, end, pair = start[order], end[order], pair[order]
    caused = dict.fromkeys(ranks, 0)
    for code in np.unique(pair).tolist():
        low, high = np.searchsorted(pair, (code, code + 1))
        reached = np.maximum.accumulate(end[low:high])
        fresh = np.maximum(start[low + 1 : high], reached[:-1])
        length = int(end[low] - start[low]) + int(np.maximum(reached[1:] - fresh, 0).sum())
        caused[code // (int(max(ranks)) + 1)] += length
    return {rank: length // (len(ranks) - 1) for rank, length in caused.items()}


def peers_pace(graph: Graph) -> IntArray:
    """Durations with every node of a rank no longer than the median of its counterparts on other ranks, int64[n].

    Stalls shrink to the median share of stall of the other ranks. Nodes without a counterpart keep their durations.
    """
    pace, known = counterpart_pace(graph)
    return _pace_stalls(graph, np.where(known, np.minimum(graph.dur_ns, pace), graph.dur_ns))


def counterpart_pace(graph: Graph) -> tuple[IntArray, BoolArray]:
    """Median duration of each node's counterparts on the nearest other ranks, int64[n], and which nodes have any."""
    mark, parts = tokens(graph), sequences(graph)
    own = graph.nodes(*_OWN)
    lanes = lane_order(graph)
    by_place: dict[tuple[int, int], dict[int, Int32Array]] = {}
    for (rank, step, lane), nodes in parts.items():
        if lane >= 0:
            by_place.setdefault((step, lanes[lane]), {})[rank] = nodes
    out, found = graph.dur_ns.copy(), np.zeros(len(graph), np.bool_)
    for here in by_place.values():
        for rank, nodes in here.items():
            peers = [r for r in sorted(here, key=lambda r: (abs(r - rank), r)) if r != rank][:MOST_PEERS]
            if not peers:
                continue
            table = np.full((len(peers), len(nodes)), np.nan)
            for row, peer in enumerate(peers):
                at = pair(mark[nodes], mark[here[peer]])
                table[row, at >= 0] = graph.dur_ns[here[peer][at[at >= 0]]]
            known = np.isfinite(table).any(axis=0) & own[nodes]
            out[nodes[known]] = np.nanmedian(table[:, known], axis=0).astype(np.int64)
            found[nodes[known]] = True
    return out, found


def _pace_stalls(graph: Graph, dur_ns: IntArray) -> IntArray:
    stall = graph.nodes(NodeKind.STALL)
    ranks = np.unique(graph.rank[graph.lane >= 0])
    total = {int(r): int(graph.dur_ns[stall & (graph.rank == r)].sum()) for r in ranks}
    for rank, own in total.items():
        others = float(np.median([v for r, v in total.items() if r != rank])) if len(total) > 1 else own
        if own > others:
            mine = stall & (graph.rank == rank)
            dur_ns[mine] = (dur_ns[mine] * (others / own)).astype(np.int64)
    return dur_ns


def lane_order(graph: Graph) -> dict[int, int]:
    """A number for each lane that counterparts on other ranks share: device streams by name, threads by order."""
    names: dict[str, int] = {}
    out: dict[int, int] = {}
    seen: dict[int, int] = {}
    for at, lane in enumerate(graph.lanes):
        if lane.is_device:
            key = f"device {lane.name}"
        else:
            seen[lane.rank] = seen.get(lane.rank, 0) + 1
            key = f"host {seen[lane.rank]}"
        out[at] = names.setdefault(key, len(names))
    return out


def without_delay(graph: Graph, rank: int) -> Timeline:
    """The replay in which one rank keeps the pace of its peers."""
    return replay(graph, np.where(graph.rank == rank, peers_pace(graph), graph.dur_ns))
