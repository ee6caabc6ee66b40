"""Turns a job whose embedding and head share weights into a pipeline whose first and last stage sum their gradients.

Both stages hold a copy then. Behind all other reductions, ahead of the optimizer, an all-reduce between the two keeps
the copies alike (Megatron's `_allreduce_word_embedding_grads`). A recorded one is known by its group, which belongs to
the pipeline and carries more than a number; where no pipeline was recorded, what the job accumulates and reduces tells
whether the gradient is one or two. PyTorch's own stages share no weights, so there it is what a user has to add.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.gradients import SCALAR_BYTES, trains
from scaletrace.extrapolate.rewrite.insert import finished, neighbours
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.extrapolate.rewrite.precision import GRADIENTS, measured_bytes
from scaletrace.extrapolate.rewrite.removal import without_collectives
from scaletrace.extrapolate.rewrite.schedules import Program
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, cost_s, told
from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import EdgeKind, GraphCollective, GraphGroup, NodeKind

LANE, NAME, GROUP = "shared embedding", "all_reduce of the embedding's gradient", "embedding"
LEFT_OUT = (
    "Whether embedding and head share weights is not told by the trace; if they do, the all-reduce of their gradient "
    "between the first and the last stage is left out."
)


@dataclass(frozen=True, slots=True)
class Tied:
    """The gradient that two stages share, and how long its all-reduce takes, in times of the cost model's."""

    size_bytes: int
    level: float = 1.0


def of_embedding(item: GraphCollective, groups: tuple[GraphGroup, ...]) -> bool:
    """Whether a collective sums the gradient of weights that two stages share."""
    return item.kind == "all_reduce" and item.bytes_in > SCALAR_BYTES and axis_of_item(item, groups) == "pp"


def untied(state: State) -> tuple[State, Tied | None]:
    """The state, to be cut anew, without the all-reduces between its stages, and what they were or will have to be.

    None where weights are not shared, or where nothing tells.
    """
    graph = state.graph
    own = np.array([of_embedding(item, graph.groups) for item in graph.collectives] + [False], np.bool_)[graph.instance]
    if own.any():
        return without_collectives(state, own), _recorded(state, own)
    if state.layout.pp > 1 or not trains(state.anatomy):
        return state, None
    elements = _vocabulary(state)
    shared = None if elements < 0 else bool(elements) and _shared(state, elements)
    if shared is None:
        return told(state, LEFT_OUT), None
    if not shared:
        return state, None
    size = round(elements * (measured_bytes(state) or 4.0))
    found = told(
        state, f"Embedding and head share weights: the first and the last stage sum their gradients, {size:,} bytes."
    )
    return found, Tied(size)


def _recorded(state: State, own: BoolArray) -> Tied:
    graph = state.graph
    nodes = np.flatnonzero(own & (graph.kind == int(NodeKind.TRANSFER)))
    items = [graph.collectives[at] for at in graph.instance[nodes].tolist()]
    model = np.array([cost_s(state.network, item, graph.groups) for item in items]) * 1e9
    known = model > 0
    level = float(np.median(graph.dur_ns[nodes][known] / model[known])) if known.any() else 1.0
    return Tied(max(item.bytes_in for item in items), level or 1.0)


def _vocabulary(state: State) -> int:
    """Elements of the matrix that embedding and head read alike; 0: they don't, -1: no shape tells."""
    anatomy, weights = state.anatomy, state.work.weights
    layers = [unit for unit, is_layer in enumerate(anatomy.is_layer) if is_layer]
    if not layers or not any(weights):
        return -1
    before, after = (
        {weight.dims for unit in units for weight in weights[unit] if len(weight.dims) == 2}
        for units in (range(layers[0]), range(layers[-1] + 1, len(anatomy.units)))
    )
    return max((int(np.prod(dims)) for dims in before & after), default=0)


def _shared(state: State, elements: int) -> bool | None:
    """Whether the gradients of two equal matrices are one, by how many are accumulated, else by how much is reduced."""
    counts = _accumulated(state, elements)
    if counts in (1, 2):
        return counts == 1
    every = [weight.dims for unit in state.work.weights for weight in unit]
    for size, moved in _reduced(state):
        whole = sharded_elements(every, size)
        once = whole - sharded_elements(_one_of(state, elements), size)
        passes = (1, max(1, state.layout.microbatches))
        if any(moved == count * width * whole for count in passes for width in (4, 2)):
            return False
        if any(moved == count * width * once for count in passes for width in (4, 2)):
            return True
    return None


def _one_of(state: State, elements: int) -> list[tuple[int, ...]]:
    """Dimensions of one of the two equal matrices."""
    dims = (weight.dims for unit in state.work.weights for weight in unit)
    return [next(each for each in dims if len(each) == 2 and int(np.prod(each)) == elements)]


def _accumulated(state: State, elements: int) -> float:
    """How many gradients of the shared size one backward pass accumulates, 0 where shapes don't tell.

    How many passes there were, the gradients of the layers' weights tell: each is accumulated once in each.
    """
    own = tuple(_one_of(state, elements)[0])
    layers = [unit for unit, is_layer in zip(state.work.weights, state.anatomy.is_layer, strict=True) if is_layer]
    held = Counter(weight.dims for unit in layers for weight in unit if len(weight.dims) == 2)
    passes = Counter(state.accumulated.get(dims, 0) / count for dims, count in held.items() if dims != own)
    # What embedding or head have of the same shape as a layer's weight counts with that, so most shapes decide.
    (most, shapes), *_ = passes.most_common(1) or [(0.0, 0)]
    if own in held or not most or 2 * shapes <= passes.total():
        return 0.0
    return state.accumulated.get(own, 0) / most


def _reduced(state: State) -> list[tuple[int, int]]:
    """(ranks that a vector is padded for, bytes of gradients) that a rank reduces in a step, scattered or whole."""
    graph = state.graph
    arrive = np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.instance >= 0))
    sums: dict[tuple[int, int, str, int], int] = defaultdict(int)
    for node in arrive.tolist():
        item = graph.collectives[int(graph.instance[node])]
        axis = axis_of_item(item, graph.groups)
        if item.kind in GRADIENTS and item.bytes_in > SCALAR_BYTES and axis in (*DATA_AXES, "world", ""):
            size = graph.groups[item.group].size if item.kind == "reduce_scatter" else 1
            sums[int(graph.rank[node]), int(graph.step[node]), item.kind, size] += item.bytes_in
    scattered = {(size, moved) for (_, _, kind, size), moved in sums.items() if kind == "reduce_scatter"}
    return sorted(scattered or {(size, moved) for (_, _, _, size), moved in sums.items()})


def tied(state: State, program: Program, shared: Tied | None) -> State:
    """The laid state with the all-reduce of `shared` in every step and column; both ends on one rank need none."""
    first, last = program.rank_of_stage[0], program.rank_of_stage[program.stages - 1]
    if shared is None or first == last:
        return state
    graph, anatomy = state.graph, state.anatomy
    strides = [group.stride for group in graph.groups if group.axis == "pp" and group.size == program.ranks]
    group = GraphGroup("pp", 2, abs(last - first) * max(1, *strides, 1), 1, GROUP)
    loom = reopen(graph, anatomy.exact_ns, anatomy.entry)
    loom.groups.append(group)
    seconds = state.network.seconds("all_reduce", shared.size_bytes, 2, group.stride) * shared.level
    before, _ = neighbours(graph)
    for column in state.columns:
        ranks = column[first], column[last]
        for step in np.unique(graph.step[graph.step >= 0]).tolist():
            ends = [_end(state, rank, step) for rank in ranks]
            if min(ends) >= 0:
                ahead = [
                    [int(before[end]), *_reductions(state, rank, step)] for rank, end in zip(ranks, ends, strict=True)
                ]
                _sum(loom, ends, ahead, state, shared.size_bytes, round(seconds * 1e9))
    return finished(state, loom.finish(), [(int(Phase.OPTIMIZER), -1, -1)])


def _end(state: State, rank: int, step: int) -> int:
    """The first node that computes behind the backward passes of a rank and step, -1 without one."""
    graph, anatomy = state.graph, state.anatomy
    mine = (graph.rank == rank) & (graph.step == step) & (graph.instance < 0)
    kernels = mine & (graph.kind == int(NodeKind.KERNEL))
    work = kernels if kernels.any() else mine & (graph.kind == int(NodeKind.HOST))
    ends = np.flatnonzero(work & (anatomy.phase == int(Phase.OPTIMIZER)) & (anatomy.unit < 0))
    return int(ends[0]) if len(ends) else -1


def _reductions(state: State, rank: int, step: int) -> list[int]:
    """Transfers of gradients over data ranks in a rank's step."""
    graph = state.graph
    own = [item.kind in GRADIENTS and axis_of_item(item, graph.groups) in (*DATA_AXES, "world") and
           item.bytes_in > SCALAR_BYTES for item in graph.collectives]  # fmt: skip
    mine = np.array([*own, False], np.bool_)[graph.instance] & (graph.kind == int(NodeKind.TRANSFER))
    return [int(node) for node in np.flatnonzero(mine & (graph.rank == rank) & (graph.step == step))]


def _sum(
    loom: Loom, ends: list[int], ahead: list[list[int]], state: State, size_bytes: int, dur_ns: int
) -> None:  # fmt: skip
    """One all-reduce of two ranks: behind what is `ahead` on each, before its node of `ends`."""
    graph, instance = state.graph, len(loom.collectives)
    loom.collectives.append(GraphCollective("all_reduce", len(loom.groups) - 1, size_bytes, size_bytes))
    arrived, moved = [], []
    for end, others in zip(ends, ahead, strict=True):
        rank = int(graph.rank[end])
        columns = {"rank": rank, "lane": loom.lane(rank, LANE, True), "name": loom.name(NAME), "instance": instance,
                   "step": int(graph.step[end]), "key": max([*others, 0]), "event": 0}  # fmt: skip
        arrived.append(loom.node(NodeKind.ARRIVE, **columns))
        moved.append(loom.node(NodeKind.TRANSFER, dur_ns=dur_ns, **columns))
        for node in others:
            if node >= 0:
                loom.edge(node, arrived[-1], EdgeKind.EVENT_WAIT)
        loom.edge(arrived[-1], moved[-1], EdgeKind.STREAM)
        loom.edge(moved[-1], end, EdgeKind.EVENT_WAIT)
    loom.meet(arrived, moved, int(graph.step[ends[0]]))
