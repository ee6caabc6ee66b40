"""Turns places in a state's graph into collectives that stand there, and takes the collectives of an axis out again.

An inserted collective has one member: the other ranks of its group do the same as the one that the graph holds. It waits
for what it sends and holds up what needs the result; the order that was there stays, so that taking it out is enough to
have the old graph back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scaletrace.extrapolate.kernels import Ceilings, Shape, anchored
from scaletrace.extrapolate.rewrite.loom import Loom, Woven, reopen
from scaletrace.extrapolate.rewrite.removal import pruned, without_nodes
from scaletrace.extrapolate.rewrite.state import State, axis_of_item
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind

PART = " (part)"
"""How the names of computing nodes end that `Insertion.part` has cut off another."""


def neighbours(graph: Graph) -> tuple[Int32Array, Int32Array]:
    """(the node before, the node behind) each node on its own thread or stream, int32[n], -1 for none."""
    before, behind = np.full(len(graph), -1, np.int32), np.full(len(graph), -1, np.int32)
    dst = graph.edge_dst
    same = np.isin(graph.edge_kind, [int(EdgeKind.PROGRAM), int(EdgeKind.STREAM)])
    same &= (graph.lane[graph.pred] == graph.lane[dst]) & (graph.lane[dst] >= 0)
    edges = np.flatnonzero(same)
    order = edges[np.lexsort((graph.pred[edges], dst[edges]))]
    before[dst[order]] = graph.pred[order]
    order = edges[np.lexsort((-dst[edges], graph.pred[edges]))]
    behind[graph.pred[order]] = dst[order]
    return before, behind


def finished(state: State, woven: Woven, places: Sequence[tuple[int, int, int]] = ()) -> State:
    """The state of a finished loom that was opened on it; new nodes belong to nothing.

    places: (phase, unit, micro batch) that new nodes belong to; which one, their event says for as long as the graph is
    open.
    """
    graph, anatomy = woven.graph, replace(state.anatomy.moved(woven.origin), exact_ns=woven.exact_ns, entry=woven.entry)
    new = woven.origin < 0
    at = np.flatnonzero(new & (graph.event >= 0))
    if len(at):
        phase, unit, batch = anatomy.phase.copy(), anatomy.unit.copy(), anatomy.micro_batch.copy()
        phase[at], unit[at], batch[at] = np.array(places)[graph.event[at]].T
        anatomy = replace(anatomy, phase=phase, unit=unit, micro_batch=batch)
    event = np.where(new, -1, graph.event).astype(np.int32)
    return replace(
        state,
        graph=replace(graph, event=event, multiplicity=state.graph.multiplicity),
        anatomy=anatomy,
        work=state.work.moved(woven.origin),
    )


@dataclass(slots=True)
class Insertion:
    """A graph that is open for collectives of one axis. Times of new collectives are the cost model's times `level`."""

    state: State
    axis: str
    size: int
    stride: int
    level: float = 1.0
    loom: Loom = field(init=False)
    group: int = field(init=False)
    _last: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.state.graph
        self.loom = reopen(graph, self.state.anatomy.exact_ns, self.state.anatomy.entry)
        known = [index for index, group in enumerate(self.loom.groups) if group.axis == self.axis]
        self.group = known[0] if known else len(self.loom.groups)
        group = GraphGroup(self.axis, self.size, self.stride, 1, self.axis)
        if known:
            self.loom.groups[self.group] = replace(self.loom.groups[self.group], size=self.size, stride=self.stride)
        else:
            self.loom.groups.append(group)

    def exchange(
        self, kind: str, bytes_in: int, bytes_out: int, like: int, after: Iterable[int], before: Iterable[int]
    ) -> int:
        """One collective on the rank, step and place of node `like`; returns its TRANSFER, which more may wait for."""
        loom, graph = self.loom, self.state.graph
        rank, after = int(graph.rank[like]), [node for node in after if node >= 0]
        instance = len(loom.collectives)
        loom.collectives.append(GraphCollective(kind, self.group, bytes_in, bytes_out))
        columns = {
            "rank": rank,
            "lane": loom.lane(rank, LANES[self.axis], True),
            "name": loom.name(f"{self.axis} {kind}"),
            "instance": instance,
            "step": int(graph.step[like]),
            "key": max([node for node in after if node < len(graph)], default=max(0, like - 1)),
            "event": like,
        }
        whole = bytes_out if kind == "all_gather" else bytes_in
        seconds = self.state.network.seconds(kind, whole, self.size, self.stride) * self.level
        arrive = loom.node(NodeKind.ARRIVE, **columns)
        transfer = loom.node(NodeKind.TRANSFER, dur_ns=round(seconds * 1e9), **columns)
        for node in after:
            loom.edge(node, arrive, EdgeKind.EVENT_WAIT)
        if rank in self._last:  # one communicator carries one collective at a time
            loom.edge(self._last[rank], arrive, EdgeKind.STREAM)
        self._last[rank] = transfer
        loom.edge(arrive, transfer, EdgeKind.STREAM)
        for node in before:
            if node >= 0:
                loom.edge(transfer, node, EdgeKind.EVENT_WAIT)
        return transfer

    def part(self, core: int, previous: int, following: int, dur_ns: int) -> int:
        """A computing node like `core`, between `previous` and `following` on the same thread or stream."""
        loom, graph = self.loom, self.state.graph
        kind = NodeKind(int(graph.kind[core]))
        on_device = graph.lanes[int(graph.lane[core])].is_device
        order = EdgeKind.STREAM if on_device else EdgeKind.PROGRAM
        node = loom.node(
            kind,
            rank=int(graph.rank[core]),
            lane=int(graph.lane[core]),
            name=loom.name(graph.name_of(core) + PART),
            step=int(graph.step[core]),
            dur_ns=dur_ns,
            key=core,
            event=core,
        )
        loom.edge(previous, node, order)
        if following >= 0:
            loom.edge(node, following, order)
        return node

    def finish(self) -> State:
        """The state with all that was added; new nodes belong to the phase, unit and micro batch of the node they are
        like, which their event says for as long as the graph is open."""
        woven, state = self.loom.finish(), self.state
        graph, new = woven.graph, np.flatnonzero(woven.origin < 0)
        like = woven.origin.copy()
        like[new] = graph.event[new]
        event = graph.event.copy()
        event[new] = -1
        part = np.array([name.endswith(PART) for name in graph.names] + [False], np.bool_)[graph.name]
        anatomy = replace(state.anatomy.moved(like), exact_ns=woven.exact_ns, entry=woven.entry)
        anatomy = replace(anatomy, is_message=state.anatomy.moved(woven.origin).is_message)
        return replace(
            state,
            graph=replace(graph, event=event, multiplicity=state.graph.multiplicity),
            anatomy=anatomy,
            work=state.work.moved(np.where(part, like, woven.origin).astype(np.int32)),
        )


LANES = {"cp": "context parallel", "ep": "expert parallel", "dp": "gradients over context ranks"}


def _cores(graph: Graph) -> dict[int, int]:
    """The node that each part was cut off."""
    part = np.array([name.endswith(PART) for name in graph.names] + [False], np.bool_)[graph.name]
    out: dict[int, int] = {}
    for node in np.flatnonzero(part).tolist():
        for before in graph.pred[graph.pred_ptr[node] : graph.pred_ptr[node + 1]].tolist():
            if graph.lane[before] == graph.lane[node] and graph.kind[before] == graph.kind[node]:
                out[node] = out.get(before, before)
                break
    return out


def merged(state: State) -> State:
    """The state with parts put back into the nodes that they were cut off: their number times the node's own time."""
    cores = _cores(state.graph)
    if not cores:
        return state
    exact, shapes = state.anatomy.exact_ns.copy(), list(state.work.shape)
    count = np.bincount(np.array(list(cores.values())), minlength=len(exact)) + 1
    for core in set(cores.values()):
        shape = shapes[core]
        held = float(state.work.held_ns[core]) if len(state.work.held_ns) else 0.0
        exact[core], shapes[core] = shared(exact[core], shape, float(count[core]), state.ceilings, held)
    drop = np.zeros(len(exact), np.bool_)
    drop[list(cores)] = True
    whole_state = replace(
        state,
        anatomy=replace(state.anatomy, exact_ns=exact),
        work=replace(state.work, shape=tuple(shapes)),
    ).with_durations()
    out = without_nodes(whole_state, drop)
    return replace(out, graph=uninserted(out.graph))


def shared(
    exact_ns: float, shape: Shape | None, share: float, ceilings: Ceilings, held_ns: float = 0.0
) -> tuple[float, Shape | None]:
    """(time, shape) of `share` of a node's work; launch, drain and dispatch (held_ns) are paid by each part."""
    if shape is None:
        return held_ns + (exact_ns - held_ns) * share, None
    part = shape.scaled(batch=share)
    return held_ns + anchored((exact_ns - held_ns) * 1e-9, shape, part, ceilings) * 1e9, part


def nodes_of_axis(state: State, axis: str) -> BoolArray:
    """Mask of the members of an axis' collectives and the hubs that serve none but them."""
    graph = state.graph
    own = np.array([axis_of_item(item, graph.groups) == axis for item in graph.collectives] + [False], np.bool_)
    drop = own[graph.instance]
    hub = graph.kind == int(NodeKind.RENDEZVOUS)
    into = graph.edge_dst
    served, others = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    served[into[hub[into] & drop[graph.pred]]] = True
    others[into[hub[into] & ~drop[graph.pred]]] = True
    return np.asarray(drop | (hub & served & ~others), np.bool_)


def removed(state: State, axis: str) -> State:
    """The state without the collectives of an axis; host calls that issued them stay, as host work is kept.

    What waited for a collective on its own stream alone now waits for what the collective waited for.
    """
    out = without_nodes(state, nodes_of_axis(state, axis))
    return replace(out, graph=uninserted(out.graph))


def uninserted(graph: Graph) -> Graph:
    """The graph without what insertions brought and no node uses any more."""
    return pruned(
        graph,
        LANES.values(),
        lambda name: name.endswith(PART) or name.split(" ")[0] in LANES,
        lambda group: group.axis in LANES and group.description == group.axis,
    )


def level_of(state: State, axis: str) -> float:
    """Measured over modelled time of an axis' collectives (median), 1.0 without any: new ones are priced at this level."""
    graph = state.graph
    transfers = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0))
    ratios = []
    for node in transfers.tolist():
        item = graph.collectives[int(graph.instance[node])]
        if axis_of_item(item, graph.groups) != axis:
            continue
        group = graph.groups[item.group]
        whole = max(item.bytes_in, item.bytes_out)
        model_s = state.network.seconds(item.kind, whole, group.size, max(1, group.stride)) if whole > 0 else 0.0
        if model_s > 0 and graph.dur_ns[node] > 0:
            ratios.append(float(graph.dur_ns[node]) * 1e-9 / model_s)
    return float(np.median(ratios)) if ratios else 1.0


def spread_groups(groups: Sequence[GraphGroup], axis: str, old: int, new: int) -> tuple[GraphGroup, ...]:
    """The groups after an axis that lies inside all others but tp has grown: theirs lie further apart."""
    out = []
    for group in groups:
        if group.axis == axis:
            out.append(replace(group, size=new))
        elif group.axis == "world":
            out.append(replace(group, size=max(1, group.size * new // old)))
        elif group.axis in ("pp", "dp", "fsdp") and group.stride > 0:
            out.append(replace(group, stride=max(1, group.stride * new // old)))
        else:
            out.append(group)
    return tuple(out)


def by_place(state: State, where: BoolArray) -> list[IntArray]:
    """The nodes of `where` (bool[n]) in runs of one rank, step, phase, unit and micro batch, in order of nodes."""
    graph, anatomy = state.graph, state.anatomy
    nodes = np.flatnonzero(where)
    keys = np.stack(
        [graph.rank[nodes], graph.step[nodes], anatomy.phase[nodes], anatomy.unit[nodes], anatomy.micro_batch[nodes]]
    )
    _, code = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(code.reshape(-1), kind="stable")
    cuts = np.flatnonzero(np.diff(code.reshape(-1)[order])) + 1
    runs = [run for run in np.split(nodes[order], cuts) if len(run)]
    return sorted(runs, key=lambda run: int(run[0]))


def multiplied(state: State, old: int, new: int) -> State:
    """The state with each rank of the graph standing for new / old as many real ranks."""
    graph = state.graph
    ranks = np.unique(graph.rank[graph.kind != int(NodeKind.RENDEZVOUS)])
    count = graph.multiplicity if len(graph.multiplicity) == len(ranks) else np.ones(len(ranks), np.int32)
    spread = np.maximum(1, np.rint(count * new / old)).astype(np.int32)
    return replace(state, graph=replace(graph, multiplicity=spread))
