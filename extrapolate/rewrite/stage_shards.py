"""Turns the gathers and scatters of a sharded job that was cut into a pipeline into those that its stages issue.

PyTorch's stages keep their parameters gathered after a backward pass and scatter gradients once, behind their last: a
pass gathers only what the pass before it gave away, which a forward does where parameters are resharded behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.insertion import without_collectives
from scaletrace.extrapolate.rewrite.schedules import Op, Program
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, told
from scaletrace.parse.events import BoolArray


def staged(state: State, program: Program, stages: Sequence[Sequence[int]]) -> State:
    """`state` laid in `program` with the units of each of `stages` (in model order), as its stages would gather."""
    gathers, scatters = _of_kind(state, "all_gather"), _of_kind(state, "reduce_scatter")
    replicas = _replicas(state, scatters)
    if not gathers.any() and not scatters.any():
        return state
    anatomy = state.anatomy
    forward = anatomy.phase == int(Phase.FORWARD)
    backward = anatomy.phase == int(Phase.BACKWARD)
    reshards = bool((gathers & backward).any())
    stage_of = np.full(len(anatomy.units) + 1, -1, np.int64)
    for stage, units in enumerate(stages):
        stage_of[list(units)] = stage
    stage = stage_of[anatomy.unit]
    drop = np.zeros(len(state.graph), np.bool_)
    for number in range(program.stages):
        row = [a for a in program.actions[program.rank_of_stage[number]] if a.stage == number and a.op is not Op.WEIGHT]
        mine = stage == number
        gathered = False
        for action in row:
            here = (
                mine & (anatomy.micro_batch == action.micro_batch) & (forward if action.op is Op.FORWARD else backward)
            )
            if gathered:
                drop |= here & gathers
            gathered = not reshards or action.op is not Op.FORWARD
        last = row[-1].micro_batch if row else -1
        drop |= mine & backward & (scatters | replicas) & (anatomy.micro_batch != last)
    # What is scattered behind backward belongs to the units that backward ends with.
    first = [column[program.rank_of_stage[0]] for column in state.columns]
    drop |= (scatters | replicas) & (stage < 0) & ~np.isin(state.graph.rank, first)
    if not drop.any():
        return state
    return told(without_collectives(state, drop), "Stages gather parameters and scatter gradients as PyTorch's do.")


def _of_kind(state: State, kind: str) -> BoolArray:
    """Members of collectives of a kind over data ranks."""
    graph = state.graph
    own = [item.kind == kind and axis_of_item(item, graph.groups) in ("dp", "fsdp") for item in graph.collectives]
    return np.asarray(np.array([*own, False], np.bool_)[graph.instance], np.bool_)


def _replicas(state: State, scatters: BoolArray) -> BoolArray:
    """Reductions over replicas of what was scattered."""
    if not scatters.any():
        return np.zeros(len(state.graph), np.bool_)
    return _of_kind(state, "all_reduce")
