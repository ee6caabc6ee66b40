"""Turns a job that was laid into a pipeline back into the job that it was cut from, with what has changed since.

A cut loses what stages don't have: gathers that another pass made needless, waits for a layer that is elsewhere now, the
order in which ranks were numbered. So a laid state remembers its source and where each of its nodes comes from. Laying
it again starts from the source; times, shapes, bytes and groups that were changed in between are carried over node by
node. Where nodes or edges have come or gone since, the source no longer tells, and the laid graph itself is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.anatomy import MESSAGES
from scaletrace.extrapolate.kernels import Shape
from scaletrace.extrapolate.rewrite.state import Source, State, axis_of_item, cost_s, longer, scaled_bytes
from scaletrace.parse.events import Int32Array, IntArray
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind

Floats = np.typing.NDArray[np.float64]
Groups = tuple[GraphGroup, ...]


def relaid(state: State, lay: Callable[[State], State]) -> State:
    """What `lay` makes of the job that `state` was cut from (`state` itself, if it was not); it remembers that job.

    lay gets and returns a state; it may drop, add and reorder nodes in any way that keeps the column `layer` of a node.
    """
    source = uncut(state)
    n = len(source.graph)
    marked = replace(source, graph=replace(source.graph, layer=np.arange(n, dtype=np.int32)), source=None)
    laid = lay(marked)
    if laid.graph is marked.graph:
        return replace(laid, graph=source.graph, source=source.source)
    place = laid.graph.layer
    layer = source.graph.layer
    layer = np.where(place >= 0, layer[place], -1).astype(np.int32) if len(layer) else layer
    made = replace(laid, graph=replace(laid.graph, layer=layer), source=None)
    return replace(made, source=Source(source, made, place))


def uncut(state: State) -> State:
    """The job that a state was laid from, with what was changed since; the state itself where it was not laid, or where
    nodes or edges have changed since. Its layout is the source's in all that a pipeline decides."""
    source = state.source
    if source is None or not _same_structure(state.graph, source.made.graph):
        return state
    old, made = source.state, source.made
    now = state.layout
    layout = replace(
        now,
        pp=old.layout.pp,
        schedule=old.layout.schedule,
        chunks=old.layout.chunks,
        microbatches=old.layout.microbatches,
    )
    out = replace(
        old,
        layout=layout,
        network=state.network,
        ceilings=state.ceilings,
        error=state.error,
        routing=state.routing,
        health=old.health if state.health is made.health else state.health,
    )
    return out if _untouched(state, made) else _carried(out, state, source)


def _same_structure(one: Graph, other: Graph) -> bool:
    """Whether nodes, edges and members of collectives are the same, whatever they take."""
    if one is other:
        return True
    names = ("kind", "rank", "instance", "pred_ptr", "pred")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return same and len(one.collectives) == len(other.collectives) and len(one.groups) == len(other.groups)


def _untouched(state: State, made: State) -> bool:
    return (
        state.graph is made.graph
        and state.work is made.work
        and state.anatomy is made.anatomy
        and state.exact_bytes is made.exact_bytes
    )


def _carried(old: State, state: State, source: Source) -> State:
    """`old` with every change between source.made and state."""
    made, place = source.made, source.place
    items = _items(old.graph, made.graph, state.graph, place)
    groups = tuple(_group(*each) for each in zip(old.graph.groups, made.graph.groups, state.graph.groups, strict=False))
    groups += old.graph.groups[len(groups) :]
    exact = _exact(old, state, source, items, groups)
    boundary = old.anatomy.boundary_bytes
    if state.anatomy.boundary_bytes != made.anatomy.boundary_bytes > 0:
        boundary = round(boundary * state.anatomy.boundary_bytes / made.anatomy.boundary_bytes)
    parameters = state.anatomy.parameters
    if len(parameters) != len(old.anatomy.parameters) or np.array_equal(parameters, made.anatomy.parameters):
        parameters = old.anatomy.parameters
    return replace(
        old,
        graph=replace(
            old.graph,
            dur_ns=np.rint(exact).astype(np.int64),
            collectives=items,
            groups=groups,
            multiplicity=_multiplicity(old, made.graph.multiplicity, state.graph.multiplicity),
        ),
        anatomy=replace(old.anatomy, exact_ns=exact, boundary_bytes=boundary, parameters=parameters),
        work=replace(
            old.work,
            shape=_shapes(old.work.shape, made.work.shape, state.work.shape, place),
            weights=old.work.weights if state.work.weights == made.work.weights else state.work.weights,
        ),
        exact_bytes=np.zeros((0, 2)),
    )


def _exact(old: State, state: State, source: Source, items: Sequence[GraphCollective], groups: Groups) -> Floats:
    """Unrounded durations: each node by the ratio of its first copy, transfers without one, or of which that moves but a
    part, by that of their costs."""
    made, place = source.made, source.place
    before, after = made.anatomy.exact_ns, state.anatomy.exact_ns
    exact = old.anatomy.exact_ns.copy()
    copies = np.flatnonzero(place >= 0)[::-1]
    first = np.full(len(exact), -1, np.int64)
    first[place[copies]] = copies
    first[_divided(old.graph, made.graph, first)] = -1
    changed = np.flatnonzero((first >= 0) & (before[np.maximum(first, 0)] != after[np.maximum(first, 0)]))
    was, now = before[first[changed]], after[first[changed]]
    exact[changed] = np.where(was > 0, exact[changed] * now / np.where(was > 0, was, 1.0), now)
    left = (first < 0) & (old.graph.kind == int(NodeKind.TRANSFER)) & (old.graph.instance >= 0)
    nodes = np.flatnonzero(left)
    factor = np.ones(len(nodes))
    for number, at in enumerate(old.graph.instance[nodes].tolist()):
        one = cost_s(state.network, old.graph.collectives[at], old.graph.groups)
        factor[number] = cost_s(state.network, items[at], groups) / one if one > 0 else 1.0
    exact[nodes] = longer(old.anatomy, nodes, factor)
    return exact


def _divided(old: Graph, made: Graph, first: IntArray) -> IntArray:
    """Transfers of the source whose first copy moves but a part of what they do."""
    nodes = np.flatnonzero((first >= 0) & (old.kind == int(NodeKind.TRANSFER)) & (old.instance >= 0))
    pairs = zip(old.instance[nodes].tolist(), made.instance[first[nodes]].tolist(), strict=True)
    return nodes[[old.collectives[at] != made.collectives[copy] for at, copy in pairs]]


def _items(old: Graph, made: Graph, now: Graph, place: Int32Array) -> tuple[GraphCollective, ...]:
    """Collectives of the source: each as its copy is now; what was not laid as one of the same size is, or as others of
    its kind and group are where it has no like (buckets that stages cut anew, messages)."""
    if now.collectives == made.collectives:
        return old.collectives
    of_value: dict[GraphCollective, GraphCollective] = {}
    factor: dict[tuple[str, str], float] = {}
    for was, item in zip(made.collectives, now.collectives, strict=True):
        of_value.setdefault(was, item)
        if was.bytes_in > 0 and was != item:
            factor.setdefault(_sort(made, was), item.bytes_in / was.bytes_in)
    out = [
        of_value[item] if item in of_value else scaled_bytes(item, factor.get(_sort(old, item), 1.0))
        for item in old.collectives
    ]
    members = np.flatnonzero((place >= 0) & (now.instance >= 0))
    pairs: IntArray = np.stack([old.instance[place[members]], now.instance[members]], axis=1).astype(np.int64)
    for instance, copy in np.unique(pairs, axis=0)[::-1].tolist():
        if instance >= 0 and made.collectives[copy] == old.collectives[instance]:
            out[instance] = now.collectives[copy]
    return tuple(out)


def _sort(graph: Graph, item: GraphCollective) -> tuple[str, str]:
    """Axis and kind, by which collectives change together; all messages of a pipeline are of one kind."""
    axis = axis_of_item(item, graph.groups)
    return axis, "message" if item.kind in MESSAGES else item.kind


def _group(old: GraphGroup, made: GraphGroup, now: GraphGroup) -> GraphGroup:
    """A group of the source after a change of the laid one; a pipeline's own size is the source's."""
    if made == now:
        return old
    if old.axis == "pp":
        return replace(old, stride=max(1, old.stride * now.stride // max(1, made.stride)))
    return now


def _multiplicity(old: State, made: Int32Array, now: Int32Array) -> Int32Array:
    """How many ranks each of the source's stands for; stages of one column stand for as many."""
    count = old.graph.multiplicity
    if np.array_equal(made, now) or not len(now) or not made.sum():
        return count
    count = count if len(count) else np.ones(sum(map(len, old.columns)), np.int32)
    grown = np.rint(count * (int(now.sum()) / int(made.sum())))
    return np.asarray(np.maximum(1, grown), np.int32)


def _shapes(
    old: Sequence[Shape | None], made: Sequence[Shape | None], now: Sequence[Shape | None], place: Int32Array
) -> tuple[Shape | None, ...]:
    out = list(old)
    if now is not made:
        for node, at in enumerate(place.tolist()):
            if at >= 0 and now[node] != made[node]:
                out[at] = now[node]
    return tuple(out)
