"""Turns a job whose ranks share no gradients into one that reduces them over a data axis of one rank, to be resized.

Behind the last backward of each unit in the last micro batch stands an all-reduce of the weights that its operators
read, and the rank's optimizer waits for it. Over one rank it moves nothing, so that the graph replays as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.kernels import Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, Layout
from scaletrace.extrapolate.rewrite.insert import finished
from scaletrace.extrapolate.rewrite.loom import Loom, Woven, reopen
from scaletrace.extrapolate.rewrite.removal import pruned, without_nodes
from scaletrace.extrapolate.rewrite.state import State, told
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind

LANE, NAME = "gradients over data ranks", "all_reduce of gradients"
SCALAR_BYTES = 64
"""An all-reduce of no more than this carries a loss or a norm, not gradients."""
REMEDY = "record the job with two data-parallel ranks"


def reduces_gradients(graph: Graph, layout: Layout) -> bool:
    """Whether a collective of a data axis carries gradients; a world of ranks that are no data ranks carries none."""
    data = layout.data_ranks * layout.cp

    def carries(item: GraphCollective) -> bool:
        if item.group < 0:
            return layout.ranks == data
        group = graph.groups[item.group]
        named = group.axis in DATA_AXES or (group.axis in ("world", "") and group.size == data == layout.ranks)
        return named and max(item.bytes_in, item.bytes_out) > SCALAR_BYTES

    kinds = ("all_reduce", "reduce_scatter", "custom", "reduce", "all_to_all", "all_gather")
    return any(item.kind in kinds and carries(item) for item in graph.collectives)


def trains(anatomy: Anatomy) -> bool:
    """Whether a backward pass was recorded, so that there are gradients."""
    return bool((anatomy.phase == int(Phase.BACKWARD)).any())


def with_gradients(state: State) -> State:
    """The state with all-reduces of gradients over one data rank, if it is trained and has none of its own.

    Raises UsageError where the weights are not known.
    """
    if reduces_gradients(state.graph, state.layout) or not trains(state.anatomy):
        return state
    products = [shape.element_bytes for shape in state.work.shape if shape is not None and shape.work is Work.MATMUL]
    width = max(set(products), key=products.count) if products else 4.0
    woven = woven_gradients(state.graph, state.anatomy, state.layout, width)
    return told(
        finished(state, woven),
        "Gradients are reduced over data ranks by all-reduces that were inserted: the job has none.",
    )


def without_gradients(state: State) -> State:
    """The state without what `with_gradients` put in."""
    graph = state.graph
    own = np.array([lane.name == LANE for lane in graph.lanes] + [False], np.bool_)[graph.lane]
    if not own.any():
        return state
    out = without_nodes(state, own)
    return replace(out, graph=pruned(out.graph, (LANE,), NAME.__eq__, lambda group: group.description == LANE))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where all-reduces of one rank and step go: behind `last` of each unit, ahead of the optimizer (-1: none)."""

    last: dict[int, int]
    optimizer: int


def woven_gradients(graph: Graph, anatomy: Anatomy, layout: Layout, element_bytes: float) -> Woven:
    """The graph with an all-reduce over one data rank for each unit, rank and step.

    Raises UsageError where the weights of a layer are not known.
    """
    known = anatomy.parameters
    if not known.sum() or any(layer and not count for layer, count in zip(anatomy.is_layer, known, strict=True)):
        raise UsageError(
            "the job shares no gradients and its weights are not known, so that none can be inserted for more data "
            f"ranks; {REMEDY} or with record_shapes=True"
        )
    loom = reopen(graph, anatomy.exact_ns, anatomy.entry)
    group = len(loom.groups)
    loom.groups.append(GraphGroup("dp", 1, layout.span("dp").stride, 1, LANE))
    for place in _places(graph, anatomy):
        before = -1
        ends = max(place.last.values())
        for unit, last in sorted(place.last.items(), key=lambda pair: pair[1]):
            size = round(float(known[unit]) * element_bytes)
            if size > 0:
                before = _reduce(loom, graph, group, size, last, before)
        if before >= 0 and place.optimizer > ends:
            loom.edge(before, place.optimizer, EdgeKind.EVENT_WAIT)
    return loom.finish()


def _reduce(loom: Loom, graph: Graph, group: int, size: int, last: int, before: int) -> int:
    """One all-reduce behind node `last` and the one before: its TRANSFER."""
    rank = int(graph.rank[last])
    columns = {
        "rank": rank,
        "lane": loom.lane(rank, LANE, True),
        "name": loom.name(NAME),
        "instance": len(loom.collectives),
        "step": int(graph.step[last]),
        "key": last,
    }
    loom.collectives.append(GraphCollective("all_reduce", group, size, size))
    arrive = loom.node(NodeKind.ARRIVE, **columns)
    transfer = loom.node(NodeKind.TRANSFER, **columns)
    loom.edge(last, arrive, EdgeKind.EVENT_WAIT)
    if before >= 0:
        loom.edge(before, arrive, EdgeKind.STREAM)
    loom.edge(arrive, transfer, EdgeKind.STREAM)
    return transfer


def _places(graph: Graph, anatomy: Anatomy) -> list[_Place]:
    """For each rank and step the last node of every unit's backward; a unit without one counts with the rank's last."""
    kernels = (graph.kind == int(NodeKind.KERNEL)) & (graph.instance < 0)
    work = kernels if kernels.any() else (graph.kind == int(NodeKind.HOST)) & (graph.instance < 0)
    nodes = np.flatnonzero(work & (graph.step >= 0))
    out = []
    for code in np.unique(graph.rank[nodes].astype(np.int64) * 2**32 + graph.step[nodes]).tolist():
        mine = nodes[(graph.rank[nodes] == code >> 32) & (graph.step[nodes] == code & (2**32 - 1))]
        last = _lasts(anatomy, mine)
        if last:
            optimizer = mine[(anatomy.phase[mine] == int(Phase.OPTIMIZER)) & (mine > max(last.values()))]
            out.append(_Place(last, int(optimizer[0]) if len(optimizer) else -1))
    return out


def _lasts(anatomy: Anatomy, mine: IntArray) -> dict[int, int]:
    """Unit → last node of its backward, among the nodes of one rank and step."""
    backward = mine[(anatomy.phase[mine] == int(Phase.BACKWARD)) & (anatomy.unit[mine] >= 0)]
    last = dict(zip(anatomy.unit[backward].tolist(), backward.tolist(), strict=True))
    if last:
        end = max(last.values())
        forward = mine[(anatomy.phase[mine] == int(Phase.FORWARD)) & (anatomy.unit[mine] >= 0)]
        for unit in np.unique(anatomy.unit[forward]).tolist():
            last.setdefault(unit, end)
    return last
