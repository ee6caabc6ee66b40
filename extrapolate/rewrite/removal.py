"""Turns a state into one without some of its nodes: single ones, or members of collectives and all that only served them.

What is taken out takes along the host work that only it needed: the calls that issued it, the waits for it, and the
wrappers of DTensor around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.rewrite.select import keep_nodes, spliced
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, GraphGroup, NodeKind

_CALL = re.compile(r"^(c10d|_c10d_functional)::")
_WRAPPER = re.compile(
    r"(^|: )_?(ToTorchTensor|FromTorchTensor|Redistribute|NestedRedistribute)(Backward)?$|^_c10d_functional::"
)


def without_nodes(state: State, drop: BoolArray) -> State:
    """The state without some nodes; collectives keep their numbers."""
    if not drop.any():
        return state
    keep = ~drop
    origin = np.flatnonzero(keep).astype(np.int32)
    anatomy = state.anatomy.moved(origin)
    if state.anatomy.entry is not None:
        anatomy = replace(anatomy, entry=state.anatomy.entry[origin])
    return replace(state, graph=keep_nodes(state.graph, keep), anatomy=anatomy, work=state.work.moved(origin))


def without_collectives(state: State, drop: BoolArray, *, wrappers: bool = False) -> State:
    """The state without some members of collectives (bool[n]), and without the host work that only served them.

    wrappers  DTensor's own host work goes too
    """
    if not drop.any():
        return state
    graph = state.graph
    drop = drop | orphans(graph, drop) | _calls(graph, drop, wrappers)
    origin = np.flatnonzero(~drop).astype(np.int32)
    anatomy = state.anatomy.moved(origin)
    if state.anatomy.entry is not None:
        anatomy = replace(anatomy, entry=state.anatomy.entry[origin])
    return replace(state, graph=spliced(graph, drop), anatomy=anatomy, work=state.work.moved(origin))


def orphans(graph: Graph, drop: BoolArray) -> BoolArray:
    """Hubs none of whose members stay."""
    hub = graph.kind == int(NodeKind.RENDEZVOUS)
    goes, stays = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    into = graph.edge_dst
    goes[into[hub[into] & drop[graph.pred]]] = True
    stays[into[hub[into] & ~drop[graph.pred]]] = True
    return np.asarray(hub & goes & ~stays, np.bool_)


def _calls(graph: Graph, drop: BoolArray, wrappers: bool) -> BoolArray:
    """Host work that only served what goes: the calls and launches that issued it and their stalls, the waits that
    awaited nothing else, and (`wrappers`) DTensor's own."""
    into = graph.edge_dst
    late = (graph.kind == int(NodeKind.STALL)) & _any(graph, graph.pred[drop[into]])
    late &= ~_any(graph, graph.pred[~drop[into]])
    host = np.isin(graph.kind, [int(NodeKind.HOST), int(NodeKind.LAUNCH)])
    call = _named(graph, _CALL) | (graph.kind == int(NodeKind.LAUNCH))
    issues = np.isin(graph.edge_kind, [int(EdgeKind.LAUNCH), int(EdgeKind.HAND_OVER)]) & (drop | late)[into]
    out = late | _any(graph, graph.pred[issues & (host & call)[graph.pred]])
    waits = np.isin(graph.kind, [int(NodeKind.WAIT), int(NodeKind.STALL)])
    foreign = (graph.edge_kind != int(EdgeKind.PROGRAM)) & waits[into]
    out |= waits & _any(graph, into[foreign & drop[graph.pred]]) & ~_any(graph, into[foreign & ~drop[graph.pred]])
    if wrappers:
        out |= (graph.kind == int(NodeKind.HOST)) & _named(graph, _WRAPPER)
    return np.asarray(out, np.bool_)


def _any(graph: Graph, nodes: Int32Array | IntArray) -> BoolArray:
    out = np.zeros(len(graph), np.bool_)
    out[nodes] = True
    return out


def _named(graph: Graph, pattern: re.Pattern[str]) -> BoolArray:
    return np.array([bool(pattern.search(name)) for name in graph.names] + [False], np.bool_)[graph.name]


def pruned(
    graph: Graph, lanes: Collection[str], is_name: Callable[[str], bool], is_group: Callable[[GraphGroup], bool]
) -> Graph:
    """The graph without the collectives, groups, lanes and names of an insertion that no node uses any more, as far as
    they come last; what the trace itself brought stays, used or not."""
    collectives = graph.collectives[: int(graph.instance.max(initial=-1)) + 1]
    kept_groups, kept_lanes, kept_names = list(graph.groups), list(graph.lanes), list(graph.names)
    held = max((item.group for item in collectives), default=-1)
    lane, name = int(graph.lane.max(initial=-1)), int(graph.name.max(initial=-1))
    while len(kept_groups) > held + 1 and is_group(kept_groups[-1]):
        kept_groups.pop()
    while len(kept_lanes) > lane + 1 and kept_lanes[-1].name in lanes:
        kept_lanes.pop()
    while len(kept_names) > name + 1 and is_name(kept_names[-1]):
        kept_names.pop()
    return replace(
        graph, collectives=collectives, groups=tuple(kept_groups), lanes=tuple(kept_lanes), names=tuple(kept_names)
    )
