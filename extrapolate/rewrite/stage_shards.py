"""Turns the gathers and scatters of a sharded job that was cut into a pipeline into those that its stages issue.

PyTorch's stages keep their parameters gathered after a backward pass and scatter gradients once, behind their last: a
pass gathers only what the pass before it gave away, which a forward does where parameters are resharded behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.buckets import is_gradient
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.removal import without_collectives
from scaletrace.extrapolate.rewrite.schedules import Op, Program
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, told, whole_bytes
from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import EdgeKind, NodeKind


def staged(state: State, program: Program, stages: Sequence[Sequence[int]]) -> State:
    """`state` laid in `program` with the units of each of `stages` (in model order), as its stages would gather."""
    gathers, scatters = _of_kind(state, "all_gather"), _of_kind(state, "reduce_scatter")
    replicas = _reductions(state, scatters)
    if not (gathers | scatters | replicas).any():
        return state
    anatomy = state.anatomy
    forward = anatomy.phase == int(Phase.FORWARD)
    backward = anatomy.phase == int(Phase.BACKWARD)
    reshards = bool((gathers & backward).any())
    stage_of = np.full(len(anatomy.units) + 1, -1, np.int64)
    for number, units in enumerate(stages):
        stage_of[list(units)] = number
    stage = stage_of[anatomy.unit]
    drop = np.zeros(len(state.graph), np.bool_)
    lost: list[int] = []
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
        if not program.finds_gradients(number, reshards):
            lost.append(number)
            last = -1
        drop |= mine & backward & (scatters | replicas) & (anatomy.micro_batch != last)
    # What is scattered behind backward belongs to the units that backward ends with.
    first = [column[program.rank_of_stage[0]] for column in state.columns]
    drop |= (scatters | replicas) & (stage < 0) & ~np.isin(state.graph.rank, first)
    if not drop.any():
        return state
    out = told(without_collectives(state, drop), "Stages gather parameters and reduce gradients as PyTorch's do.")
    return told(out, _unscattered(program.schedule, lost)) if lost else out


def _unscattered(schedule: str, stages: Sequence[int]) -> str:
    """What PyTorch does to the gradients of stages whose weights it can't find, and the remedy."""
    return (
        f"Under {schedule} PyTorch finds no gradients for the weights of stages {', '.join(map(str, stages))}, since each "
        "input backward follows a forward that gave the weights away; it scatters none. reshard_after_forward=False helps."
    )


def at_home(state: State, stages: Sequence[Sequence[int]]) -> State:
    """The state with each gather in the unit that it gathers where the pass issued it in a unit of another stage, as a
    prefetch does: no stage gathers for another one."""
    graph, anatomy = state.graph, state.anatomy
    stage_of = np.full(len(anatomy.units) + 1, -1, np.int64)
    for number, units in enumerate(stages):
        stage_of[list(units)] = number
    unit = anatomy.unit.copy()
    passes: dict[tuple[int, int, int, int], list[int]] = {}
    arrive = np.flatnonzero(_of_kind(state, "all_gather") & (graph.kind == int(NodeKind.ARRIVE)) & (anatomy.unit >= 0))
    for node in arrive.tolist():
        key = (int(graph.rank[node]), int(graph.step[node]), int(anatomy.micro_batch[node]), int(anatomy.phase[node]))
        passes.setdefault(key, []).append(node)
    moved: dict[tuple[int, int], int] = {}
    for (rank, _, _, phase), nodes in passes.items():
        for node, own in zip(nodes, _gathered(state, nodes, phase == int(Phase.BACKWARD)), strict=True):
            if own >= 0 and stage_of[own] != stage_of[unit[node]]:
                moved[rank, int(graph.instance[node])] = own
    if not moved:
        return state
    into = graph.edge_dst
    for node in np.flatnonzero(graph.instance >= 0).tolist():
        own = moved.get((int(graph.rank[node]), int(graph.instance[node])), -1)
        if own >= 0:
            unit[node] = own
    issues = np.isin(graph.edge_kind, [int(EdgeKind.HAND_OVER), int(EdgeKind.LAUNCH)]) & (unit != anatomy.unit)[into]
    calls = np.array([name.startswith("c10d") for name in graph.names] + [False], np.bool_)[graph.name]
    issues &= calls[graph.pred] & (graph.rank[graph.pred] == graph.rank[into])
    unit[graph.pred[issues]] = unit[into[issues]]
    return replace(state, anatomy=replace(anatomy, unit=unit))


def _gathered(state: State, nodes: Sequence[int], backward: bool) -> list[int]:
    """The unit that each gather of one pass is for, by its bytes and the order of units in that pass; -1 unknown."""
    graph, weights = state.graph, state.work.weights
    order = list(range(len(weights)))[::-1] if backward else list(range(len(weights)))
    out, at = [], 0
    for node in nodes:
        item = graph.collectives[int(graph.instance[node])]
        size = graph.groups[item.group].size
        whole = whole_bytes(item, size)
        found = -1
        for place in range(at, len(order)):
            elements = sharded_elements([weight.dims for weight in weights[order[place]]], size)
            if elements and whole in (elements, 2 * elements, 4 * elements):
                found, at = order[place], place + 1
                break
        out.append(found)
    return out


def _of_kind(state: State, kind: str) -> BoolArray:
    """Members of collectives of a kind over data ranks."""
    graph = state.graph
    own = [item.kind == kind and axis_of_item(item, graph.groups) in ("dp", "fsdp") for item in graph.collectives]
    return np.asarray(np.array([*own, False], np.bool_)[graph.instance], np.bool_)


def _reductions(state: State, scatters: BoolArray) -> BoolArray:
    """Reductions of gradients: over replicas of what was scattered, or of whole buckets."""
    if scatters.any():
        return _of_kind(state, "all_reduce")
    graph = state.graph
    own = [is_gradient(graph, item) for item in graph.collectives]
    return np.asarray(np.array([*own, False], np.bool_)[graph.instance], np.bool_)
