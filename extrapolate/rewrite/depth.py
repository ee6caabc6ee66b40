"""Turns a state into one of a deeper, shallower or wider model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import Role, Weight
from scaletrace.extrapolate.rewrite.batch import ACTIVATIONS, attention_of, carry_activations
from scaletrace.extrapolate.rewrite.data import group_shapes, refitted
from scaletrace.extrapolate.rewrite.ep import expert_products
from scaletrace.extrapolate.rewrite.loom import FloatArray
from scaletrace.extrapolate.rewrite.precision import SCALAR_BYTES
from scaletrace.extrapolate.rewrite.schedules import build
from scaletrace.extrapolate.rewrite.stages import laid
from scaletrace.extrapolate.rewrite.state import (
    State,
    axis_of_item,
    on_weights,
    passes,
    recosted,
    scaled_bytes,
    stretched,
)
from scaletrace.extrapolate.rewrite.tied import of_embedding
from scaletrace.parse.graph import GraphCollective, GraphGroup


def resize_layers(state: State, layers: int) -> State:
    """`layers` repeated layers: the inner ones are repeated or left out, the first and the last keep their place.

    Raises UsageError without measured layers, or where a pipeline's stages would not divide them.
    """
    measured = [unit for unit, is_layer in enumerate(state.anatomy.is_layer) if is_layer]
    if layers < 1 or not measured:
        raise UsageError(f"{layers} layers can't be made of the {len(measured)} that the trace shows")
    if layers == len(measured):
        return state
    if len(measured) == 1:
        raise UsageError(
            "the trace shows one layer, so what each layer does is not told from what a model does once; "
            "record two layers or more to change their number"
        )
    inner = measured[1:-1] or measured[:1]
    chosen = [measured[0]] + [inner[i % len(inner)] for i in range(layers - 2)] + [measured[-1]]
    chosen = sorted(chosen[:layers] if layers > 1 else [measured[0]])
    before = [unit for unit in range(len(state.anatomy.units)) if unit < measured[0]]
    after = [unit for unit in range(len(state.anatomy.units)) if unit > measured[-1]]
    model = [*before, *chosen, *after]
    layout = state.layout
    program = build(
        layout.pipeline_schedule if layout.pp > 1 else "1F1B", layout.pp, layout.microbatches, layout.chunks
    )
    out = laid(state, program, model=model)
    out = replace(out, work=replace(out.work, weights=tuple(state.work.weights[unit] for unit in model)))
    out = _rebalanced(out, state)
    return replace(out, layout=replace(state.layout, layers=layers))


def _rebalanced(out: State, before: State) -> State:
    """Gradient buckets that hold several layers are copied with one of them; together they hold what the weights do."""
    old, new = _bucket_bytes(before), _bucket_bytes(out)
    had, has = float(before.anatomy.parameters.sum()), float(out.anatomy.parameters.sum())
    if not old or not new or not had:
        return out
    factor = old * has / had / new
    if abs(factor - 1) < 1e-6:
        return out
    groups = out.graph.groups
    items = [scaled_bytes(item, factor) if _is_bucket(item, groups) else item for item in out.graph.collectives]
    return recosted(out, items, groups)


def _is_bucket(item: GraphCollective, groups: tuple[GraphGroup, ...]) -> bool:
    return item.kind == "all_reduce" and item.bytes_in > SCALAR_BYTES and axis_of_item(item, groups) in ("dp", "")


def _bucket_bytes(state: State) -> float:
    """Bytes of all gradient buckets of the graph over the ranks and steps that it holds."""
    used = np.unique(state.graph.instance[state.graph.instance >= 0]).tolist()
    items = state.graph.collectives
    return float(sum(items[at].bytes_in for at in used if _is_bucket(items[at], state.graph.groups)))


def resize_hidden(state: State, hidden: int) -> State:
    """Width `hidden` in place of the measured one: matrices grow with its square, all else in proportion; heads grow in
    number, not in size, and experts in size, not in number, so that a router keeps its columns.

    Raises UsageError where no shape tells the measured width, or heads do not divide the new one.
    """
    factor = hidden / measured_width(state)
    for shape in state.work.shape:
        if shape is not None and shape.work is Work.ATTENTION and hidden % shape.depth:
            raise UsageError(
                f"hidden={hidden} is no multiple of the {shape.depth:.0f} of each head, which keep their size"
            )
    if factor == 1.0:
        return replace(state, layout=replace(state.layout, hidden=hidden))

    attends, experts = attention_of(state), routed_experts(state)

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        if shape is None:
            return None, factor
        if shape.batch == 1 and shape.columns in experts:  # the router's product, and what chooses among its columns
            return (shape.scaled(depth=factor), factor) if shape.work is Work.MATMUL else (shape, 1.0)
        if attends(shape):
            heads = {"batch": factor} if shape.work in (Work.ATTENTION, Work.MATMUL) else {"rows": factor}
            return shape.scaled(**heads), factor
        if shape.work is Work.MATMUL:
            return shape.scaled(columns=factor, depth=factor), factor**2
        return shape.scaled(columns=factor), factor

    ends = np.array([name in ("embedding", "head") for name in state.anatomy.units] + [False], np.bool_)
    inner = passes(state) & ~on_weights(state.graph) & ~ends[state.anatomy.unit]
    out = stretched(state, stretch, inner)
    out = stretched(
        out, lambda shape, role: _one_side(shape, factor),
        passes(state) & ~on_weights(state.graph) & ends[state.anatomy.unit],
    )  # fmt: skip
    growth = _parameter_growth(state, factor)
    optimizer = (state.anatomy.phase == int(Phase.OPTIMIZER)) & (state.graph.instance < 0)
    out = stretched(out, lambda shape, role: (None, growth), optimizer | on_weights(state.graph))
    weights = _wider_weights(state, factor)
    out = _wider_collectives(out, weights, factor, growth)
    return replace(
        out,
        layout=replace(state.layout, hidden=hidden),
        anatomy=replace(
            out.anatomy,
            boundary_bytes=round(state.anatomy.boundary_bytes * factor),
            parameters=_wider_parameters(state, weights, factor),
        ),
        work=replace(out.work, weights=weights),
    )


def measured_width(state: State) -> int:
    """The width between layers, from the layout or from the weights. Raises UsageError where neither tells."""
    if state.layout.hidden:
        return state.layout.hidden
    layers = [unit for unit, is_layer in zip(state.work.weights, state.anatomy.is_layer, strict=True) if is_layer]
    units = [unit for unit in layers if unit] or list(state.work.weights)
    widths = [
        weight.dims[-1] for unit in units for weight in unit if len(weight.dims) == 2 and weight.role is Role.COLUMN
    ]
    widths = widths or [weight.dims[-1] for unit in units for weight in unit if len(weight.dims) == 2]
    if not widths:
        raise UsageError("the trace has no shapes, so its width is not known; record with record_shapes=True")
    return int(np.bincount(np.array(widths)).argmax())


def routed_experts(state: State) -> frozenset[int]:
    """Numbers of experts among which the layers' routers choose.

    A router has a column for each expert: as many as experts' grouped products have matrices, over all their ranks, or
    as one layer has equal matrices, once or several times.
    """
    products = zip(state.work.shape, expert_products(state).tolist(), strict=True)
    grouped = {round(shape.batch) * state.layout.ep for shape, is_one in products if is_one and shape is not None}
    found = set(grouped)
    for unit, is_layer in zip(state.work.weights, state.anatomy.is_layer, strict=True):
        matrices = [weight.dims for weight in unit if len(weight.dims) == 2] if is_layer else []
        found.update(dims[0] for dims in matrices if _chooses(dims, matrices))
    return frozenset(found)


def _chooses(dims: tuple[int, ...], matrices: Sequence[tuple[int, ...]]) -> bool:
    """Whether a matrix has a row for each of several larger ones that are equal."""
    rows = dims[0]
    return rows > 1 and any(
        count % rows == 0 and other[0] > rows and other[1] > rows for other, count in Counter(matrices).items()
    )


def _wider_weights(state: State, factor: float) -> tuple[tuple[Weight, ...], ...]:
    """Weights of layers grow on every side, those of embedding, head and routers only on the one that is not the number
    of words or experts; a router's bias keeps its size."""
    experts = routed_experts(state)

    def wider(weight: Weight, is_layer: bool) -> Weight:
        if is_layer and weight.dims[0] in experts:
            return Weight((*weight.dims[:1], *(round(size * factor) for size in weight.dims[1:])), weight.role)
        if is_layer or len(weight.dims) == 1:
            return Weight(tuple(round(size * factor) for size in weight.dims), weight.role)
        return Weight((*weight.dims[:-1], round(weight.dims[-1] * factor)), weight.role)

    return tuple(
        tuple(wider(weight, is_layer) for weight in unit)
        for unit, is_layer in zip(state.work.weights, state.anatomy.is_layer, strict=True)
    )


def _wider_parameters(state: State, weights: tuple[tuple[Weight, ...], ...], factor: float) -> FloatArray:
    """Parameters of each unit, by its weights where they are known."""
    out = []
    for old, was, now, is_layer in zip(
        state.anatomy.parameters, state.work.weights, weights, state.anatomy.is_layer, strict=True
    ):
        before = sum(weight.elements for weight in was)
        growth = sum(weight.elements for weight in now) / before if before else factor**2 if is_layer else factor
        out.append(float(old) * growth)
    return np.array(out)


def _wider_collectives(state: State, weights: tuple[tuple[Weight, ...], ...], factor: float, growth: float) -> State:
    """Activations grow in proportion; gathers and scatters of a unit with its weights, to the byte; the rest with all."""
    groups = state.graph.groups
    old, new = (group_shapes(each, state.anatomy.is_layer) for each in (state.work.weights, weights))
    items = []
    for item, carries in zip(state.graph.collectives, carry_activations(state), strict=True):
        if of_embedding(item, groups):
            items.append(scaled_bytes(item, factor))
        elif axis_of_item(item, groups) in ACTIVATIONS:
            items.append(scaled_bytes(item, factor) if carries else item)
        elif max(item.bytes_in, item.bytes_out) <= SCALAR_BYTES:
            items.append(item)
        else:
            items.append(refitted(item, groups, old, new) or scaled_bytes(item, growth))
    return recosted(state, items, groups)


def _one_side(shape: Shape | None, factor: float) -> tuple[Shape | None, float]:
    """Embedding and head have the vocabulary on their other side, which stays."""
    if shape is None:
        return None, factor
    return (shape.scaled(depth=factor) if shape.work is Work.MATMUL else shape.scaled(columns=factor)), factor


def _parameter_growth(state: State, factor: float) -> float:
    """All parameters after over before: matrices of layers with the square, vectors, routers and vocabulary in
    proportion."""
    old = sum(weight.elements for unit in state.work.weights for weight in unit)
    new = sum(weight.elements for unit in _wider_weights(state, factor) for weight in unit)
    return new / old if old else factor**2
