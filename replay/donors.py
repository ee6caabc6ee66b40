"""Turns the other steps of a job into durations for the nodes of one step: from the same rank, and from its peers.

A rank's own other steps tell best how long it takes, if it is slow or fast by itself. Where it was only disturbed in them
(another process, a busy core, the collector of garbage) they mislead, and what its peers took, who do the same work, is as
good a guess. Which of the two it is shows in the phases of the steps: what is slow by itself is slow in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.replay.align import pair
from scaletrace.replay.stragglers import lane_order

PHASES = 4
"""Equal parts of a step, by number of operations, in which the paces of the ranks are compared."""
FEWEST_RANKS = 4
MOST_OWN_STEPS = 4
"""With more other steps than this a rank's own mean is steady enough, and the peers are not asked."""
MOST_PEERS, MOST_PEER_STEPS = 4, 2
ALIKE = 0.5
"""Share of a rank's host nodes that must have a counterpart on a peer, for the peer's times to stand in."""

Sequences = dict[tuple[int, int, int], Int32Array]
_HOST = (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT)


@dataclass(frozen=True, slots=True)
class Donated:
    """dur_ns int64[n, K]: durations from K other steps; found, common bool[n]: any, all of them have a counterpart."""

    dur_ns: IntArray
    found: BoolArray
    common: BoolArray


def from_other_steps(
    graph: Graph, mark: IntArray, parts: Sequences, mine: Sequences, others: list[int], own_ns: IntArray
) -> Donated:
    """What the nodes of `mine`, the sequences of one step, took in each of the steps `others` on the same rank.

    A node that one of them lacks takes the mean of those that have it, one that all lack keeps its own.
    """
    table = np.full((len(others), len(graph)), -1, np.int64)
    for (rank, _, lane), nodes in mine.items():
        for row, other in enumerate(others):
            donor = parts.get((rank, other, lane))
            if donor is not None:
                _take(graph, mark, table[row], nodes, donor)
    known = table >= 0
    count = known.sum(axis=0)
    mean = np.rint(np.where(known, table, 0).sum(axis=0) / np.maximum(count, 1)).astype(np.int64)
    rest = np.where(count > 0, mean, own_ns)
    dur_ns = np.ascontiguousarray(np.where(known, table, rest).T)
    return Donated(dur_ns, count > 0, known.all(axis=0) & (count > 0))


def _take(graph: Graph, mark: IntArray, row: IntArray, nodes: Int32Array, donor: Int32Array) -> float:
    """Copy the durations of counterparts into one row; returns the share of nodes that have one."""
    at = pair(mark[nodes], mark[donor])
    hit = at >= 0
    row[nodes[hit]] = graph.dur_ns[donor[at[hit]]]
    return float(hit.mean()) if len(hit) else 0.0


def from_peers(
    graph: Graph, mark: IntArray, parts: Sequences, mine: Sequences, others: list[int], own: Donated, weight: float
) -> IntArray:
    """Durations int64[n, C] in which every rank has the host times of a peer in another step, all of a peer together.

    Ranks are moved round by one, two, … places, so that what one rank took stays in the job, on another rank; the
    device's times stay the rank's own. No column where there are too few ranks, none does the same, or they have no
    weight. The nearest of `others`, which are the columns of `own`, donate.
    """
    ranks = sorted({rank for rank, _, _ in mine})
    if len(ranks) < FEWEST_RANKS or not weight:
        return np.zeros((len(graph), 0), np.int64)
    number = next(iter(mine))[1]
    order = lane_order(graph)
    place = {(rank, step, order[lane]): nodes for (rank, step, lane), nodes in parts.items() if lane >= 0}
    host = graph.nodes(*_HOST)
    columns = []
    for step in sorted(others, key=lambda step: (abs(step - number), step))[:MOST_PEER_STEPS]:
        for shift in range(1, min(len(ranks), MOST_PEERS + 1)):
            column = own.dur_ns[:, others.index(step)].copy()
            alike = False
            for (rank, _, lane), nodes in mine.items():
                peer = ranks[(ranks.index(rank) + shift) % len(ranks)]
                donor = place.get((peer, step, order[lane])) if lane >= 0 and host[nodes[0]] else None
                if donor is None:
                    continue
                moved = column.copy()
                if _take(graph, mark, moved, nodes, donor) >= ALIKE:
                    column, alike = moved, True
            if alike:
                columns.append(column)
    return np.stack(columns, axis=1) if columns else np.zeros((len(graph), 0), np.int64)


def peers_weight(graph: Graph, own: Donated) -> float:
    """How much the peers count beside a rank's own steps, from 0 to 1: the shrinkage of James and Stein.

    Each rank's pace in every phase of every donor step is a sample of it. Where ranks differ by less than the samples of
    one rank among each other, their differences say nothing about the next step.
    """
    ranks = np.unique(graph.rank[graph.lane >= 0])
    usable = own.common & graph.nodes(NodeKind.HOST, NodeKind.LAUNCH)
    if len(ranks) < FEWEST_RANKS or own.dur_ns.shape[1] > MOST_OWN_STEPS:
        return 0.0
    paces = []
    for rank in ranks.tolist():
        at = np.flatnonzero(usable & (graph.rank == rank))
        phase = np.arange(len(at)) * PHASES // max(len(at), 1)
        paces.append([np.bincount(phase, own.dur_ns[at, k], PHASES) for k in range(own.dur_ns.shape[1])])
    pace = np.array(paces, np.float64).reshape(len(ranks), -1)
    if not (pace > 0).all():
        return 0.0
    logs = np.log(pace)
    logs -= logs.mean(axis=0)
    samples = logs.shape[1]
    mean = logs.mean(axis=1)
    between = samples * float(mean @ mean) / (len(ranks) - 1)
    within = float(((logs - mean[:, None]) ** 2).sum()) / (len(ranks) - 1) / max(samples - 1, 1)
    if between <= 0:
        return 1.0 if within > 0 else 0.0
    return float(min(1.0, (len(ranks) - 3) / (len(ranks) - 1) * within / between))
