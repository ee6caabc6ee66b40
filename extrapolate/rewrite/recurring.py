"""Turns an anatomy into one in which collectives that no recorded call issued stand where their like in other steps do.

A window that opens in the middle of a step has kernels whose launches came before it, and profilers lose some. Such a
kernel follows what ran before it on its stream, whatever that was; but a step repeats itself, so the collective in the
same place of another step, or of another rank, says what it works for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.parse.health import Health

Place = tuple[int, int, int]
"""Phase, unit and micro batch."""


def like_other_steps(graph: Graph, anatomy: Anatomy) -> Anatomy:
    """The anatomy with collectives without a launch, and the stalls ahead of them, placed as most of their like are.

    Alike are collectives in the same place of steps that run the same sequence of kinds, sizes and groups. How many
    were placed so is counted; what has no like with a launch stays as it is.
    """
    moves = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0) & ~anatomy.is_message)
    on_device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)[graph.lane[moves]]
    moves = moves[on_device]
    launched = _launched(graph)[moves]
    if launched.all():
        return anatomy
    place = np.stack([anatomy.phase, anatomy.unit, anatomy.micro_batch], axis=1).astype(np.int64)
    sequences = _sequences(graph, moves)
    votes: dict[tuple[object, ...], list[Counter[Place]]] = {}
    for key, members in sequences:
        counts = votes.setdefault(key, [Counter() for _ in members])
        for at, member in enumerate(members.tolist()):
            if launched[member]:
                phase, unit, batch = place[moves[member]].tolist()
                counts[at][phase, unit, batch] += 1
    changed = 0
    before = _before(graph)
    chosen = {key: _chosen(counts) for key, counts in votes.items()}
    for key, members in sequences:
        for at, member in enumerate(members.tolist()):
            most = chosen[key][at]
            if launched[member] or most is None:
                continue
            changed += tuple(place[moves[member]].tolist()) != most
            node = int(moves[member])
            while node >= 0:
                place[node] = most
                ahead = int(before[node])
                follows = ahead >= 0 and (
                    graph.kind[ahead] == int(NodeKind.STALL)
                    or (graph.kind[ahead] == int(NodeKind.ARRIVE) and graph.instance[ahead] == graph.instance[node])
                )
                node = ahead if follows else -1
    if not changed:
        return anatomy
    health = Health()
    health.add(anatomy.health)
    health.guessed["collectives without a recorded call, placed as in other steps"] += changed
    return replace(
        anatomy,
        phase=place[:, 0].astype(np.uint8),
        unit=place[:, 1].astype(np.int32),
        micro_batch=place[:, 2].astype(np.int32),
        health=health,
    )


def _chosen(counts: Sequence[Counter[Place]]) -> list[Place | None]:
    """Where most stand, place by place of a sequence; one that was launched nowhere stands as the one before it, else as
    the first behind it that was."""
    out = [max(count.items(), key=lambda pair: (pair[1], pair[0]))[0] if count else None for count in counts]
    known = next((place for place in out if place is not None), None)
    for at, place in enumerate(out):
        known = place or known
        out[at] = known
    return out


def _launched(graph: Graph) -> BoolArray:
    """Mask of transfers that a recorded call issued, they or their arrival."""
    out = np.zeros(len(graph), np.bool_)
    out[graph.edge_dst[graph.edge_kind == int(EdgeKind.LAUNCH)]] = True
    dst = graph.edge_dst
    own = (graph.kind[dst] == int(NodeKind.TRANSFER)) & (graph.kind[graph.pred] == int(NodeKind.ARRIVE))
    own &= graph.rank[dst] == graph.rank[graph.pred]
    out[dst[own]] |= out[graph.pred[own]]
    return out


def _sequences(graph: Graph, moves: IntArray) -> list[tuple[tuple[object, ...], IntArray]]:
    """(what a rank's step runs in order, positions in `moves`) of every rank and step."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, node in enumerate(moves.tolist()):
        found[int(graph.rank[node]), int(graph.step[node])].append(at)
    out: list[tuple[tuple[object, ...], IntArray]] = []
    for members in found.values():
        items = [graph.collectives[int(graph.instance[moves[at]])] for at in members]
        key = tuple((item.kind, item.bytes_in, item.bytes_out, item.group) for item in items)
        out.append((key, np.array(members, np.int64)))
    return out


def _before(graph: Graph) -> IntArray:
    """Node before each one on its lane, -1 = none; int64[n]."""
    out = np.full(len(graph), -1, np.int64)
    order = np.argsort(graph.lane, kind="stable")
    same = (graph.lane[order[1:]] == graph.lane[order[:-1]]) & (graph.lane[order[1:]] >= 0)
    out[order[1:][same]] = order[:-1][same]
    return out
