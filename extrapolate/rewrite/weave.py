"""Turns pieces of a graph, laid in a new order on new ranks, into another graph.

A piece is a set of nodes of one rank (one layer's forward of one micro batch, the optimizer, …). Edges inside a piece
are copied. The order of a thread or stream is laid anew along the new sequence, each piece keeping the lag with which it
followed its predecessor. Other edges between pieces are led to the copy with the same tag (micro batch), and members of
a collective meet again if they have the same tag and team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from scaletrace.extrapolate.rewrite.loom import DEFAULTS, NODE_COLUMNS, FloatArray, Loom, rows_of
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, EdgeSource, Graph, GraphLane, NodeKind

ORDERED = (int(EdgeKind.PROGRAM), int(EdgeKind.STREAM))


class Copy(NamedTuple):
    """One piece of the source laid on one new rank.

    team  collective members of one team meet (a pipeline stage);  tag  micro batch in the new step, -1 for none
    unit  what the copy stands for in the new model, -1 for none; weave itself does not read it
    """

    piece: int
    rank: int
    team: int = 0
    tag: int = -1
    unit: int = -1


@dataclass(frozen=True, slots=True)
class _Source:
    """The source graph with what is asked of it often.

    chain int32[n]; role int64[lanes + 1]: what a lane is on its rank (index into `roles`, names of the first rank), so
    that pieces of different ranks come to lie on one thread or stream
    """

    graph: Graph
    piece: Int32Array
    chain: Int32Array
    role: IntArray
    roles: tuple[tuple[str, bool], ...]
    dst: IntArray
    order: IntArray
    ptr: IntArray
    local: IntArray


def weave(
    graph: Graph,
    piece: Int32Array,
    ranks: Sequence[Sequence[Copy]],
    exact_ns: FloatArray | None = None,
    entry: IntArray | None = None,
) -> Loom:
    """Lay the copies of ranks[new rank] in order. `piece` int32[n]: the piece of each node, -1 = left out or a hub.

    exact_ns, entry: as an earlier weave gave them (Woven), so that rewrites back and forth lose nothing.
    """
    source = _prepare(graph, piece)
    copies = [copy for rank in ranks for copy in rank]
    table = np.array(copies, np.int64).reshape(-1, 5)
    size = np.diff(source.ptr)[table[:, 0]]
    base = np.concatenate([[0], np.cumsum(size)])
    copy = np.repeat(np.arange(len(copies)), size)
    origin = source.order[np.arange(base[-1]) - base[copy] + source.ptr[table[copy, 0]]]
    loom = _columns(source, table, copy, origin)
    if exact_ns is not None:
        loom.exact_ns = exact_ns[origin].copy()
    loom.edges.append(_inside(source, table, base))
    entries = _entries(source, entry)
    loom.entry = entries[origin]
    loom.edges.append(_along(source, loom, entries, origin, copy))
    across, lost = _across(source, table, base)
    loom.edges.append(across)
    _on_stream(source, loom, lost, table, base, origin, copy)
    _meet(source, loom, table, origin, copy)
    return loom


def _prepare(graph: Graph, piece: Int32Array) -> _Source:
    n = int(piece.max()) + 1 if len(piece) else 0
    order = np.argsort(piece, kind="stable")
    order = order[np.searchsorted(piece[order], 0) :]
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(piece[order], minlength=n), out=ptr[1:])
    local = np.full(len(graph), -1, np.int64)
    local[order] = np.arange(len(order)) - ptr[piece[order]]
    role, roles = _roles(graph)
    return _Source(graph, piece, _chains(graph, role), role, roles, graph.edge_dst.astype(np.int64), order, ptr, local)


def _roles(graph: Graph) -> tuple[IntArray, tuple[tuple[str, bool], ...]]:
    """Streams and lanes of communication are told by name, threads (whose names hold numbers of the process) by how
    many host nodes they have on their rank."""
    host = np.isin(graph.kind, [int(NodeKind.HOST), int(NodeKind.LAUNCH), int(NodeKind.WAIT)])
    steps = np.bincount(graph.lane[host] + 1, minlength=len(graph.lanes) + 1)[1:]
    names: dict[tuple[str, bool], int] = {}
    out = np.full(len(graph.lanes) + 1, -1, np.int64)
    threads: list[tuple[str, bool]] = []
    for rank in sorted({lane.rank for lane in graph.lanes}):
        mine = [code for code, lane in enumerate(graph.lanes) if lane.rank == rank]
        hosts = [code for code in mine if not graph.lanes[code].is_device and steps[code]]
        for place, code in enumerate(sorted(hosts, key=lambda code: -int(steps[code]))):
            if place == len(threads):
                threads.append((graph.lanes[code].name, False))
            out[code] = names.setdefault(threads[place], len(names))
        for code in set(mine) - set(hosts):
            out[code] = names.setdefault((graph.lanes[code].name, graph.lanes[code].is_device), len(names))
    return out, tuple(names)


def _chains(graph: Graph, role: IntArray) -> Int32Array:
    """Threads of control: lanes of a rank that PROGRAM edges join are one chain, streams stay their own (int32[n]).

    A chain is named by its lane of the lowest role.
    """
    parent = np.arange(len(graph.lanes) + 1)

    def find(lane: int) -> int:
        while parent[lane] != lane:
            lane = int(parent[lane])
        return lane

    dst = graph.edge_dst
    joins = graph.edge_kind == int(EdgeKind.PROGRAM)
    pairs = np.unique(np.stack([graph.lane[graph.pred[joins]], graph.lane[dst[joins]]], axis=1), axis=0)
    for a, b in pairs.tolist():
        if min(a, b) < 0 or graph.lanes[a].is_device or graph.lanes[b].is_device:
            continue
        if graph.lanes[a].rank == graph.lanes[b].rank:
            low, high = sorted((find(a), find(b)), key=lambda lane: int(role[lane]))
            parent[high] = low
    root = np.array([find(lane) for lane in range(len(graph.lanes))] + [-1], np.int32)
    return root[graph.lane]


def _columns(source: _Source, table: IntArray, copy: IntArray, origin: IntArray) -> Loom:
    graph = source.graph
    columns: dict[str, npt.NDArray[Any]] = {}
    for key in NODE_COLUMNS:
        values = getattr(graph, key)
        columns[key] = values[origin].copy() if len(values) == len(graph) else np.full(
            len(origin), DEFAULTS.get(key, -1), np.int32
        )  # fmt: skip
    columns["rank"] = table[copy, 1].astype(np.int32)
    pairs = np.stack([columns["rank"].astype(np.int64), source.role[graph.lane[origin]]], axis=1)
    distinct, code = np.unique(pairs, axis=0, return_inverse=True)
    lanes: list[GraphLane] = []
    of_code = np.full(len(distinct), -1, np.int32)
    for i, (rank, role) in enumerate(distinct.tolist()):
        if role >= 0:
            of_code[i] = len(lanes)
            lanes.append(GraphLane(rank, *source.roles[role]))
    columns["lane"] = of_code[code.reshape(-1)]
    host = source.chain[origin] >= 0
    main = _main_chains(source)
    host &= main[source.chain[origin]]
    first, last = np.full(len(table), -1, np.int32), np.full(len(table), -1, np.int32)
    at = np.flatnonzero(host)
    last[copy[at]] = at
    first[copy[at[::-1]]] = at[::-1]
    return Loom(
        columns, origin.astype(np.int32), copy.astype(np.int32), graph.dur_ns[origin].astype(np.float64),
        np.zeros((0, 3), np.int64), first, last, list(graph.names), lanes,
        list(graph.groups), [], graph.layers,
    )  # fmt: skip


def _main_chains(source: _Source) -> BoolArray:
    """Of every rank the chain that leads: on a device the stream with most kernel time, else the busiest thread."""
    graph = source.graph
    device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)
    out = np.zeros(len(graph.lanes) + 1, np.bool_)
    frame = pd.DataFrame(
        {
            "rank": graph.rank,
            "chain": source.chain,
            "kernel": (graph.kind == int(NodeKind.KERNEL)) & device[graph.lane],
            "host": np.isin(graph.kind, [int(NodeKind.HOST), int(NodeKind.LAUNCH), int(NodeKind.WAIT)]),
            "dur": graph.dur_ns,
        }
    )
    frame = frame[frame["chain"] >= 0]
    for what in ("host", "kernel"):
        busy = frame[frame[what]].groupby(["rank", "chain"])["dur"].sum()
        for rank, chains in busy.groupby(level="rank"):
            for other in frame.loc[frame["rank"] == rank, "chain"].unique().tolist():
                out[other] = False
            out[int(chains.index.get_level_values("chain")[int(np.argmax(chains.to_numpy()))])] = True
    return out


def _inside(source: _Source, table: IntArray, base: IntArray) -> npt.NDArray[np.int64]:
    """Edges within a piece, once for each of its copies."""
    graph, piece = source.graph, source.piece
    inner = np.flatnonzero(
        (piece[graph.pred] == piece[source.dst])
        & (piece[source.dst] >= 0)
        & (graph.edge_kind != int(EdgeKind.RENDEZVOUS))
    )
    of = piece[source.dst[inner]]
    inner = inner[np.argsort(of, kind="stable")]
    ptr = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=len(source.ptr) - 1))])
    size = np.diff(ptr)[table[:, 0]]
    copy = np.repeat(np.arange(len(table)), size)
    start = np.concatenate([[0], np.cumsum(size)])
    edge = inner[np.arange(start[-1]) - start[copy] + ptr[table[copy, 0]]]
    return rows_of(
        base[copy] + source.local[graph.pred[edge]],
        base[copy] + source.local[source.dst[edge]],
        graph.lag_ns[edge],
        graph.edge_kind[edge],
        graph.edge_source[edge],
    )


def _ordered(source: _Source) -> BoolArray:
    """Mask of the edges that only say which node comes next on a thread or stream."""
    graph = source.graph
    chain = source.chain
    same = (chain[graph.pred] == chain[source.dst]) & (chain[source.dst] >= 0)
    return np.asarray(same & np.isin(graph.edge_kind, ORDERED), np.bool_)


def _entries(source: _Source, known: IntArray | None) -> IntArray:
    """int64[n, 3]: lag, kind and source of the edge with which each node follows on its thread or stream."""
    graph = source.graph
    out = np.tile(np.array([-1, 0, 0], np.int64), (len(graph), 1)) if known is None else known.copy()
    edges = np.flatnonzero(_ordered(source))
    out[source.dst[edges]] = np.stack([graph.lag_ns[edges], graph.edge_kind[edges], graph.edge_source[edges]], axis=1)
    _default_entries(source, out)
    return out


def _along(source: _Source, loom: Loom, entries: IntArray, origin: IntArray, copy: IntArray) -> npt.NDArray[np.int64]:
    """The order of every thread and stream along the new sequence.

    A node that followed another piece's node further back (a transfer the transfer before it, past the next arrival)
    follows the last node of that kind.
    """
    graph = source.graph
    chain = source.role[source.chain[origin]]
    key = np.where(chain >= 0, loom.columns["rank"].astype(np.int64) * (len(source.roles) + 1) + chain, -1)
    ordered, leaves = _ordered(source), source.piece[graph.pred] != source.piece[source.dst]
    outside, inside = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    outside[source.dst[ordered & leaves]] = True
    inside[source.dst[ordered & ~leaves]] = True
    later = outside[origin]
    # A piece that was interrupted by others is in one stretch now, so its parts follow each other too.
    src, dst = _successive(key, copy, (outside & ~inside)[origin])
    later[dst] = False
    of_kind = np.where(key >= 0, key * len(NodeKind) + loom.columns["kind"], -1)
    more_src, more_dst = _successive(of_kind, copy, np.zeros(len(copy), np.bool_))
    chosen = later[more_dst]
    src, dst = np.concatenate([src, more_src[chosen]]), np.concatenate([dst, more_dst[chosen]])
    how = entries[origin[dst]]
    known = how[:, 0] >= 0
    return rows_of(src[known], dst[known], how[known, 0], how[known, 1], how[known, 2])


def _successive(key: IntArray, copy: IntArray, resumes: BoolArray) -> tuple[IntArray, IntArray]:
    """Pairs of neighbours with the same key (≥ 0) that come with different copies, or whose second resumes its piece."""
    order = np.argsort(key, kind="stable")
    order = order[np.searchsorted(key[order], 0) :]
    follows = key[order[1:]] == key[order[:-1]]
    follows &= (copy[order[1:]] != copy[order[:-1]]) | resumes[order[1:]]
    return order[:-1][follows], order[1:][follows]


def _default_entries(source: _Source, entries: IntArray) -> None:
    """The first node of a thread or stream had nothing before it; elsewhere it follows without a gap.

    Lanes on which most nodes do not wait for their predecessor (messages that overtake each other) stay unordered.
    """
    graph = source.graph
    nodes = np.flatnonzero((source.chain >= 0) & (source.piece >= 0))
    chains, at, count = np.unique(source.chain[nodes], return_index=True, return_counts=True)
    edges = np.flatnonzero(_ordered(source))
    tied = np.bincount(source.chain[np.unique(source.dst[edges])], minlength=len(graph.lanes) + 1)
    for chain, first, size in zip(chains.tolist(), nodes[at].tolist(), count.tolist(), strict=True):
        if entries[first, 0] < 0 and 2 * tied[chain] >= size - 1:
            on_device = graph.lanes[chain].is_device
            entries[first] = (0, int(EdgeKind.STREAM if on_device else EdgeKind.PROGRAM), int(EdgeSource.REWRITE))


def _across(source: _Source, table: IntArray, base: IntArray) -> tuple[npt.NDArray[np.int64], IntArray]:
    """Edges between pieces of a rank other than its order; and the (edge, copy) that found no source, int64[k, 2]."""
    graph, piece = source.graph, source.piece
    between = np.flatnonzero(
        (piece[graph.pred] != piece[source.dst])
        & (piece[graph.pred] >= 0)
        & (piece[source.dst] >= 0)
        & (graph.rank[graph.pred] == graph.rank[source.dst])
        & (graph.edge_kind != int(EdgeKind.RENDEZVOUS))
        & ~_ordered(source)
    )
    edges = pd.DataFrame({"edge": between, "from": piece[graph.pred[between]], "to": piece[source.dst[between]]})
    copies = pd.DataFrame(
        {"piece": table[:, 0], "rank": table[:, 1], "tag": table[:, 3], "copy": np.arange(len(table))}
    )
    wanted = edges.merge(copies, left_on="to", right_on="piece")
    rows = wanted.merge(copies, left_on=["from", "rank"], right_on=["piece", "rank"], suffixes=("", "_src"))
    rows = rows[rows["copy_src"] < rows["copy"]]
    score = np.where(rows["tag_src"] == rows["tag"], 2, np.where(rows["tag_src"] < 0, 1, 0))
    rows = rows.assign(score=score).sort_values(["edge", "copy", "score", "copy_src"], kind="stable")
    rows = rows.drop_duplicates(["edge", "copy"], keep="last")
    edge = rows["edge"].to_numpy()
    width = max(1, len(table))
    lost = ~np.isin(wanted["edge"] * width + wanted["copy"], rows["edge"] * width + rows["copy"])
    return rows_of(
        base[rows["copy_src"].to_numpy()] + source.local[graph.pred[edge]],
        base[rows["copy"].to_numpy()] + source.local[source.dst[edge]],
        graph.lag_ns[edge],
        graph.edge_kind[edge],
        graph.edge_source[edge],
    ), wanted.loc[lost, ["edge", "copy"]].to_numpy(np.int64)


def _on_stream(
    source: _Source,
    loom: Loom,
    lost: IntArray,
    table: IntArray,
    base: IntArray,
    origin: IntArray,
    copy: IntArray,
) -> None:
    """A wait for a node that is not on the new rank is one for its stream: the last node of its kind there before.

    What finds no such node either (a value that comes from another stage) is counted as dropped.
    """
    graph = source.graph
    if not len(lost):
        return
    edge, to = lost[:, 0], lost[:, 1]
    u = graph.pred[edge]
    slots = (len(source.roles) + 1) * len(NodeKind)

    def slot(rank: IntArray, chain_role: IntArray, kind: IntArray) -> IntArray:
        return np.asarray(rank * slots + (chain_role + 1) * len(NodeKind) + kind, np.int64)

    have = slot(
        loom.columns["rank"].astype(np.int64), source.role[source.chain[origin]], loom.columns["kind"].astype(np.int64)
    )
    want = slot(table[to, 1], source.role[source.chain[u]], graph.kind[u].astype(np.int64))
    order = np.lexsort((np.arange(len(have)), have))
    span = len(have) + 1
    at = np.searchsorted(have[order] * span + order, want * span + base[to]) - 1
    found = (at >= 0) & (have[order[np.maximum(at, 0)]] == want)
    loom.dropped = int((~found).sum())
    edge, to, at = edge[found], to[found], at[found]
    loom.edges.append(
        rows_of(
            order[at],
            base[to] + source.local[source.dst[edge]],
            graph.lag_ns[edge],
            graph.edge_kind[edge],
            graph.edge_source[edge],
        )
    )


def _meet(source: _Source, loom: Loom, table: IntArray, origin: IntArray, copy: IntArray) -> None:
    """New instances of the collectives, their rendezvous edges and hubs."""
    graph = source.graph
    member = np.flatnonzero(graph.instance[origin] >= 0)
    keys = np.stack([graph.instance[origin[member]], table[copy[member], 2], table[copy[member], 3]], axis=1)
    distinct, code = np.unique(keys, axis=0, return_inverse=True)
    loom.columns["instance"][member] = code.reshape(-1)
    loom.collectives.extend(graph.collectives[int(instance)] for instance in distinct[:, 0])
    new = pd.DataFrame({"node": origin[member], "code": code.reshape(-1), "new": member})
    hubs = _hubs(source, loom, distinct)
    nodes = pd.concat([new, hubs]) if len(hubs) else new
    met = np.flatnonzero(graph.edge_kind == int(EdgeKind.RENDEZVOUS))
    rows = pd.DataFrame({"edge": met, "src": graph.pred[met], "dst": source.dst[met]})
    rows = rows.merge(nodes, left_on="src", right_on="node")
    rows = rows.merge(nodes, left_on=["dst", "code"], right_on=["node", "code"], suffixes=("_src", "_dst"))
    edge = rows["edge"].to_numpy()
    loom.edges.append(
        rows_of(
            rows["new_src"].to_numpy(),
            rows["new_dst"].to_numpy(),
            graph.lag_ns[edge],
            graph.edge_kind[edge],
            graph.edge_source[edge],
        )
    )


def _hubs(source: _Source, loom: Loom, distinct: npt.NDArray[Any]) -> pd.DataFrame:
    """One new hub for each old hub and each new instance that it serves."""
    graph = source.graph
    hub = np.flatnonzero(graph.kind == int(NodeKind.RENDEZVOUS))
    first = graph.pred_ptr[hub]
    fed = first < graph.pred_ptr[hub + 1]
    hub, first = hub[fed], first[fed]
    serves = pd.DataFrame({"node": hub, "instance": graph.instance[graph.pred[first]]})
    codes = pd.DataFrame({"instance": distinct[:, 0], "code": np.arange(len(distinct))})
    rows = serves.merge(codes, on="instance")
    fresh = [
        loom.node(
            NodeKind.RENDEZVOUS,
            name=int(graph.name[node]),
            rank=int(graph.rank[node]),
            step=int(graph.step[node]),
            dur_ns=int(graph.dur_ns[node]),
        )
        for node in rows["node"].tolist()
    ]
    return rows.assign(new=fresh)[["node", "code", "new"]]
