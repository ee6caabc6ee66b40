"""Turns a state into one with another micro batch: how many samples it holds, or how many of them make a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.nodework import Role, Stretch
from scaletrace.extrapolate.rewrite.removal import orphans, without_nodes
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
from scaletrace.extrapolate.routing import TINY

ACTIVATIONS = ("tp", "pp", "ep", "cp")
"""Axes whose collectives move activations, which grow with tokens; those of dp and fsdp move parameters."""


def resize_micro_batch(state: State, samples: int) -> State:
    """`samples` in each micro batch instead of the measured number: token dimensions follow, parameters don't."""
    if samples < 1:
        raise UsageError(f"a micro batch holds at least one sample, not {samples}")
    factor = samples / state.layout.mbs
    out = more_tokens(state, factor, token_stretch(state, factor, batch=factor))
    return replace(out, layout=replace(state.layout, mbs=samples))


def attention_of(state: State) -> Callable[[Shape], bool]:
    """Tells operators that have a row for each query and a column (or depth) for each key: attention, fused or not.

    Unfused attention is told by its sizes: batched products between tokens, and beside those passes over more rows than
    there are tokens that are as wide as a sample is long.
    """
    queries = state.layout.seq / state.layout.cp
    keys = {float(state.layout.seq), queries}
    tokens = queries * state.layout.mbs

    def between_tokens(shape: Shape) -> bool:
        return shape.batch > 1 and shape.rows in keys and (shape.columns in keys or shape.depth in keys)

    products = {shape for shape in state.work.shape if shape is not None and shape.work is Work.MATMUL}
    unfused = any(between_tokens(shape) for shape in products)

    def attends(shape: Shape) -> bool:
        if shape.work is Work.ATTENTION:
            return True
        if shape.work is Work.MATMUL:
            return between_tokens(shape)
        return unfused and shape.columns in keys and shape.rows > tokens and shape.rows % queries == 0

    return attends


def token_stretch(state: State, rows: float, *, batch: float = 1.0, queries: float = 1.0, keys: float = 1.0) -> Stretch:
    """How operators change with their tokens: attention by samples, queries and keys, all others by `rows`."""

    attends = attention_of(state)

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        if shape is None:
            return None, batch * queries * keys if role is Role.HEADS else rows
        if not attends(shape):
            return shape.scaled(rows=rows), rows
        if shape.work is Work.ATTENTION:
            return shape.scaled(rows=queries, columns=keys, batch=batch), rows
        if shape.work is not Work.MATMUL:
            return shape.scaled(rows=batch * queries, columns=keys), rows
        by_key = {"columns": keys} if shape.columns >= shape.depth else {"depth": keys}
        return shape.scaled(rows=queries, batch=batch, **by_key), rows

    return stretch


def more_tokens(state: State, rows: float, stretch: Stretch) -> State:
    """The work of all operators on tokens stretched, and `rows` times the bytes of all collectives of activations."""
    if rows == 1.0:
        return state
    out = stretched(state, stretch, passes(state) & ~on_weights(state.graph))
    groups = state.graph.groups
    carries = carry_activations(state)
    items = [
        scaled_bytes(item, rows) if carried else item
        for item, carried in zip(state.graph.collectives, carries, strict=True)
    ]
    out = recosted(out, items, groups)
    boundary = round(state.anatomy.boundary_bytes * rows)
    return replace(out, anatomy=replace(out.anatomy, boundary_bytes=boundary))


def carry_activations(state: State) -> list[bool]:
    """Of each collective whether its bytes follow the tokens; how many go to each expert is told in the same few bytes,
    and the gradient of weights that two stages share is as large as those."""
    groups, items = state.graph.groups, state.graph.collectives
    axes = [axis_of_item(item, groups) for item in items]
    sizes = [max(item.bytes_in, item.bytes_out) for item in items]
    most = max((size for size, axis in zip(sizes, axes, strict=True) if axis == "ep"), default=0)
    return [
        axis in ACTIVATIONS and (axis != "ep" or size >= TINY * most) and not of_embedding(item, groups)
        for item, size, axis in zip(items, sizes, axes, strict=True)
    ]


def repeat_micro_batches(state: State, count: int, *, accumulate: bool = True) -> State:
    """`count` micro batches a step on the measured pipeline, in the layout's schedule.

    accumulate  gradients of plain data parallelism are reduced behind the last micro batch only, as under no_sync();
                where the measured step has one micro batch its reductions are dropped from all but the last
    """
    if count < 1:
        raise UsageError(f"a step has at least one micro batch, not {count}")
    layout = replace(state.layout, microbatches=count)
    if count == state.layout.microbatches:
        return state
    program = build(layout.pipeline_schedule if layout.pp > 1 else "1F1B", layout.pp, count, layout.chunks)
    out = replace(laid(state, program), layout=layout)
    return without_early_reductions(out, state.layout.microbatches) if accumulate else out


def without_early_reductions(state: State, measured: int) -> State:
    """Drop all-reduces of a data axis from all micro batches but the last, where a single measured one was repeated."""
    graph = state.graph
    if measured > 1:
        return state
    reduces = np.array(
        [item.kind == "all_reduce" and axis_of_item(item, graph.groups) in ("dp", "") for item in graph.collectives]
        + [False],
        np.bool_,
    )
    last = int(state.anatomy.micro_batch.max())
    drop = reduces[graph.instance] & (state.anatomy.micro_batch >= 0) & (state.anatomy.micro_batch < last)
    drop |= orphans(graph, drop)
    return without_nodes(state, drop)
