"""Turns a state into one of a deeper, shallower or wider model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import Role, Weight
from scaletrace.extrapolate.rewrite.batch import ACTIVATIONS
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


def resize_layers(state: State, layers: int) -> State:
    """`layers` repeated layers: the inner ones are repeated or left out, the first and the last keep their place.

    Raises UsageError without measured layers, or where a pipeline's stages would not divide them.
    """
    measured = [unit for unit, is_layer in enumerate(state.anatomy.is_layer) if is_layer]
    if layers < 1 or not measured:
        raise UsageError(f"{layers} layers can't be made of the {len(measured)} that the trace shows")
    if layers == len(measured):
        return state
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
    return replace(out, work=replace(out.work, weights=tuple(state.work.weights[unit] for unit in model)))


def resize_hidden(state: State, hidden: int) -> State:
    """Width `hidden` in place of the measured one: matrices grow with its square, all else in proportion; heads grow in
    number, not in size. Raises UsageError where no shape tells the measured width."""
    widths = [weight.dims[-1] for unit in state.work.weights for weight in unit if len(weight.dims) == 2]
    if not widths:
        raise UsageError("the trace has no shapes, so its width is not known; record with record_shapes=True")
    factor = hidden / int(np.bincount(np.array(widths)).argmax())

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        if shape is None:
            return None, factor
        if shape.work is Work.ATTENTION:
            return shape.scaled(batch=factor), factor
        if shape.work is Work.MATMUL and shape.batch == 1:
            return shape.scaled(columns=factor, depth=factor), factor**2
        return shape.scaled(columns=factor), factor

    ends = np.array([name in ("embedding", "head") for name in state.anatomy.units] + [False], np.bool_)
    inner = passes(state) & ~on_weights(state.graph) & ~ends[state.anatomy.unit]
    out = stretched(state, stretch, inner)
    out = stretched(out, lambda shape, role: _one_side(shape, factor), passes(state) & ends[state.anatomy.unit])
    growth = _parameter_growth(state, factor)
    optimizer = (state.anatomy.phase == int(Phase.OPTIMIZER)) & (state.graph.instance < 0)
    out = stretched(out, lambda shape, role: (None, growth), optimizer | on_weights(state.graph))
    groups = state.graph.groups
    items = [
        scaled_bytes(item, factor if axis_of_item(item, groups) in ACTIVATIONS else growth)
        for item in state.graph.collectives
    ]
    out = recosted(out, items, groups)
    weights = tuple(
        tuple(Weight(tuple(round(size * factor) for size in weight.dims), weight.role) for weight in unit)
        for unit in state.work.weights
    )
    return replace(
        out,
        anatomy=replace(
            out.anatomy,
            boundary_bytes=round(state.anatomy.boundary_bytes * factor),
            parameters=state.anatomy.parameters * growth,
        ),
        work=replace(out.work, weights=weights),
    )


def _one_side(shape: Shape | None, factor: float) -> tuple[Shape | None, float]:
    """Embedding and head have the vocabulary on their other side, which stays."""
    if shape is None:
        return None, factor
    return (shape.scaled(depth=factor) if shape.work is Work.MATMUL else shape.scaled(columns=factor)), factor


def _parameter_growth(state: State, factor: float) -> float:
    """All parameters after over before: matrices of layers with the square, vectors and vocabulary in proportion."""
    old = new = 0.0
    for unit, is_layer in zip(state.work.weights, state.anatomy.is_layer, strict=True):
        for weight in unit:
            old += weight.elements
            new += weight.elements * (factor**2 if is_layer and len(weight.dims) == 2 else factor)
    return new / old if old else factor**2
