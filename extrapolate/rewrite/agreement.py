"""Turns an anatomy into one in which all members of a collective work for the same phase, unit and micro batch.

Each rank's nodes are placed by the moments of its own threads, so that a collective at the seam of two units may lie
before it on one rank and behind it on another. Laid anew it would fall apart: its members meet only in copies of one
piece.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.layers import Phase
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.parse.health import Health

ISSUES = (int(EdgeKind.HAND_OVER), int(EdgeKind.LAUNCH))


def agreed(graph: Graph, anatomy: Anatomy) -> Anatomy:
    """The anatomy in which the members of a collective, and the calls that issue them, stand where most members do.

    Of as many, a place in forward or backward wins over none. How many collectives were moved together is counted.
    """
    place = np.stack([anatomy.phase, anatomy.unit, anatomy.micro_batch], axis=1).astype(np.int64)
    instance, chosen = _chosen(graph, anatomy, place)
    if not len(chosen):
        return anatomy
    member = np.flatnonzero(np.isin(graph.instance, instance))
    into = chosen[np.searchsorted(instance, graph.instance[member])]
    differs = (place[member] != place[into]).any(axis=1)
    member, into = member[differs], into[differs]
    of_node = np.full(len(graph), -1, np.int64)
    of_node[member] = into
    calls = np.array([name.startswith("c10d") for name in graph.names] + [False], np.bool_)[graph.name]
    dst = graph.edge_dst
    edge = np.isin(graph.edge_kind, ISSUES) & (of_node[dst] >= 0) & calls[graph.pred]
    edge &= graph.rank[graph.pred] == graph.rank[dst]
    of_node[graph.pred[edge]] = of_node[dst[edge]]
    moved = np.flatnonzero(of_node >= 0)
    place[moved] = place[of_node[moved]]
    health = Health()
    health.add(anatomy.health)
    health.guessed["collectives whose members lay in different units (taken as in most members')"] += len(chosen)
    return replace(
        anatomy,
        phase=place[:, 0].astype(np.uint8),
        unit=place[:, 1].astype(np.int32),
        micro_batch=place[:, 2].astype(np.int32),
        health=health,
    )


def _chosen(graph: Graph, anatomy: Anatomy, place: IntArray) -> tuple[IntArray, IntArray]:
    """(instances whose members differ, ascending; for each a node that stands where most of them do)."""
    nodes = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0) & ~anatomy.is_message)
    _, code = np.unique(place[nodes], axis=0, return_inverse=True)
    frame = pd.DataFrame({"instance": graph.instance[nodes], "code": code.reshape(-1), "node": nodes})
    count = frame.groupby(["instance", "code"], sort=True)["node"].agg(["size", "first"]).reset_index()
    split = count[count.duplicated("instance", keep=False)]
    inside = np.isin(anatomy.phase[split["first"]], [int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.RECOMPUTE)])
    best = split.assign(inside=inside).sort_values(["instance", "size", "inside"], kind="stable")
    best = best.drop_duplicates("instance", keep="last")
    return best["instance"].to_numpy(np.int64), best["first"].to_numpy(np.int64)
