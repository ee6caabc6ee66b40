"""Turns a graph into the graph of some of its ranks, or with one node inserted behind another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind, edges_by_destination


def keep_nodes(graph: Graph, keep: BoolArray) -> Graph:
    """The graph of the nodes in `keep` (bool[n]) and the edges among them; ids stay in order."""
    position = np.cumsum(keep, dtype=np.int64) - 1
    dst = graph.edge_dst
    edges = np.flatnonzero(keep[graph.pred] & keep[dst])
    ptr, pred, lag, kind, source = edges_by_destination(
        int(keep.sum()),
        position[graph.pred[edges]],
        position[dst[edges]],
        graph.lag_ns[edges],
        graph.edge_kind[edges],
        graph.edge_source[edges],
    )
    columns = {
        name: getattr(graph, name)[keep]
        for name in ("dur_ns", "release_ns", "kind", "rank", "lane", "name", "step", "event", "instance")
    }
    optional = {name: getattr(graph, name)[keep] for name in ("blocks", "layer") if len(getattr(graph, name))}
    return replace(
        graph, **columns, **optional, pred_ptr=ptr, pred=pred, lag_ns=lag, edge_kind=kind, edge_source=source
    )


def spliced(graph: Graph, drop: BoolArray) -> Graph:
    """The graph without some nodes, where what followed one on its thread or stream follows what came before it.

    The time between the two is the gap that stood before the first node dropped.
    """
    into = graph.edge_dst
    chain = np.isin(graph.edge_kind, [int(EdgeKind.PROGRAM), int(EdgeKind.STREAM)])
    before: dict[int, list[tuple[int, int]]] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    touched = chain & (drop[graph.pred] | drop[into]) & (graph.rank[graph.pred] == graph.rank[into])
    for edge in np.flatnonzero(touched).tolist():
        src, dst, lag = int(graph.pred[edge]), int(into[edge]), int(graph.lag_ns[edge])
        sources = before.get(src, []) if drop[src] else [(src, lag)]
        if drop[dst]:
            before.setdefault(dst, []).extend(sources)
            continue
        rows += [(u, dst, gap, int(graph.edge_kind[edge]), int(graph.edge_source[edge])) for u, gap in sources]
    kept = ~drop[graph.pred] & ~drop[into]
    old = np.stack([graph.pred, into, graph.lag_ns, graph.edge_kind, graph.edge_source])[:, kept].astype(np.int64)
    edges = np.concatenate([old, np.array(rows, np.int64).reshape(-1, 5).T], axis=1)
    joined = edges_by_destination(len(graph), *edges)
    ptr, pred, lag_ns, kind, source = joined
    whole = replace(graph, pred_ptr=ptr, pred=pred, lag_ns=lag_ns, edge_kind=kind, edge_source=source)
    return keep_nodes(whole, ~drop)


def keep_ranks(graph: Graph, ranks: Iterable[int]) -> Graph:
    """The graph of some ranks; hubs stay where a member of theirs does."""
    keep = np.isin(graph.rank, np.fromiter(ranks, np.int32))
    hub = graph.kind == NodeKind.RENDEZVOUS
    keep &= ~hub
    into = graph.edge_dst
    fed = np.zeros(len(graph), np.bool_)
    fed[into[hub[into] & keep[graph.pred]]] = True
    return keep_nodes(graph, keep | (hub & fed))


def real_ranks(graph: Graph) -> list[int]:
    """Ranks that own a node other than a hub, ascending."""
    return [int(rank) for rank in np.unique(graph.rank[(graph.kind != NodeKind.RENDEZVOUS) & (graph.rank >= 0)])]
