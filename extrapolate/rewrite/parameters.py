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
    items = [
        _data_item(item, old, state.work.weights, weights, total)
        if axis_of_item(item, old) in (*DATA_AXES, "world", "")
        else scaled_bytes(item, share)
        if axis_of_item(item, old) == "cp"  # keys and values of the heads that a rank keeps
        else item
        for item in state.graph.collectives
    ]
    parameters = np.array(
        [count * (b / a) if a else count for count, a, b in zip(state.anatomy.parameters, before, after, strict=True)]
    )
    out = recosted(out, items, old if groups is None else groups)
    return replace(out, anatomy=replace(out.anatomy, parameters=parameters), work=replace(out.work, weights=weights))


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
