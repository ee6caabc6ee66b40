"""Turns an FSDP graph into an HSDP one of a single replica: every scattered gradient is all-reduced over replicas.

The all-reduces run on a stream of their own, behind the scatter whose result they carry and one after the other; what
waited for the scatter waits for them too. With one replica they move nothing, so the graph replays as before, and
rewrite.data.resize then makes replicas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.rewrite.removal import pruned, without_nodes
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import (
    NO_RELEASE,
    EdgeKind,
    EdgeSource,
    Graph,
    GraphCollective,
    GraphGroup,
    GraphLane,
    NodeKind,
    edges_by_destination,
)

LANE, NAME = "all-reduce over replicas", "all_reduce (HSDP)"


def replicate(graph: Graph) -> Graph:
    """The graph with an all-reduce in a dp group of one behind each reduce-scatter of an fsdp group."""
    scatters = _scatters(graph)
    if not len(scatters):
        return graph
    groups = (*graph.groups, GraphGroup("dp", 1, _shards(graph)))
    sources = [graph.collectives[graph.instance[node]] for node in scatters]
    items = tuple(
        GraphCollective("all_reduce", len(graph.groups), each.bytes_out, each.bytes_out, each.dtype) for each in sources
    )
    instance = np.arange(len(items), dtype=np.int32) + len(graph.collectives)
    ranks = graph.rank[scatters]
    lanes = {int(rank): len(graph.lanes) + i for i, rank in enumerate(np.unique(ranks))}
    # Two new nodes behind each scatter; old nodes move up by twice the scatters before them.
    position = np.arange(len(graph), dtype=np.int64) + 2 * np.searchsorted(scatters, np.arange(len(graph)), side="left")
    arrive = position[scatters] + 1
    transfer = arrive + 1
    total = len(graph) + 2 * len(scatters)
    new: dict[str, npt.NDArray[Any]] = {
        "dur_ns": np.zeros(len(scatters), np.int64),
        "release_ns": np.full(len(scatters), NO_RELEASE, np.int64),
        "rank": ranks,
        "lane": np.array([lanes[int(rank)] for rank in ranks], np.int32),
        "name": np.full(len(scatters), len(graph.names), np.int32),
        "step": graph.step[scatters],
        "event": np.full(len(scatters), -1, np.int32),
        "instance": instance,
    }
    columns: dict[str, Any] = {
        name: _woven(getattr(graph, name), value, position, arrive, transfer) for name, value in new.items()
    }
    kind = np.empty(total, np.uint8)
    kind[position], kind[arrive], kind[transfer] = graph.kind, int(NodeKind.ARRIVE), int(NodeKind.TRANSFER)
    extra: dict[str, Any] = {
        name: _woven(getattr(graph, name), np.full(len(scatters), missing, np.int32), position, arrive, transfer)
        for name, missing in (("blocks", 0), ("layer", -1))
        if len(getattr(graph, name))
    }
    edges = edges_by_destination(total, *_edges(graph, scatters, position, arrive, transfer))
    return replace(
        graph,
        **columns,
        **extra,
        kind=kind,
        pred_ptr=edges[0],
        pred=edges[1],
        lag_ns=edges[2],
        edge_kind=edges[3],
        edge_source=edges[4],
        names=(*graph.names, NAME),
        lanes=(*graph.lanes, *(GraphLane(rank, LANE, _on_device(graph, rank)) for rank in lanes)),
        groups=groups,
        collectives=(*graph.collectives, *items),
    )


def with_replicas(state: State) -> State:
    """All-reduces over one replica behind the scatters; the nodes that were there keep their order."""
    graph = replicate(state.graph)
    new = _inserted(graph)
    origin = np.where(new, -1, np.cumsum(~new) - 1).astype(np.int32)
    entry = state.anatomy.entry
    if entry is not None:
        entry = np.where(new[:, None], [-1, 0, 0], entry[np.maximum(origin, 0)])
    anatomy = replace(state.anatomy.moved(origin), entry=entry)
    return replace(state, graph=graph, anatomy=anatomy, work=state.work.moved(origin))


def without_replicas(state: State) -> State:
    """The state without what `with_replicas` put in."""
    own = _inserted(state.graph)
    if not own.any():
        return state
    out = without_nodes(state, own)
    return replace(out, graph=pruned(out.graph, (LANE,), NAME.__eq__, lambda group: group.axis == "dp"))


def _inserted(graph: Graph) -> BoolArray:
    return np.asarray(np.array([lane.name == LANE for lane in graph.lanes] + [False], np.bool_)[graph.lane], np.bool_)


def _shards(graph: Graph) -> int:
    return max((group.size for group in graph.groups if group.axis == "fsdp"), default=1)


def _scatters(graph: Graph) -> IntArray:
    """TRANSFER nodes of reduce-scatters in fsdp groups, ascending."""
    wanted = [
        item.kind == "reduce_scatter" and item.group >= 0 and graph.groups[item.group].axis == "fsdp"
        for item in graph.collectives
    ]
    of_node = np.array([*wanted, False], np.bool_)[graph.instance]
    return np.flatnonzero((graph.kind == NodeKind.TRANSFER) & of_node)


def _woven(
    old: npt.NDArray[Any], new: npt.NDArray[Any], position: IntArray, arrive: IntArray, transfer: IntArray
) -> npt.NDArray[Any]:
    """One column with the old values at their new positions and the new ones at both of theirs."""
    out = np.empty(len(position) + 2 * len(arrive), old.dtype)
    out[position], out[arrive], out[transfer] = old, new, new
    return out


def _on_device(graph: Graph, rank: int) -> bool:
    return any(lane.is_device for lane in graph.lanes if lane.rank == rank)


def _edges(
    graph: Graph, scatters: IntArray, position: IntArray, arrive: IntArray, transfer: IntArray
) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Source, destination, lag, kind and source of knowledge of all edges: the old ones, and those of the new nodes."""
    into: Int32Array = graph.edge_dst
    index = np.full(len(graph), -1, np.int64)
    index[scatters] = np.arange(len(scatters))
    # Who waits for a scatter, other than the next collective on its own stream, waits for the all-reduce too.
    waits = (index[graph.pred] >= 0) & (graph.kind[into] != NodeKind.ARRIVE) & (graph.kind[into] != NodeKind.TRANSFER)
    order = np.lexsort((scatters, graph.rank[scatters]))
    same = graph.rank[scatters[order[1:]]] == graph.rank[scatters[order[:-1]]]
    pieces = [
        (position[graph.pred], position[into], graph.lag_ns, graph.edge_kind),
        (position[scatters], arrive, 0, int(EdgeKind.EVENT_WAIT)),
        (arrive, transfer, 0, int(EdgeKind.STREAM)),
        (transfer[order[:-1]][same], arrive[order[1:]][same], 0, int(EdgeKind.STREAM)),
        (transfer[index[graph.pred[waits]]], position[into[waits]], graph.lag_ns[waits], graph.edge_kind[waits]),
    ]
    lengths = [len(piece[0]) for piece in pieces]
    src, dst = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    lag = np.concatenate([np.broadcast_to(np.asarray(p[2], np.int64), n) for p, n in zip(pieces, lengths, strict=True)])
    kind = np.concatenate(
        [np.broadcast_to(np.asarray(p[3], np.uint8), n) for p, n in zip(pieces, lengths, strict=True)]
    )
    known = np.full(len(src), int(EdgeSource.REWRITE), np.uint8)
    known[: len(graph.pred)] = graph.edge_source
    return src, dst, lag, kind, known
