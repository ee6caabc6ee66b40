"""Turns a state into one with another degree of tensor parallelism, with or without sequence parallelism.

Column products lose columns, row products depth, attention heads, what lies between its width; norms and residuals stay
whole, or with sequence parallelism lose tokens. Collectives change group where there are some, are inserted where there
were none (behind each row product, and behind the backward of each group of column products), and leave with degree 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.nodework import Mark, NodeWork, Role, Weight
from scaletrace.extrapolate.rewrite.batch import without_nodes
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.extrapolate.rewrite.state import (
    State,
    axis_of_item,
    on_weights,
    passes,
    recosted,
    scaled_bytes,
    stretched,
    told,
    whole_bytes,
)
from scaletrace.parse.events import BoolArray, Int32Array
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind

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
    _check(state.work, layout.tp, degree)
    share = layout.tp / degree
    tokens = (layout.tp if layout.sp else 1) / (degree if sequence_parallel else 1)
    out = _split_compute(state, share, tokens)
    out = _split_parameters(out, share, degree)
    if degree == 1:
        out = _without_collectives(out)
    elif layout.tp == 1 or sequence_parallel != layout.sp:
        out = _with_collectives(_without_collectives(out), degree, sequence_parallel)
    return _spread(replace(out, layout=replace(layout, tp=degree, sp=sequence_parallel)), layout.tp, degree)


def _check(work: NodeWork, old: int, new: int) -> None:
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
    for shape in work.shape:
        if shape is not None and shape.work is Work.ATTENTION and shape.batch * old % new:
            raise UsageError(f"tp={new} does not divide {shape.batch * old:.0f} samples × heads of attention")
    if not seen and not any(int(role) for role in work.role.tolist()):
        raise UsageError("no product of the layers could be told as column or row, so nothing can be split")


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
    """Weights, the optimizer's time and the data axes' bytes after the split."""
    weights = tuple(tuple(_divided(weight, share) for weight in unit) for unit in state.work.weights)
    before = [sum(weight.elements for weight in unit) for unit in state.work.weights]
    after = [sum(weight.elements for weight in unit) for unit in weights]
    total = sum(after) / sum(before) if sum(before) else share
    optimizer = (state.anatomy.phase == int(Phase.OPTIMIZER)) & (state.graph.instance < 0)
    out = stretched(state, lambda shape, role: (None, total), optimizer)
    groups = state.graph.groups
    items = [
        _data_item(item, groups, state.work.weights, weights, total)
        if axis_of_item(item, groups) in (*DATA_AXES, "world", "")
        else scaled_bytes(item, share)
        if axis_of_item(item, groups) == "cp"  # heads are divided, and keys and values with them
        else item
        for item in state.graph.collectives
    ]
    grown = [_wider(group, share, degree) for group in groups]
    parameters = np.array(
        [old * (b / a) if a else old for old, a, b in zip(state.anatomy.parameters, before, after, strict=True)]
    )
    out = recosted(out, items, grown)
    return replace(out, anatomy=replace(out.anatomy, parameters=parameters), work=replace(out.work, weights=weights))


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


def _data_item(
    item: GraphCollective,
    groups: tuple[GraphGroup, ...],
    old: tuple[tuple[Weight, ...], ...],
    new: tuple[tuple[Weight, ...], ...],
    total: float,
) -> GraphCollective:
    """Bytes of a collective of parameters: exactly those of the unit whose padded size it has, else by proportion."""
    size = groups[item.group].size if item.group >= 0 else 1
    whole = whole_bytes(item, size)
    for was, now in zip(old, new, strict=True):
        before = sharded_elements([weight.dims for weight in was], size)
        if not before:
            continue
        for width in (4, 2, 1):
            if before * width == whole:
                moved = sharded_elements([weight.dims for weight in now], size) * width
                if item.kind == "all_gather":
                    return replace(item, bytes_in=moved // size, bytes_out=moved)
                if item.kind == "reduce_scatter":
                    return replace(item, bytes_in=moved, bytes_out=moved // size)
                return replace(item, bytes_in=moved, bytes_out=moved)
    return scaled_bytes(item, total)


def _without_collectives(state: State) -> State:
    """The state without the nodes of tensor collectives; host calls that issued them stay, as host work is kept."""
    graph = state.graph
    own = np.array([axis_of_item(item, graph.groups) == "tp" for item in graph.collectives] + [False], np.bool_)
    drop = own[graph.instance]
    hub = graph.kind == int(NodeKind.RENDEZVOUS)
    fed = np.zeros(len(graph), np.bool_)
    into = graph.edge_dst
    fed[into[hub[into] & drop[graph.pred]]] = True
    out = without_nodes(state, drop | (hub & fed))
    return replace(out, graph=_pruned(out.graph))


def _pruned(graph: Graph) -> Graph:
    """The graph without collectives, groups, lanes and names that no node uses any more, as far as they come last."""
    used = graph.instance[graph.instance >= 0]
    collectives = graph.collectives[: int(used.max(initial=-1)) + 1]
    groups = graph.groups
    while groups and groups[-1].axis == "tp" and all(item.group != len(groups) - 1 for item in collectives):
        groups = groups[:-1]
    lanes = graph.lanes[: int(graph.lane.max(initial=-1)) + 1]
    names = graph.names[: int(graph.name.max(initial=-1)) + 1]
    return replace(graph, collectives=collectives, groups=groups, lanes=lanes, names=names)


def _with_collectives(state: State, degree: int, sequence_parallel: bool) -> State:
    """Collectives at the marks of NodeWork, one member each, since the other tensor ranks do the same."""
    loom = reopen(state.graph, state.anatomy.exact_ns, state.anatomy.entry)
    index = next((at for at, group in enumerate(loom.groups) if group.axis == "tp"), len(loom.groups))
    group = GraphGroup("tp", degree, 1, 1, "tp")
    loom.groups[index:index] = [] if index < len(loom.groups) else [group]
    loom.groups[index] = group
    behind = _followers(state.graph)
    ahead = {after: before for before, after in behind.items()}
    for node in np.flatnonzero(state.work.mark).tolist():
        bits, shape = int(state.work.mark[node]), state.work.shape[node]
        if shape is None:
            continue
        if bits & Mark.AFTER_ROW:
            kind = "reduce_scatter" if sequence_parallel else "all_reduce"
            _add(loom, state, node, behind.get(node), kind, index, _moved_bytes(shape, shape.columns))
        if bits & Mark.AFTER_COLUMN_BACKWARD:
            kind = "reduce_scatter" if sequence_parallel else "all_reduce"
            _add(loom, state, node, behind.get(node), kind, index, _moved_bytes(shape, shape.depth))
        if sequence_parallel and bits & Mark.BEFORE_COLUMN:
            _add(loom, state, ahead.get(node), node, "all_gather", index, _moved_bytes(shape, shape.depth))
        if sequence_parallel and bits & Mark.BEFORE_ROW_BACKWARD:
            _add(loom, state, ahead.get(node), node, "all_gather", index, _moved_bytes(shape, shape.columns))
    added = len(loom.collectives) - len(state.graph.collectives)
    if not added:
        return told(state, "No place for tensor collectives was found, so their cost is missing.")
    woven = loom.finish()
    origin = woven.origin
    anatomy = replace(state.anatomy.moved(origin), exact_ns=woven.exact_ns, entry=woven.entry)
    out = replace(
        state,
        graph=replace(woven.graph, multiplicity=state.graph.multiplicity),
        anatomy=_placed(anatomy, woven.graph, origin),
        work=state.work.moved(origin),
    )
    return told(out, f"{added} tensor collectives were inserted; their times are the cost model's.")


def _placed(anatomy: Anatomy, graph: Graph, origin: Int32Array) -> Anatomy:
    """Inserted nodes belong to the phase, unit and micro batch of what they stand behind."""
    phase, unit, batch = anatomy.phase.copy(), anatomy.unit.copy(), anatomy.micro_batch.copy()
    for node in np.flatnonzero(origin < 0).tolist():
        before = graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]]
        if len(before):
            for column in (phase, unit, batch):
                column[node] = column[before[0]]
    return replace(anatomy, phase=phase, unit=unit, micro_batch=batch)


def _moved_bytes(shape: Shape, width: float) -> int:
    return round(shape.rows * width * shape.element_bytes)


def _followers(graph: Graph) -> dict[int, int]:
    """The next node on the same thread or stream."""
    dst = graph.edge_dst
    ordered = np.isin(graph.edge_kind, [int(EdgeKind.PROGRAM), int(EdgeKind.STREAM)])
    ordered &= graph.rank[graph.pred] == graph.rank[dst]
    same = ordered & (graph.lane[graph.pred] == graph.lane[dst])
    out = dict(zip(graph.pred[ordered].tolist(), dst[ordered].tolist(), strict=True))
    out.update(zip(graph.pred[same].tolist(), dst[same].tolist(), strict=True))
    return out


def _add(loom: Loom, state: State, after: int | None, before: int | None, kind: str, group: int, whole: int) -> None:
    """One collective behind `after`, for which `before` waits."""
    node = after if after is not None else before
    if node is None:
        return
    degree, rank = loom.groups[group].size, int(state.graph.rank[node])
    gathers, scatters = kind == "all_gather", kind == "reduce_scatter"
    instance = len(loom.collectives)
    loom.collectives.append(
        GraphCollective(kind, group, whole // degree if gathers else whole, whole // degree if scatters else whole)
    )
    columns = {
        "rank": rank,
        "lane": loom.lane(rank, "tensor parallel", True),
        "name": loom.name(f"tp {kind}"),
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
    if before is not None:
        loom.edge(transfer, before, EdgeKind.EVENT_WAIT)


def _spread(state: State, old: int, new: int) -> State:
    """How many real ranks each rank of the graph stands for."""
    graph = state.graph
    ranks = np.unique(graph.rank[graph.kind != int(NodeKind.RENDEZVOUS)])
    count = graph.multiplicity if len(graph.multiplicity) == len(ranks) else np.ones(len(ranks), np.int32)
    spread = np.maximum(1, np.rint(count * new / old)).astype(np.int32)
    return replace(state, graph=replace(graph, multiplicity=spread))
