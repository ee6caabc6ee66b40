"""Turns a state into one with another pipeline: degree, schedule, chunks, and how many micro batches pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.messages import MessageTime, Streamed
from scaletrace.extrapolate.rewrite.pp import cut, split_units
from scaletrace.extrapolate.rewrite.schedules import Program, build
from scaletrace.extrapolate.rewrite.split_shards import split_shards
from scaletrace.extrapolate.rewrite.stage_buckets import staged_buckets
from scaletrace.extrapolate.rewrite.stage_shards import at_home, staged
from scaletrace.extrapolate.rewrite.state import QUICK, State, message_ns, told
from scaletrace.extrapolate.rewrite.tied import tied, untied
from scaletrace.extrapolate.rewrite.uncut import relaid
from scaletrace.extrapolate.steps import step_times_ns
from scaletrace.parse.graph import Graph
from scaletrace.parse.health import Health
from scaletrace.replay.engine import replay

SLOWEST = 0.9
"""Quantile of the measured messages above which none is taken for what messages take."""
SHORT = 0.02
"""What the measured schedule, laid anew, may fall short of the measured step by before slower messages are tried."""
TRIES = 5


def pipeline(
    state: State, stages: int, schedule: str = "", chunks: int = 1, counts: Sequence[int] = (), micro_batches: int = 0
) -> State:
    """`stages` pipeline ranks with `chunks` stages each; counts: layers of each stage where they shall not be equal.

    micro_batches: how many pass through it in a step, 0 = as many as do

    Raises UsageError where layers or micro batches do not divide.
    """
    count = micro_batches or state.layout.microbatches
    layout = replace(state.layout, pp=stages, schedule=schedule, chunks=chunks, microbatches=count)
    program = build(layout.pipeline_schedule, stages, layout.microbatches, chunks)
    return replace(relaid(state, lambda source: _cut(source, program, layout, counts)), layout=layout)


def _cut(source: State, program: Program, layout: Layout, counts: Sequence[int]) -> State:
    if not counts and same_pipeline(source.layout, layout):
        return source
    recorded = len(source.columns[0])
    if program.ranks == recorded == 1:
        return laid(source, program, counts=counts)
    units = split_units(source.anatomy, program.stages, counts).units
    each = [sum(source.anatomy.is_layer[unit] for unit in stage) for stage in units]
    if len(set(each)) > 1 and not counts:
        source = told(source, f"The stages hold {', '.join(map(str, each))} layers: {sum(each)} don't divide.")
    source, shared = untied(source)
    ready = staged_buckets(at_home(split_shards(source, units), units), units)
    return tied(staged(laid(ready, program, counts=counts), program, units, recorded), program, shared)


def same_pipeline(one: Layout, other: Layout) -> bool:
    """Whether two layouts lay a step in the same order on the same stages."""
    keys = [(each.pp, each.chunks, each.microbatches, each.pp == 1 or each.pipeline_schedule) for each in (one, other)]
    return keys[0] == keys[1]


def laid(
    state: State,
    program: Program,
    *,
    counts: Sequence[int] = (),
    model: Sequence[int] = (),
    recompute: bool | None = None,
) -> State:
    """The state's layers laid in another program (pp.cut), with its messages costed on the state's network.

    recompute: whether layers run their forward again before their backward; None = as they did
    """
    made = cut(
        state.graph,
        state.anatomy,
        program,
        _message_ns(state),
        columns=state.columns,
        stages=split_units(state.anatomy, program.stages, counts) if counts else None,
        model=model,
        recompute=recompute,
    )
    width = len(state.columns)
    health = Health()
    health.add(state.health)
    health.add(made.health)
    # The graph may hold fewer columns than there are, so how far apart stages lie is the layout's to say.
    stride = state.layout.span("pp").stride
    known = len(state.graph.groups)
    fresh = tuple(replace(group, stride=stride) for group in made.graph.groups[known:])
    return replace(
        state,
        graph=replace(made.graph, groups=made.graph.groups[:known] + fresh),
        anatomy=made.anatomy,
        work=state.work.moved(made.origin),
        columns=tuple(tuple(home * width + column for home in range(program.ranks)) for column in range(width)),
        health=health,
    )


def _message_ns(state: State) -> MessageTime:
    """Time of a message: of gloo's the quick ones', or as much more as lets the measured schedule take as long as it did.

    Between hosts that are busy, many messages wait for a thread to be woken; then the quick ones say too little.
    """
    quick, layout = message_ns(state), state.layout
    if layout.pp == 1 or not isinstance(quick, Streamed):
        return quick
    program = build(layout.pipeline_schedule, layout.pp, layout.microbatches, layout.chunks)
    wanted_ns = (1 - SHORT) * _step_ns(state.graph)

    def falls_short(time: MessageTime) -> bool:
        made = cut(state.graph, state.anatomy, program, time, columns=state.columns)
        return _step_ns(made.graph) < wanted_ns

    if not falls_short(quick):
        return quick
    low, high = QUICK, SLOWEST
    for _ in range(TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if falls_short(message_ns(state, middle)) else (low, middle)
    return message_ns(state, high)


def _step_ns(graph: Graph) -> float:
    timeline = replay(graph)
    return float(np.median(step_times_ns(graph, timeline.start_ns, timeline.end_ns)))
