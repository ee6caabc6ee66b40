"""Turns a state into one whose units have other weights: the data axes' bytes and the optimizer's time follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.nodework import Weight
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, recosted, scaled_bytes, stretched, whole_bytes
from scaletrace.parse.graph import GraphCollective, GraphGroup


def with_weights(
    state: State,
    weights: tuple[tuple[Weight, ...], ...],
    share: float = 1.0,
    groups: tuple[GraphGroup, ...] | None = None,
) -> State:
    """The state with other weights of each unit; `share` is what they shrink to where no shape tells.

    groups  other groups, where the change moves ranks apart
    """
    before = [sum(weight.elements for weight in unit) for unit in state.work.weights]
    after = [sum(weight.elements for weight in unit) for unit in weights]
    total = sum(after) / sum(before) if sum(before) else share
    optimizer = (state.anatomy.phase == int(Phase.OPTIMIZER)) & (state.graph.instance < 0)
    out = stretched(state, lambda shape, role: (None, total), optimizer)
    old = state.graph.groups
    items = list(state.graph.collectives)
    exact = np.array([(item.bytes_in, item.bytes_out) for item in items], np.float64).reshape(-1, 2)
    for at, item in enumerate(items):
        if axis_of_item(item, old) == "cp":  # keys and values of the heads that a rank keeps
            items[at] = scaled_bytes(item, share)
        elif axis_of_item(item, old) in (*DATA_AXES, "world", ""):
            items[at], exact[at] = _data_item(item, old, state.work.weights, weights, total, _unrounded(state, at))
    parameters = np.array(
        [count * (b / a) if a else count for count, a, b in zip(state.anatomy.parameters, before, after, strict=True)]
    )
    out = recosted(out, items, old if groups is None else groups)
    return replace(
        out,
        anatomy=replace(out.anatomy, parameters=parameters),
        work=replace(out.work, weights=weights),
        exact_bytes=exact,
    )


def _unrounded(state: State, at: int) -> tuple[float, float]:
    """Bytes in and out of a collective before they were rounded, if what is known of them still is about it."""
    item = state.graph.collectives[at]
    if at < len(state.exact_bytes):
        known = state.exact_bytes[at]
        if np.array_equal(np.rint(known), (item.bytes_in, item.bytes_out)):
            return float(known[0]), float(known[1])
    return float(item.bytes_in), float(item.bytes_out)


def _data_item(
    item: GraphCollective,
    groups: tuple[GraphGroup, ...],
    old: tuple[tuple[Weight, ...], ...],
    new: tuple[tuple[Weight, ...], ...],
    total: float,
    exact: tuple[float, float],
) -> tuple[GraphCollective, tuple[float, float]]:
    """A collective of parameters with its new bytes: those of the unit whose padded size it has, else in proportion to
    `exact`; and these bytes before rounding."""
    size = groups[item.group].size if item.group >= 0 else 1
    whole = whole_bytes(item, size)
    for was, now in zip(old, new, strict=True):
        before = sharded_elements([weight.dims for weight in was], size)
        if not before:
            continue
        for width in (4, 2, 1):
            if before * width == whole:
                moved = sharded_elements([weight.dims for weight in now], size) * width
                inside = moved // size if item.kind == "all_gather" else moved
                out = moved // size if item.kind == "reduce_scatter" else moved
                return replace(item, bytes_in=inside, bytes_out=out), (float(inside), float(out))
    sizes = tuple(size * total if size >= 0 else size for size in exact)
    return replace(item, bytes_in=round(sizes[0]), bytes_out=round(sizes[1])), (sizes[0], sizes[1])
