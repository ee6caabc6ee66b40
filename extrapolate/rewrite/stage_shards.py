"""Turns the gathers and scatters of a sharded job that was cut into a pipeline into those that its stages issue.

PyTorch's stages keep their parameters gathered after a backward pass and scatter gradients once, behind their last: a
pass gathers only what was given away before it (fetches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.buckets import is_gradient
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.fetches import fetches
from scaletrace.extrapolate.rewrite.removal import without_collectives
from scaletrace.extrapolate.rewrite.schedules import Op, Program, build
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, told, whole_bytes
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind


def staged(state: State, program: Program, stages: Sequence[Sequence[int]], recorded: int = 1) -> State:
    """`state` laid in `program` with the units of each of `stages` (in model order), as its stages would gather.

    recorded: how many pipeline ranks it was laid from
    """
    gathers, scatters = _of_kind(state, "all_gather"), _of_kind(state, "reduce_scatter")
    replicas = _reductions(state, scatters)
    if not (gathers | scatters | replicas).any():
        return state
    anatomy = state.anatomy
    forward = anatomy.phase == int(Phase.FORWARD)
    backward = anatomy.phase == int(Phase.BACKWARD)
    reshards = _resharded(state, gathers, backward)
    stage = _stage_of(state, stages)[anatomy.unit]
    drop = np.zeros(len(state.graph), np.bool_)
    lost: list[int] = []
    for rank in range(program.ranks):
        for resharded in np.unique(reshards).tolist():
            fetched = fetches(program, rank, resharded)
            of_kind = reshards == resharded
            for number in (number for number in range(program.stages) if program.rank_of_stage[number] == rank):
                mine = of_kind & (stage == number)
                row = [a for a in program.actions[rank] if a.stage == number and a.op is not Op.WEIGHT]
                for action in row:
                    if action not in fetched.passes:
                        here = mine & (forward if action.op is Op.FORWARD else backward)
                        drop |= here & gathers & (anatomy.micro_batch == action.micro_batch)
                if number not in fetched.finds and (mine & (scatters | replicas)).any():
                    lost.append(number)
                    drop |= mine & (scatters | replicas)
                last = row[-1].micro_batch if row else -1
                drop |= mine & backward & (scatters | replicas) & (anatomy.micro_batch != last)
    # What is scattered for no unit that is known is each recorded rank's once.
    homes = [
        home
        for home in range(program.ranks)
        if home * recorded // program.ranks != (home - 1) * recorded // program.ranks
    ]
    first = [column[home] for column in state.columns for home in homes]
    drop |= (scatters | replicas) & (stage < 0) & ~np.isin(state.graph.rank, first)
    if not drop.any():
        return state
    out = told(without_collectives(state, drop), "Stages gather parameters and reduce gradients as PyTorch's do.")
    return told(out, _unscattered(program.schedule, lost)) if lost else out


def _stage_of(state: State, stages: Sequence[Sequence[int]]) -> IntArray:
    """Stage of each unit, int64[units + 1]; -1 for none, which comes last."""
    out = np.full(len(state.anatomy.units) + 1, -1, np.int64)
    for number, units in enumerate(stages):
        out[list(units)] = number
    return out


def _resharded(state: State, gathers: BoolArray, backward: BoolArray) -> BoolArray:
    """Whether forward gives the weights away that a node gathers, or those of its unit, bool[n]: where others are gathered
    in backward passes and these are not, they are a root's, which FSDP keeps."""
    graph = state.graph

    def sizes(where: BoolArray) -> dict[tuple[int, int], list[int]]:
        out: dict[tuple[int, int], list[int]] = {}
        for at in np.unique(graph.instance[where & gathers]).tolist():
            item = graph.collectives[at]
            ranks = graph.groups[item.group].size
            out.setdefault((ranks, whole_bytes(item, ranks)), []).append(at)
        return out

    again = sizes(backward)
    once = {key: found for key, found in sizes(~backward).items() if key not in again}
    kept = np.zeros(len(state.anatomy.units) + 1, np.bool_)
    for unit, weights in enumerate(state.work.weights):
        elements = {ranks: sharded_elements([weight.dims for weight in weights], ranks) for ranks, _ in once}
        kept[unit] = any(whole in (elements[ranks] * width for width in (1, 2, 4)) for ranks, whole in once)
    of_node = kept[state.anatomy.unit]
    of_node[gathers] = np.isin(graph.instance[gathers], [at for found in once.values() for at in found])
    return np.asarray(~of_node & bool(again), np.bool_)


def _unscattered(schedule: str, stages: Sequence[int]) -> str:
    """What PyTorch does to the gradients of stages whose weights it can't find, and the remedy."""
    return (
        f"Under {schedule} PyTorch finds no gradients for the weights of stages {', '.join(map(str, stages))}, since each "
        "input backward follows a forward that gave the weights away; it scatters none. reshard_after_forward=False helps."
    )


def at_home(state: State, stages: Sequence[Sequence[int]]) -> State:
    """The state, not yet cut, with each gather in the unit that it gathers where the pass issued it in a unit of another
    stage, as a prefetch does; and with the scatters of its last backward pass alone, behind that pass.

    No stage gathers for another one, and PyTorch's stages scatter when all of their backward passes are done.
    """
    held = {int(rank): _held(state, int(rank)) for rank in np.unique(state.graph.rank) if rank >= 0}
    return _behind(_fetched(state, stages, held), held)


def _held(state: State, rank: int) -> list[int]:
    """Units that a rank works on, in model order."""
    anatomy = state.anatomy
    mine = (state.graph.rank == rank) & (anatomy.unit >= 0) & (anatomy.phase == int(Phase.FORWARD))
    return [int(unit) for unit in np.unique(anatomy.unit[mine])]


def _fetched(state: State, stages: Sequence[Sequence[int]], held: Mapping[int, list[int]]) -> State:
    graph, anatomy = state.graph, state.anatomy
    stage_of = _stage_of(state, stages)
    gathers = _of_kind(state, "all_gather") & (anatomy.unit >= 0)
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    for (rank, _, phase), nodes in _passing(state, gathers).items():
        forward = phase == int(Phase.FORWARD)
        cycles = _cycles(state, nodes, held[rank] if forward else held[rank][::-1])
        needed = _needed(state, rank, forward, bool((gathers & (anatomy.phase == int(Phase.BACKWARD))).any()))
        for number, cycle in enumerate(cycles):
            for node, own in cycle.items():
                # A pass gathers for the next one when its own last layer is done.
                batch = needed[number] if len(needed) == len(cycles) else int(anatomy.micro_batch[node])
                if own >= 0 and (stage_of[own] != stage_of[anatomy.unit[node]] or batch != anatomy.micro_batch[node]):
                    moved[rank, int(graph.instance[node])] = own, batch
    if not moved:
        return state
    unit, micro_batch = anatomy.unit.copy(), anatomy.micro_batch.copy()
    changed = np.zeros(len(graph), np.bool_)
    for node in np.flatnonzero(graph.instance >= 0).tolist():
        to = moved.get((int(graph.rank[node]), int(graph.instance[node])))
        if to is not None:
            unit[node], micro_batch[node] = to
            changed[node] = True
    calls = _calls(state, changed)
    for column in (unit, micro_batch):
        column[graph.pred[calls]] = column[graph.edge_dst[calls]]
    return replace(state, anatomy=replace(anatomy, unit=unit, micro_batch=micro_batch))


def _passing(state: State, gathers: BoolArray) -> dict[tuple[int, int, int], list[int]]:
    """ARRIVE nodes of gathers by rank, step and phase, in order."""
    graph = state.graph
    out: dict[tuple[int, int, int], list[int]] = {}
    for node in np.flatnonzero(gathers & (graph.kind == int(NodeKind.ARRIVE))).tolist():
        key = (int(graph.rank[node]), int(graph.step[node]), int(state.anatomy.phase[node]))
        out.setdefault(key, []).append(node)
    return out


def _needed(state: State, rank: int, forward: bool, reshards: bool) -> list[int]:
    """The micro batches whose forward (or backward) gathers on a measured rank, in order; empty where not known."""
    layout = state.layout
    if layout.chunks > 1:
        return []
    if layout.pp == 1:
        return list(range(layout.microbatches))
    program = build(layout.pipeline_schedule, layout.pp, layout.microbatches, 1)
    home = layout.coordinates(rank)["pp"]
    passes = fetches(program, home, reshards).passes
    of_phase = [action for action in program.actions[home] if (action.op is Op.FORWARD) == forward]
    return [action.micro_batch for action in of_phase if action in passes]


def _cycles(state: State, nodes: Sequence[int], order: Sequence[int]) -> list[dict[int, int]]:
    """Node → unit of the gathers of each pass; a unit that comes again begins the next pass."""
    out: list[dict[int, int]] = []
    rest = list(nodes)
    while rest:
        found = _units_of(state, rest, order)
        end = next((at for at, own in enumerate(found) if own < 0), len(found))
        end = end if end else 1
        out.append(dict(zip(rest[:end], found[:end], strict=True)))
        rest = rest[end:]
    return out


def _calls(state: State, members: BoolArray) -> BoolArray:
    """Mask of the edges from the calls that issue members of collectives to those."""
    graph, into = state.graph, state.graph.edge_dst
    issues = np.isin(graph.edge_kind, [int(EdgeKind.HAND_OVER), int(EdgeKind.LAUNCH)]) & members[into]
    calls = np.array([name.startswith("c10d") for name in graph.names] + [False], np.bool_)[graph.name]
    return np.asarray(issues & calls[graph.pred] & (graph.rank[graph.pred] == graph.rank[into]), np.bool_)


def _units_of(state: State, nodes: Sequence[int], order: Sequence[int]) -> list[int]:
    """The unit whose parameters each gather or scatter of one pass holds, by its bytes and the order of units in that
    pass; -1 unknown."""
    graph, weights = state.graph, state.work.weights
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


def _behind(state: State, held: Mapping[int, list[int]]) -> State:
    """The scatters of the last backward pass behind it, each still its unit's, and none of the other passes."""
    graph, anatomy = state.graph, state.anatomy
    scatters = _of_kind(state, "reduce_scatter")
    if not scatters.any():
        return state
    last = max(0, anatomy.micro_batches - 1)
    staged_already = state.layout.pp > 1
    arrive = np.flatnonzero((scatters | _reductions(state, scatters)) & (graph.kind == int(NodeKind.ARRIVE)))
    rows: dict[tuple[int, int], list[int]] = {}
    for node in arrive.tolist():
        rows.setdefault((int(graph.rank[node]), int(graph.step[node])), []).append(node)
    drop = np.zeros(len(graph), np.bool_)
    unit, batch, phase = anatomy.unit.copy(), anatomy.micro_batch.copy(), anatomy.phase.copy()
    for (rank, step), nodes in rows.items():
        mine = (graph.rank == rank) & (graph.step == step)
        order = held[rank] if staged_already else held[rank][::-1]
        passes = _by_pass(anatomy.micro_batch, nodes, last)
        for number, of_pass in passes.items():
            if number != max(passes):
                drop |= mine & np.isin(graph.instance, graph.instance[of_pass])
                continue
            owners = _owners(state, of_pass, scatters, order)
            for node, own in owners.items():
                members = mine & (graph.instance == graph.instance[node])
                issued = [*np.flatnonzero(members).tolist(), *graph.pred[_calls(state, members)].tolist()]
                unit[issued], batch[issued], phase[issued] = own, -1, int(Phase.OPTIMIZER)
            if staged_already:
                _with_copies(graph, phase, unit, mine, owners)
    out = replace(state, anatomy=replace(anatomy, unit=unit, micro_batch=batch, phase=phase))
    return without_collectives(out, drop) if drop.any() else out


def _by_pass(micro_batch: Int32Array, nodes: Sequence[int], last: int) -> dict[int, list[int]]:
    """Reductions by the backward pass that issued them; one outside any pass belongs to that before it, else the last."""
    out: dict[int, list[int]] = {}
    before = -1
    for node in nodes:
        before = int(micro_batch[node]) if micro_batch[node] >= 0 else before
        out.setdefault(before if before >= 0 else last, []).append(node)
    return out


def _owners(state: State, nodes: Sequence[int], scatters: BoolArray, order: Sequence[int]) -> dict[int, int]:
    """Node → unit of the reductions of one pass; a reduction over replicas is that of the scatter before it. Left out:
    what neither bytes nor the place of issue tell."""
    first = [node for node in nodes if scatters[node]]
    found = dict(zip(first, _units_of(state, first, order), strict=True))
    out: dict[int, int] = {}
    behind = dict(zip((node for node in nodes if not scatters[node]), first, strict=False))
    for node in nodes:
        own = found.get(behind.get(node, node), -1)
        own = own if own >= 0 else int(state.anatomy.unit[node])
        if own >= 0:
            out[node] = own
    return out


def _with_copies(graph: Graph, phase: ByteArray, unit: Int32Array, mine: BoolArray, owners: Mapping[int, int]) -> None:
    """What runs between two scatters behind the backward pass makes the second one ready, so it goes with that; in
    place."""
    inside = np.flatnonzero(mine & (phase == int(Phase.BACKWARD)))
    begin = int(inside[-1]) + 1 if len(inside) else 0
    for node, own in sorted(owners.items()):
        between = np.flatnonzero(mine[begin:node]) + begin
        free = between[(unit[between] < 0) & (graph.instance[between] < 0)]
        unit[free], phase[free] = own, int(Phase.OPTIMIZER)
        begin = max(begin, node)


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
