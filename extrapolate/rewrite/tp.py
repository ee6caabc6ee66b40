"""Turns a state into one with another degree of tensor parallelism, with or without sequence parallelism.

Column products lose columns, row products depth, attention heads, what lies between its width; norms and residuals stay
whole, or with sequence parallelism lose tokens. Collectives change group where there are some, are inserted where there
were none (behind each row product, and behind the backward of each group of column products), and leave with degree 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import Mark, NodeWork, Role, Weight
from scaletrace.extrapolate.rewrite.parameters import with_weights
from scaletrace.extrapolate.rewrite.state import (
    State,
    on_weights,
    passes,
    stretched,
    told,
)
from scaletrace.extrapolate.rewrite.tensor_collectives import Place, followers, inserted, without_tensor_collectives
from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import GraphGroup, NodeKind

GRADIENT_BYTES = 4
"""Gradients are kept in single precision."""
SPLIT = (Role.COLUMN, Role.ROW, Role.HEADS, Role.BETWEEN)


def tensor(state: State, degree: int, sequence_parallel: bool = False) -> State:
    """`degree` tensor ranks; the data axes keep their degrees, so the job grows or shrinks with it.

    Raises UsageError where heads or matrices do not divide, naming the dimension.
    """
    layout = state.layout
    if degree == layout.tp and sequence_parallel == layout.sp:
        return state
    if sequence_parallel and degree == 1:
        raise UsageError("sequence parallelism splits tokens over tensor ranks, and the degree is 1")
    _check(state.work, layout.tp, degree, layout.mbs)
    share = layout.tp / degree
    tokens = (layout.tp if layout.sp else 1) / (degree if sequence_parallel else 1)
    out = _split_compute(state, share, tokens)
    out = _split_parameters(out, share, degree)
    if degree == 1:
        out = without_tensor_collectives(out)
    elif layout.tp == 1 or sequence_parallel != layout.sp:
        out = _with_collectives(without_tensor_collectives(out), degree, sequence_parallel)
    return _spread(replace(out, layout=replace(layout, tp=degree, sp=sequence_parallel)), layout.tp, degree)


def _check(work: NodeWork, old: int, new: int, samples: int) -> None:
    seen = False
    for unit in work.weights:
        for weight in unit:
            if weight.role is Role.WHOLE or not weight.dims:
                continue
            seen = True
            size = weight.dims[0 if weight.role is Role.COLUMN else -1] * old
            if size % new:
                raise UsageError(
                    f"tp={new} does not divide a dimension of {size} (a {weight.role.name.lower()} matrix)"
                )
    # What an operator issues beside its work (launches, collectives) has its shape too, which no other batch changes.
    of_work = (work.shape[node] for node in np.flatnonzero(work.computes).tolist())
    for shape in dict.fromkeys(of_work):
        if shape is not None and shape.work is Work.ATTENTION:
            _check_heads(shape, old, new, samples)
    if not seen and not any(int(role) for role in work.role.tolist()):
        raise UsageError("no product of the layers could be told as column or row, so nothing can be split")


def _check_heads(shape: Shape, old: int, new: int, samples: int) -> None:
    """Whole heads of queries, and of keys and values, on every tensor rank."""
    known = samples > 0 and shape.batch % samples == 0
    heads = shape.batch * old / (samples if known else 1)
    what = "heads of attention" if known else "samples × heads of attention"
    for count, whose in ((heads, "queries"), (heads / shape.queries_per_key, "keys and values")):
        if count == int(count) and count % new:
            raise UsageError(f"tp={new} does not divide {count:.0f} {what} ({whose})")


def _split_compute(state: State, share: float, tokens: float) -> State:
    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        factor = tokens if role is Role.WHOLE else share
        if shape is None:
            return None, factor
        if role is Role.COLUMN and shape.work is Work.MATMUL:
            return shape.scaled(columns=share), share
        if role is Role.ROW and shape.work is Work.MATMUL:
            return shape.scaled(depth=share), share
        if role is Role.HEADS and shape.work is Work.ATTENTION:
            return shape.scaled(batch=share), share
        return (shape.scaled(rows=tokens) if role is Role.WHOLE else shape.scaled(columns=share)), factor

    layers = np.array([*state.anatomy.is_layer, False], np.bool_)[state.anatomy.unit]
    return stretched(state, stretch, passes(state) & layers & ~_on_whole_weights(state))


def _on_whole_weights(state: State) -> BoolArray:
    """Work on weights that are not split (norms), whatever the tokens."""
    return np.asarray(on_weights(state.graph) & (state.work.role == int(Role.WHOLE)), np.bool_)


def _split_parameters(state: State, share: float, degree: int) -> State:
    """Weights after the split, and groups that lie further apart."""
    weights = tuple(tuple(_divided(weight, share) for weight in unit) for unit in state.work.weights)
    groups = tuple(_wider(group, share, degree) for group in state.graph.groups)
    return with_weights(state, weights, share, groups)


def _divided(weight: Weight, share: float) -> Weight:
    dims = list(weight.dims)
    if weight.role is Role.COLUMN:
        dims[0] = round(dims[0] * share)
    elif weight.role is Role.ROW and len(dims) > 1:
        dims[-1] = round(dims[-1] * share)
    return Weight(tuple(dims), weight.role)


def _wider(group: GraphGroup, share: float, degree: int) -> GraphGroup:
    """Groups outside the tensor axis lie further apart, its own has the new size."""
    if group.axis == "tp":
        return replace(group, size=degree, stride=1)
    if group.axis == "world":
        return replace(group, size=max(1, round(group.size / share)))
    return replace(group, stride=max(1, round(group.stride / share)) if group.stride > 0 else group.stride)


def _with_collectives(state: State, degree: int, sequence_parallel: bool) -> State:
    """Collectives at the marks of NodeWork, one member each, since the other tensor ranks do the same."""
    behind = followers(state.graph)
    ahead = {after: before for before, after in behind.items()}
    reduces = "reduce_scatter" if sequence_parallel else "all_reduce"
    places: list[Place] = []
    for node in np.flatnonzero(state.work.mark).tolist():
        bits, shape = int(state.work.mark[node]), state.work.shape[node]
        if shape is None:
            continue
        if bits & Mark.AFTER_ROW:
            places.append(Place(node, behind.get(node), reduces, _moved_bytes(shape, shape.columns)))
        if bits & Mark.AFTER_COLUMN_BACKWARD:
            places.append(Place(node, behind.get(node), reduces, _moved_bytes(shape, shape.depth)))
        if sequence_parallel and bits & Mark.BEFORE_COLUMN:
            places.append(Place(ahead.get(node), node, "all_gather", _moved_bytes(shape, shape.depth)))
        if sequence_parallel and bits & Mark.BEFORE_ROW_BACKWARD:
            places.append(Place(ahead.get(node), node, "all_gather", _moved_bytes(shape, shape.columns)))
    if sequence_parallel:
        places += _norm_gradients(state, behind)
    if not places:
        return told(state, "No place for tensor collectives was found, so their cost is missing.")
    return inserted(state, degree, places)


def _norm_gradients(state: State, behind: dict[int, int]) -> list[Place]:
    """Sums of the gradients of norms, which each rank has of its own tokens only, behind the backward of their unit."""
    anatomy, work, graph = state.anatomy, state.work, state.graph
    last: dict[tuple[int, int, int, int], int] = {}
    backward = np.flatnonzero(work.computes & (anatomy.phase == int(Phase.BACKWARD)) & (anatomy.unit >= 0))
    for node in backward.tolist():
        unit = int(anatomy.unit[node])
        last[int(graph.rank[node]), int(graph.step[node]), int(anatomy.micro_batch[node]), unit] = node
    out: list[Place] = []
    for key, node in last.items():
        own = [weight for weight in work.weights[key[3]] if weight.role is Role.WHOLE and len(weight.dims) == 1]
        if anatomy.is_layer[key[3]]:
            out += [Place(node, behind.get(node), "all_reduce", weight.elements * GRADIENT_BYTES) for weight in own]
    return out


def _moved_bytes(shape: Shape, width: float) -> int:
    return round(shape.rows * width * shape.element_bytes)


def _spread(state: State, old: int, new: int) -> State:
    """How many real ranks each rank of the graph stands for, at least one: a job with fewer ranks than were measured
    keeps them all, and counts from its real size when it grows again."""
    graph = state.graph
    ranks = np.unique(graph.rank[graph.kind != int(NodeKind.RENDEZVOUS)])
    count = graph.multiplicity if len(graph.multiplicity) == len(ranks) else np.ones(len(ranks), np.int32)
    before = state.layout.ranks * old // new
    factor = state.layout.ranks / int(count.sum()) if count.sum() > before else new / old
    spread = np.maximum(1, np.rint(count * factor)).astype(np.int32)
    return replace(state, graph=replace(graph, multiplicity=spread))
