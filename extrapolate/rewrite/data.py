"""Turns a graph into the one of another number of data-parallel ranks: dp, ZeRO-1, FSDP and HSDP.

Nodes and edges stay, since every rank does the same on other samples. Groups of the data axis change size, gathers and
scatters of shards change their padding, and the measured ranks become classes that stand for more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.layout import AXES, DATA_AXES, Layout, axis_of, degrees
from scaletrace.extrapolate.nodework import Weight
from scaletrace.extrapolate.rewrite.select import real_ranks
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup

ELEMENT_BYTES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Byte": 1, "c10::BFloat16": 2, "c10::Half": 2}
Shape = Sequence[int]


def sharded_elements(shapes: Sequence[Shape], ranks: int) -> int:
    """Elements that FSDP2 gathers for a unit: every parameter's first dimension is padded to a multiple of `ranks`."""
    total = 0
    for shape in shapes:
        rest = int(np.prod(shape[1:], dtype=np.int64)) if len(shape) > 1 else 1
        total += ranks * -(-int(shape[0] if shape else 1) // ranks) * rest
    return total


def group_shapes(weights: Sequence[Sequence[Weight]], is_layer: Sequence[bool]) -> list[list[Shape]]:
    """Parameter shapes that one gather may hold: those of each unit, of all that are no layers (FSDP's root), of all."""
    every: list[list[Shape]] = [[weight.dims for weight in unit] for unit in weights]
    ends = [shape for unit, layer in zip(every, is_layer, strict=True) if not layer for shape in unit]
    return [*every, ends, [shape for unit in every for shape in unit]]


def resize(graph: Graph, old: Layout, new: Layout, units: Sequence[Sequence[Shape]] = ()) -> Graph:
    """The graph with the data axes of `new`; all other axes must stay. Durations are left as they are.

    units: parameter shapes of each FSDP unit. A gather whose bytes fit a unit exactly gets that unit's padding at the
    new size; without a fit the whole vector keeps its bytes, which is right where nothing was padded.
    """
    if old == new:
        return graph
    changed = [axis for axis in AXES if axis not in DATA_AXES and getattr(old, axis) != getattr(new, axis)]
    if changed:
        raise UsageError(
            f"only dp and fsdp can be stretched by this rewrite; {', '.join(changed)} differ from the trace"
        )
    before, after = degrees(old), degrees(new)
    apart = {group.stride * group.size for group in graph.groups if group.axis == "ep" and group.size > 1}
    groups = tuple(_group(group, old, new, apart) for group in graph.groups)
    collectives = tuple(
        resized_item(item, graph.groups, groups, units) if item.group >= 0 else item for item in graph.collectives
    )
    collectives = _of_replicas(graph, collectives)
    factor = new.ranks / old.ranks
    present = real_ranks(graph)
    multiplicity = graph.multiplicity if len(graph.multiplicity) else np.ones(len(present), np.int32)
    if before == after:
        return replace(graph, groups=groups, collectives=collectives)
    return replace(graph, groups=groups, collectives=collectives, multiplicity=_spread(multiplicity, factor))


def _spread(multiplicity: np.typing.NDArray[np.int32], factor: float) -> np.typing.NDArray[np.int32]:
    """Multiply, keeping whole numbers that add up; a class never vanishes. Empty where each is one rank again."""
    exact = multiplicity * factor
    out = np.maximum(1, np.floor(exact + 1e-9).astype(np.int32))
    missing = round(float(exact.sum())) - int(out.sum())
    if missing > 0:
        order = np.argsort(out - exact, kind="stable")
        out[order[:missing]] += 1
    return np.asarray(out if (out != 1).any() else out[:0], np.int32)


def _group(group: GraphGroup, old: Layout, new: Layout, apart: Collection[int]) -> GraphGroup:
    """Size of the group's axis, and a stride that grows with the axes inside it.

    apart: strides of groups of ranks that hold the same experts, which stay where experts do
    """
    world = group.size == old.ranks and old.ranks > 1
    axis = axis_of(group.axis)
    regular = (getattr(old, axis), getattr(old, axis) * old.cp)  # gradients and shards span context ranks too
    if world and axis in DATA_AXES and group.size not in regular:
        return replace(group, size=new.ranks)
    was, now = getattr(old, axis), getattr(new, axis)
    if axis in DATA_AXES and was == now == 1 < group.size:  # ranks that hold the same experts, whatever they are called
        was, now = old.data_ranks, new.data_ranks
    size = round(group.size * now / was)
    stride = group.stride
    if stride in apart and getattr(old, axis) != group.size:
        return replace(group, size=max(1, size))
    apart_by = old.span(axis).stride
    if stride == apart_by or group.size == 1:
        stride = new.span(axis).stride
    elif axis == "pp" and stride > 0 and stride % apart_by == 0:  # of stages that are no neighbours
        stride = new.span(axis).stride * (stride // apart_by)
    elif stride > 0:
        # A group that doesn't follow the usual order of axes: whatever grew inside its stride moves it apart.
        inner = [other for other in DATA_AXES if other != axis and 1 < getattr(old, other) <= stride]
        for other in inner:
            stride = max(1, round(stride * getattr(new, other) / getattr(old, other)))
    return replace(group, size=max(1, size), stride=stride)


def resized_item(
    item: GraphCollective, old: Sequence[GraphGroup], new: Sequence[GraphGroup], units: Sequence[Sequence[Shape]]
) -> GraphCollective:
    """Bytes after the change: shards shrink with the group, whole vectors keep their size up to padding."""
    was, now = old[item.group].size, new[item.group].size
    if was == now or item.kind not in ("all_gather", "reduce_scatter"):
        return item
    gathers = item.kind == "all_gather"
    whole, shard = (item.bytes_out, item.bytes_in) if gathers else (item.bytes_in, item.bytes_out)
    if whole < 0 and shard < 0:
        return item
    whole = whole if whole >= 0 else shard * was
    width = ELEMENT_BYTES.get(item.dtype, 0)
    total = _padded(whole, was, now, width, units)
    if gathers:
        return replace(item, bytes_in=-(-total // now), bytes_out=total)
    return replace(item, bytes_in=total, bytes_out=-(-total // now))


def _of_replicas(graph: Graph, resized: Sequence[GraphCollective]) -> tuple[GraphCollective, ...]:
    """The resized collectives with the sums over replicas (HSDP) of scattered gradients as large as the shards are now."""
    shards: dict[int, int] = {}
    for was, now in zip(graph.collectives, resized, strict=True):
        if was.kind == "reduce_scatter" and was.bytes_out > 0 and was.bytes_out != now.bytes_out:
            shards.setdefault(was.bytes_out, now.bytes_out)

    def follow(item: GraphCollective) -> GraphCollective:
        sums = item.kind == "all_reduce" and item.group >= 0 and graph.groups[item.group].axis == "dp"
        size = shards.get(item.bytes_in) if sums and item.bytes_in == item.bytes_out else None
        return item if size is None else replace(item, bytes_in=size, bytes_out=size)

    return tuple(follow(item) for item in resized) if shards else tuple(resized)


def _padded(whole: int, was: int, now: int, width: int, units: Sequence[Sequence[Shape]]) -> int:
    """Bytes of the whole vector at the new size."""
    for unit in units:
        for size in (width,) if width else (2, 4):
            if sharded_elements(unit, was) * size == whole:
                return sharded_elements(unit, now) * size
    return whole


def refitted(
    item: GraphCollective, groups: Sequence[GraphGroup], old: Sequence[Sequence[Shape]], new: Sequence[Sequence[Shape]]
) -> GraphCollective | None:
    """A gather or scatter of one unit's parameters after their shapes have changed, None where its bytes fit no unit."""
    if item.group < 0 or item.kind not in ("all_gather", "reduce_scatter"):
        return None
    size = groups[item.group].size
    whole = item.bytes_out if item.kind == "all_gather" else item.bytes_in
    for was, now in zip(old, new, strict=True):
        before = sharded_elements(was, size)
        for width in (4, 2, 1):
            if before and before * width == whole:
                total = sharded_elements(now, size) * width
                shard = -(-total // size)
                if item.kind == "all_gather":
                    return replace(item, bytes_in=shard, bytes_out=total)
                return replace(item, bytes_in=total, bytes_out=shard)
    return None
