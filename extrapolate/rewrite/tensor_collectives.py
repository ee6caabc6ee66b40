"""Turns a state into one with collectives of the tensor axis put between its nodes, or with all of them taken out.

A place lies between two nodes of the host; collectives of the other inner axes, which have a place in a chain of
kernels and shorten it, are put in by `insert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.extrapolate.rewrite.removal import pruned, without_collectives
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, told
from scaletrace.parse.events import BoolArray, Int32Array
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind

LANE, PREFIX = "tensor parallel", "tp "


class Place(NamedTuple):
    """Where a collective goes: behind one node, ahead of another (either may be absent), with the whole vector's bytes."""

    after: int | None
    before: int | None
    kind: str
    whole_bytes: int


def inserted(state: State, degree: int, places: Sequence[Place]) -> State:
    """One collective over `degree` tensor ranks at each place, costed on the state's network."""
    loom = reopen(state.graph, state.anatomy.exact_ns, state.anatomy.entry)
    index = next((at for at, group in enumerate(loom.groups) if group.axis == "tp"), len(loom.groups))
    loom.groups[index : index + 1] = [GraphGroup("tp", degree, 1, 1, "tp")]
    previous, moved = Place(None, None, "", 0), -1
    for place in places:
        # Several at one place follow each other.
        same = (place.after, place.before) == (previous.after, previous.before)
        previous, moved = place, _add(loom, state, place, index, moved if same else -1)
    woven = loom.finish()
    origin = woven.origin
    anatomy = replace(state.anatomy.moved(origin), exact_ns=woven.exact_ns, entry=woven.entry)
    out = replace(
        state,
        graph=replace(woven.graph, multiplicity=state.graph.multiplicity),
        anatomy=_placed(anatomy, woven.graph, origin),
        work=state.work.moved(origin),
    )
    return told(out, f"{len(places)} tensor collectives were inserted; their times are the cost model's.")


def _placed(anatomy: Anatomy, graph: Graph, origin: Int32Array) -> Anatomy:
    """Inserted nodes belong to the phase, unit and micro batch of what they stand behind, or else of what waits for them."""
    new = np.flatnonzero(origin < 0)
    like = np.arange(len(graph))
    like[new] = -1
    for node in new.tolist():
        before = graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]]
        like[node] = like[before[0]] if len(before) else -1
    if (like[new] < 0).any():
        behind: dict[int, int] = {}
        edges = np.flatnonzero(np.isin(graph.pred, new[like[new] < 0]))
        for src, dst in zip(graph.pred[edges].tolist(), graph.edge_dst[edges].tolist(), strict=True):
            behind.setdefault(src, dst)
        for node in new[like[new] < 0][::-1].tolist():
            like[node] = like[behind[node]] if node in behind else -1
    phase, unit, batch = anatomy.phase.copy(), anatomy.unit.copy(), anatomy.micro_batch.copy()
    at = new[like[new] >= 0]
    for column in (phase, unit, batch):
        column[at] = column[like[at]]
    return replace(anatomy, phase=phase, unit=unit, micro_batch=batch)


def followers(graph: Graph) -> dict[int, int]:
    """The next node on the same thread or stream."""
    dst = graph.edge_dst
    ordered = np.isin(graph.edge_kind, [int(EdgeKind.PROGRAM), int(EdgeKind.STREAM)])
    ordered &= graph.rank[graph.pred] == graph.rank[dst]
    same = ordered & (graph.lane[graph.pred] == graph.lane[dst])
    out = dict(zip(graph.pred[ordered].tolist(), dst[ordered].tolist(), strict=True))
    out.update(zip(graph.pred[same].tolist(), dst[same].tolist(), strict=True))
    return out


def _add(loom: Loom, state: State, place: Place, group: int, ahead: int) -> int:
    """One collective behind `place.after` (and the transfer `ahead`), for which `place.before` waits: its TRANSFER."""
    after, before, kind, whole = place
    node = after if after is not None else before
    if node is None:
        return -1
    degree, rank = loom.groups[group].size, int(state.graph.rank[node])
    gathers, scatters = kind == "all_gather", kind == "reduce_scatter"
    instance = len(loom.collectives)
    loom.collectives.append(
        GraphCollective(kind, group, whole // degree if gathers else whole, whole // degree if scatters else whole)
    )
    columns = {
        "rank": rank,
        "lane": loom.lane(rank, LANE, True),
        "name": loom.name(PREFIX + kind),
        "instance": instance,
        "step": int(state.graph.step[node]),
        "key": node,
    }
    seconds = state.network.seconds(kind, whole, degree, 1)
    arrive = loom.node(NodeKind.ARRIVE, **columns)
    transfer = loom.node(NodeKind.TRANSFER, dur_ns=round(seconds * 1e9), **columns)
    if after is not None:
        loom.edge(after, arrive, EdgeKind.EVENT_WAIT)
    loom.edge(arrive, transfer, EdgeKind.STREAM)
    if ahead >= 0:
        loom.edge(ahead, arrive, EdgeKind.STREAM)
    if before is not None:
        loom.edge(transfer, before, EdgeKind.EVENT_WAIT)
    return transfer


def without_tensor_collectives(state: State, where: BoolArray | None = None) -> State:
    """The state without the nodes of tensor collectives (`where` bool[n]: only of those nodes), their calls and waits."""
    graph = state.graph
    own = np.array([axis_of_item(item, graph.groups) == "tp" for item in graph.collectives] + [False], np.bool_)
    drop = own[graph.instance] & (True if where is None else where)
    out = without_collectives(state, np.asarray(drop, np.bool_), wrappers=where is None)
    return (
        replace(
            out,
            graph=pruned(out.graph, (LANE,), lambda name: name.startswith(PREFIX), lambda group: group.axis == "tp"),
        )
        if drop.any()
        else state
    )
