"""Turns a state into one with another pipeline: degree, schedule, chunks, and how many micro batches pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scaletrace.extrapolate.rewrite.pp import cut, split_units
from scaletrace.extrapolate.rewrite.schedules import Program, build
from scaletrace.extrapolate.rewrite.stage_shards import at_home, staged
from scaletrace.extrapolate.rewrite.state import State, message_ns
from scaletrace.parse.health import Health


def pipeline(state: State, stages: int, schedule: str = "", chunks: int = 1, counts: Sequence[int] = ()) -> State:
    """`stages` pipeline ranks with `chunks` stages each; counts: layers of each stage where they shall not be equal.

    Raises UsageError where layers or micro batches do not divide.
    """
    layout = replace(state.layout, pp=stages, schedule=schedule, chunks=chunks)
    program = build(layout.pipeline_schedule, stages, layout.microbatches, chunks)
    if stages == 1 or len(state.columns[0]) > 1:
        return replace(laid(state, program, counts=counts), layout=layout)
    units = split_units(state.anatomy, program.stages, counts).units
    out = laid(at_home(state, units), program, counts=counts)
    return replace(staged(out, program, units), layout=layout)


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
        message_ns(state),
        columns=state.columns,
        stages=split_units(state.anatomy, program.stages, counts) if counts else None,
        model=model,
        recompute=recompute,
    )
    width = len(state.columns)
    health = Health()
    health.add(state.health)
    health.add(made.health)
    return replace(
        state,
        graph=made.graph,
        anatomy=made.anatomy,
        work=state.work.moved(made.origin),
        columns=tuple(tuple(home * width + column for home in range(program.ranks)) for column in range(width)),
        health=health,
    )
