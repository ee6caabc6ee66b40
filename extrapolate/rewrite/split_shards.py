"""Turns gathers and scatters that hold the weights of several stages into one for each of those stages.

FSDP's root module holds what no wrapped module inside it does: embedding, last norm and head. PyTorch wraps each stage by
itself, so each has a root of its own, with its part. What a group holds is told by its bytes; where they are no unit's and
no root's (a model that is wrapped once, weights without shapes), it stays with the stage that issues it, and that is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.rewrite.insert import finished, neighbours
from scaletrace.extrapolate.rewrite.loom import reopen
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, cost_s, told, whole_bytes
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, GraphCollective, NodeKind

WIDTHS = (4, 2, 1)
SHARDED = ("all_gather", "reduce_scatter")
Part = tuple[int, GraphCollective]
"""The first unit of a stage that a root holds weights of, and the collective of these."""


def split_shards(state: State, stages: Sequence[Sequence[int]]) -> State:
    """`state`, not yet cut, with each root group divided among `stages` (units of each in model order)."""
    root = _root(state, stages)
    if len(root) < 2:
        return state
    graph = state.graph
    found: dict[int, list[Part]] = {}
    shards: dict[int, list[Part]] = {}
    blind = 0
    for at in np.unique(graph.instance[graph.instance >= 0]).tolist():
        item = graph.collectives[at]
        if item.kind in SHARDED and axis_of_item(item, graph.groups) in DATA_AXES:
            parts = _parts(state, item, root)
            if parts:
                found[at] = parts
                shards |= {item.bytes_out: parts} if item.kind == "reduce_scatter" else {}
            blind += not parts and not _is_known(state, item)
    for at, item in enumerate(graph.collectives):
        if item.kind == "all_reduce" and item.bytes_in in shards and axis_of_item(item, graph.groups) in DATA_AXES:
            found[at] = [(unit, _reduced(item, part)) for unit, part in shards[item.bytes_in]]
    if blind and any(state.work.weights):
        state = told(
            state, guess="gathers and scatters that are no unit's and no root's, left to the stage that issues them"
        )
    return _Split(state).split(found) if found else state


def _root(state: State, stages: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a root holds of each stage that it holds something of: units that are no layers."""
    weights, is_layer = state.work.weights, state.anatomy.is_layer
    ends = [[unit for unit in units if weights[unit] and not is_layer[unit]] for units in stages]
    return [units for units in ends if units]


def _elements(state: State, units: Sequence[int], ranks: int) -> int:
    return sharded_elements([weight.dims for unit in units for weight in state.work.weights[unit]], ranks)


def _is_known(state: State, item: GraphCollective) -> bool:
    """Whether a gather or scatter holds just one unit's weights."""
    ranks = state.graph.groups[item.group].size
    whole = whole_bytes(item, ranks)
    sizes = [_elements(state, [unit], ranks) for unit in range(len(state.work.weights))]
    return any(size and whole == width * size for size in sizes for width in WIDTHS)


def _parts(state: State, item: GraphCollective, root: Sequence[Sequence[int]]) -> list[Part]:
    """What each stage's root moves in place of `item`, none where it is not the root's or may be one unit's."""
    ranks = state.graph.groups[item.group].size
    whole = whole_bytes(item, ranks)
    if _is_known(state, item):
        return []
    sizes = [_elements(state, units, ranks) for units in root]
    for width in WIDTHS:
        if whole == width * sum(sizes) > 0:
            return [(units[0], _sized(item, width * size, ranks)) for units, size in zip(root, sizes, strict=True)]
    return []


def _sized(item: GraphCollective, whole: int, ranks: int) -> GraphCollective:
    shard = -(-whole // ranks)
    sides = (shard, whole) if item.kind == "all_gather" else (whole, shard)
    return GraphCollective(item.kind, item.group, *sides, item.dtype)


def _reduced(item: GraphCollective, scatter: GraphCollective) -> GraphCollective:
    """The sum over replicas of what a scatter leaves."""
    return GraphCollective(item.kind, item.group, scatter.bytes_out, scatter.bytes_out, item.dtype)


class _Split:
    """The graph while parts are added; the first part of each group keeps the recorded nodes."""

    def __init__(self, state: State) -> None:
        self.state, self.graph = state, state.graph
        self.loom = reopen(state.graph, state.anatomy.exact_ns, state.anatomy.entry)
        self.places: list[tuple[int, int, int]] = []
        self.before, _ = neighbours(state.graph)
        edges = np.flatnonzero(state.graph.kind[state.graph.pred] == int(NodeKind.TRANSFER))
        self.leave: dict[int, list[int]] = {}
        for edge in edges.tolist():
            self.leave.setdefault(int(state.graph.pred[edge]), []).append(edge)

    def split(self, found: dict[int, list[Part]]) -> State:
        """The state with `found`: the parts of each collective."""
        graph, exact = self.graph, self.loom.exact_ns
        for instance, parts in found.items():
            members = np.flatnonzero(graph.instance == instance)
            costs = [cost_s(self.state.network, part, graph.groups) for _, part in parts]
            whole = cost_s(self.state.network, graph.collectives[instance], graph.groups)
            shares = [cost / whole if whole > 0 else 1.0 for cost in costs]
            for (unit, part), share in zip(parts[1:], shares[1:], strict=True):
                self._add(members, unit, part, share)
            self.loom.collectives[instance] = parts[0][1]
            exact[members[graph.kind[members] == int(NodeKind.TRANSFER)]] *= shares[0]
        return finished(self.state, self.loom.finish(), self.places)

    def _add(self, members: IntArray, unit: int, part: GraphCollective, share: float) -> None:
        """One more collective like that of `members`, on each of their ranks."""
        graph = self.graph
        instance = len(self.loom.collectives)
        self.loom.collectives.append(part)
        arrived, moved = [], []
        for rank in np.unique(graph.rank[members]).tolist():
            mine = members[graph.rank[members] == rank]
            arrive, transfer = (
                int(mine[graph.kind[mine] == int(kind)][0]) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER)
            )
            ends = self._forward(arrive, unit) if part.kind == "all_gather" else self._backward(arrive, unit)
            pair = self._pair(arrive, transfer, unit, instance, share, ends[0])
            self._join(pair, transfer, *ends, gathers=part.kind == "all_gather")
            arrived.append(pair[0])
            moved.append(pair[1])
        self.loom.meet(arrived, moved, int(graph.step[members[0]]))

    def _nodes(self, arrive: int, unit: int, phase: Phase) -> IntArray:
        """What computes for a unit in the pass, or the last such pass, that issued a collective."""
        graph, anatomy = self.graph, self.state.anatomy
        mine = (graph.rank == graph.rank[arrive]) & (graph.step == graph.step[arrive]) & (anatomy.unit == unit)
        mine &= (anatomy.phase == int(phase)) & (graph.instance < 0)
        batches = anatomy.micro_batch[mine]
        if not len(batches):
            return np.zeros(0, np.int64)
        own = int(anatomy.micro_batch[arrive])
        batch = own if (batches == own).any() else int(batches[0] if phase is Phase.FORWARD else batches[-1])
        nodes = np.flatnonzero(mine & (anatomy.micro_batch == batch))
        work: BoolArray = self.state.work.computes[nodes]
        return nodes[work] if work.any() else nodes

    def _forward(self, arrive: int, unit: int) -> tuple[int, int]:
        """(node behind which a gather is issued, node that needs it)."""
        nodes = self._nodes(arrive, unit, Phase(int(self.state.anatomy.phase[arrive])))
        return (int(self.before[nodes[0]]), int(nodes[0])) if len(nodes) else (arrive, -1)

    def _backward(self, arrive: int, unit: int) -> tuple[int, int]:
        """(node behind which gradients are there, nothing that is known to need their sum)."""
        nodes = self._nodes(arrive, unit, Phase.BACKWARD)
        return (int(nodes[-1]) if len(nodes) else arrive), -1

    def _pair(self, arrive: int, transfer: int, unit: int, instance: int, share: float, behind: int) -> tuple[int, int]:
        graph, anatomy = self.graph, self.state.anatomy
        columns = {"rank": int(graph.rank[arrive]), "step": int(graph.step[arrive]), "instance": instance,
                   "key": behind if behind >= 0 else arrive, "event": len(self.places)}  # fmt: skip
        of_batch = int(anatomy.micro_batch[max(behind, 0)])
        phase = int(anatomy.phase[arrive])
        self.places.append((phase, unit, of_batch if phase == int(Phase.FORWARD) else int(anatomy.micro_batch[arrive])))
        out = []
        for like, kind in ((arrive, NodeKind.ARRIVE), (transfer, NodeKind.TRANSFER)):
            dur_ns = round(self.state.anatomy.exact_ns[like] * share) if kind is NodeKind.TRANSFER else 0
            look = {"lane": int(graph.lane[like]), "name": int(graph.name[like]), "dur_ns": dur_ns}
            out.append(self.loom.node(kind, **columns, **look))
        self.loom.edge(out[0], out[1], EdgeKind.STREAM)
        return out[0], out[1]

    def _join(self, pair: tuple[int, int], like: int, behind: int, needs: int, *, gathers: bool) -> None:
        """Let the part wait for what comes before it, also on its stream, and hold up who needs it."""
        graph, loom = self.graph, self.loom
        if behind >= 0:
            kind = EdgeKind.HAND_OVER if gathers and behind >= 0 else EdgeKind.EVENT_WAIT
            loom.edge(behind, pair[0], kind)
        if needs >= 0:
            loom.edge(pair[1], needs, EdgeKind.EVENT_WAIT)
        lane = np.flatnonzero((graph.lane == graph.lane[like]) & (graph.kind != int(NodeKind.RENDEZVOUS)))
        at = int(np.searchsorted(lane, behind, side="right"))
        if at:
            loom.edge(int(lane[at - 1]), pair[0], EdgeKind.STREAM)
        if at < len(lane) and graph.lane[lane[at]] >= 0:
            loom.edge(pair[1], int(lane[at]), EdgeKind.STREAM)
        if not gathers:
            for edge in self.leave.get(like, []):
                to = int(graph.edge_dst[edge])
                if to > behind and graph.lane[to] != graph.lane[like] and graph.kind[to] != int(NodeKind.RENDEZVOUS):
                    loom.edge(pair[1], to, EdgeKind(int(graph.edge_kind[edge])), int(graph.lag_ns[edge]))
