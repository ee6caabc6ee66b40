"""Turns a graph into segments: the stretches of a rank's program between the collectives that it issues.

Where a node belongs is decided in program order, by the host call that caused it, and not by when it ran: a kernel
that by chance ran after a collective was still issued before it on every rank.
"""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind


def causes(graph: Graph) -> IntArray:
    """The host node that launched or handed over each node, the node itself where it is one or has none; int64[n]."""
    out = np.arange(len(graph), dtype=np.int64)
    into = graph.edge_dst
    host = graph.nodes(NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT)
    stall = graph.nodes(NodeKind.STALL)
    links = (graph.edge_kind == EdgeKind.LAUNCH) | (graph.edge_kind == EdgeKind.HAND_OVER) | stall[graph.pred]
    links &= (host | stall)[graph.pred] & ~host[into] & (graph.rank[graph.pred] == graph.rank[into])
    for edge in (np.flatnonzero(links & stall[into]), np.flatnonzero(links & ~stall[into])):
        out[into[edge]] = out[graph.pred[edge]]
    return out


def segments(graph: Graph, within_steps: bool = False) -> Int32Array:
    """Number of collectives that a node's rank issued before it, int32[n]; within_steps: since its step began."""
    cause = causes(graph)
    out = np.zeros(len(graph), np.int32)
    arrive = graph.kind == NodeKind.ARRIVE
    key = graph.rank.astype(np.int64)
    if within_steps:
        key = key * (int(graph.step.max(initial=0)) + 2) + graph.step + 1
    for value in np.unique(key[arrive]):
        mine = np.flatnonzero(key == value)
        issued = np.sort(cause[mine[arrive[mine]]])
        out[mine] = np.searchsorted(issued, cause[mine], side="left")
    return out
