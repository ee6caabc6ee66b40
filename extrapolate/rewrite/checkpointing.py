"""Turns a state into one that recomputes its layers' activations in backward instead of keeping them."""

from __future__ import annotations

from dataclasses import replace

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.schedules import build
from scaletrace.extrapolate.rewrite.stages import laid
from scaletrace.extrapolate.rewrite.state import State


def checkpoint(state: State) -> State:
    """Every layer's forward, with its collectives, runs once more right before its backward.

    It is the last rewrite of a chain, since the forward of a layer then stands in two places.
    Raises UsageError for a state that recomputes already.
    """
    layout = state.layout
    if layout.recompute == "full":
        raise UsageError("this job recomputes its activations already")
    program = build(
        layout.pipeline_schedule if layout.pp > 1 else "1F1B", layout.pp, layout.microbatches, layout.chunks
    )
    return replace(laid(state, program, recompute=True), layout=replace(layout, recompute="full"))
