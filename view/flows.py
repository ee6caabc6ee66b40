"""Turns a graph's edges into arrows between slices: launches, event waits, hand-overs, host syncs and rendezvous."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeKind, NodeKind
from scaletrace.view.layout import Rows
from scaletrace.view.sink import Flow

ARROWS = (EdgeKind.LAUNCH, EdgeKind.EVENT_WAIT, EdgeKind.HOST_SYNC, EdgeKind.HAND_OVER)
"""Edge kinds drawn as arrows. Program and stream order are plain to see, rendezvous has its own form."""


def edge_flows(rows: Rows, first_id: int) -> tuple[Flow, int, int]:
    """(flows, arrows, arrows left out): one id from `first_id` on for each edge whose ends are both drawn.

    An edge that would point back in time (a measured kernel that "starts" before its launch) is left out and counted.
    """
    graph = rows.variant.graph
    wanted = np.flatnonzero(np.isin(graph.edge_kind, np.array(ARROWS, np.uint8)))
    dst = rows.row_of[graph.edge_dst[wanted]]
    src = rows.row_of[graph.pred[wanted]]
    drawn = (src >= 0) & (dst >= 0) & (src != dst)
    src, dst = src[drawn], dst[drawn]
    begin, target = rows.start_ns[src], rows.start_ns[dst]
    forward = (begin < target) | ((begin == target) & (src < dst))
    src, dst = src[forward], dst[forward]
    ids = first_id + np.arange(len(src), dtype=np.int64)
    return _flow(np.concatenate([src, dst]), np.concatenate([ids, ids])), len(src), int(np.sum(~forward))


def rendezvous_flows(rows: Rows, first_id: int) -> tuple[Flow, int, int]:
    """(flows, arrows, ids used): the members of one instance share an id, so arrows lead from each to the next to arrive.

    The last arrow of a chain ends at the member that all others waited for.
    """
    graph = rows.variant.graph
    member = np.flatnonzero((graph.kind[rows.node] == NodeKind.TRANSFER) & (graph.instance[rows.node] >= 0))
    instance = graph.instance[rows.node[member]].astype(np.int64)
    count = np.bincount(instance, minlength=1)
    several = count[instance] > 1
    arrows = int(np.sum(np.maximum(count - 1, 0)))
    return _flow(member[several], first_id + instance[several]), arrows, len(count)


def join(*flows: Flow) -> Flow:
    """All flows in one, ascending by row."""
    return _flow(np.concatenate([f.rows for f in flows]), np.concatenate([f.ids for f in flows]))


def _flow(rows: IntArray, ids: IntArray) -> Flow:
    order = np.argsort(rows, kind="stable")
    return Flow(rows[order].astype(np.int64), ids[order].astype(np.int64))
