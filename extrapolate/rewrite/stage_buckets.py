"""Turns the gradient buckets of a DDP job that is to be cut into stages into those that DDP makes of each stage's module.

DDP fills its buckets along the gradients of one module, so a stage has a first bucket of its own and none reaches into
another stage. Where the recorded buckets are runs of known weights, those of the stages are laid by the same rule
(bucket_plan), gradient by gradient; elsewhere a bucket that reaches over a border is cut there by the share of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.bucket_plan import (
    Gradient,
    Pass,
    Planned,
    by_gradient,
    by_share,
    distinct,
    line_of,
    passes_of,
)
from scaletrace.extrapolate.rewrite.buckets import measured_caps
from scaletrace.extrapolate.rewrite.insert import finished
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.extrapolate.rewrite.removal import orphans, without_nodes
from scaletrace.extrapolate.rewrite.state import State, cost_s, told
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind

EXACT = "Gradient buckets are those that DDP makes of each stage's weights."
SHARED = "gradient buckets cut at the borders of stages by the share of weights"
CAPS = "bucket size of DDP, of which several would make the recorded buckets"


def staged_buckets(state: State, stages: Sequence[Sequence[int]]) -> State:
    """`state`, not yet cut, with the buckets of each stage (its units in model order) instead of the recorded ones."""
    stage_of = np.full(len(state.anatomy.units) + 1, -1, np.int64)
    for number, units in enumerate(stages):
        stage_of[list(units)] = number
    width, runs = passes_of(state)
    if not runs:
        return state
    whole = line_of(state, range(len(state.anatomy.units)), width)
    lines = [line_of(state, run.units, width) for run in runs]
    caps = measured_caps(distinct(lines, runs)) if width and all(run.ends for run in runs) else None
    plans = [
        by_gradient(line, run, stage_of, stages, whole, caps[:2]) if caps else by_share(state, run, stage_of)
        for line, run in zip(lines, runs, strict=True)
    ]
    if all(_kept(state, run, plan) for run, plan in zip(runs, plans, strict=True)):
        return _moved(state, runs, plans, stage_of)
    sketch = _Sketch(state)
    for run, plan, line in zip(runs, plans, lines, strict=True):
        sketch.replace(run, plan, line)
    out = sketch.finish(runs)
    if caps is None:
        return told(out, guess=SHARED)
    return told(out, EXACT, "" if caps[2] else CAPS)


def _kept(state: State, run: Pass, plan: Sequence[Planned]) -> bool:
    """Whether the plan has just the recorded buckets, each within one stage."""
    sizes = [state.graph.collectives[bucket.instance].bytes_in for bucket in run.buckets]
    return [new.olds for new in plan] == [(at,) for at in range(len(sizes))] and [n.size_bytes for n in plan] == sizes


def _moved(state: State, runs: Sequence[Pass], plans: Sequence[Sequence[Planned]], stage_of: IntArray) -> State:
    """The state with each bucket in the pass and stage of its gradients, also where a stall had taken it out of them."""
    graph, anatomy = state.graph, state.anatomy
    unit, batch, phase = anatomy.unit.copy(), anatomy.micro_batch.copy(), anatomy.phase.copy()
    for run, plan in zip(runs, plans, strict=True):
        for bucket, new in zip(run.buckets, plan, strict=True):
            nodes = np.array([*bucket.arrive.values(), *bucket.transfer.values()])
            strays = nodes[(stage_of[unit[nodes]] != new.stage) | (phase[nodes] != int(Phase.BACKWARD))]
            strays = np.concatenate([strays, np.flatnonzero(_late(graph, strays))])
            unit[strays], batch[strays], phase[strays] = new.unit, run.micro_batch, int(Phase.BACKWARD)
    if np.array_equal(unit, anatomy.unit) and np.array_equal(phase, anatomy.phase):
        return state
    return replace(state, anatomy=replace(anatomy, unit=unit, micro_batch=batch, phase=phase))


def _late(graph: Graph, members: IntArray) -> BoolArray:
    """Stalls that hold up nothing but these nodes."""
    own = np.zeros(len(graph), np.bool_)
    own[members] = True
    into = graph.edge_dst
    late, other = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    late[graph.pred[own[into]]] = True
    other[graph.pred[~own[into]]] = True
    return np.asarray((graph.kind == int(NodeKind.STALL)) & late & ~other, np.bool_)


_NONE = np.zeros(0, np.int64)


def _index(
    state: State,
) -> tuple[dict[tuple[int, int, int, int], IntArray], dict[tuple[int, int], IntArray]]:
    """Nodes that compute or run on the host: of each backward by (rank, step, micro batch, unit), and of no unit by
    (rank, step)."""
    graph, anatomy = state.graph, state.anatomy
    plain = (graph.instance < 0) & (graph.kind != int(NodeKind.RENDEZVOUS)) & (graph.kind != int(NodeKind.STALL))
    inside = np.flatnonzero(plain & (anatomy.phase == int(Phase.BACKWARD)) & (anatomy.unit >= 0))
    outside = np.flatnonzero(plain & (anatomy.unit < 0))
    backward = _by_key(inside, graph.rank, graph.step, anatomy.micro_batch, anatomy.unit)
    ends = _by_key(outside, graph.rank, graph.step)
    return (
        {(key[0], key[1], key[2], key[3]): nodes for key, nodes in backward.items()},
        {(key[0], key[1]): nodes for key, nodes in ends.items()},
    )


def _by_key(nodes: IntArray, *columns: Int32Array) -> dict[tuple[int, ...], IntArray]:
    """Nodes, ascending, by their values in some columns."""
    if not len(nodes):
        return {}
    keys, code = np.unique(np.stack([column[nodes] for column in columns]), axis=1, return_inverse=True)
    order = np.argsort(code.reshape(-1), kind="stable")
    cuts = np.flatnonzero(np.diff(code.reshape(-1)[order])) + 1
    return dict(zip(map(tuple, keys.T.tolist()), np.split(nodes[order], cuts), strict=True))


class _Sketch:
    """The new buckets while they are added; nodes of the old graph keep their numbers until the end."""

    def __init__(self, state: State) -> None:
        self.state, self.graph = state, state.graph
        self.loom: Loom = reopen(state.graph, state.anatomy.exact_ns, state.anatomy.entry)
        self.into = state.graph.edge_dst
        self.leave: dict[int, list[int]] = {}
        for edge, node in enumerate(state.graph.pred.tolist()):
            if state.graph.kind[node] == int(NodeKind.TRANSFER):
                self.leave.setdefault(node, []).append(edge)
        self.early = 0
        self.backward, self.ends = _index(state)
        self.places: list[tuple[int, int]] = []  # unit and micro batch of each new node, by the mark in its event

    def replace(self, run: Pass, plan: Sequence[Planned], line: Sequence[Gradient]) -> None:
        """Put the buckets of `plan` in place of the run's, which stay until the end."""
        graph, state = self.graph, self.state
        costs = sum(cost_s(state.network, graph.collectives[b.instance], graph.groups) for b in run.buckets)
        before: dict[tuple[int, int, int], int] = {}
        old = {bucket.instance for bucket in run.buckets}
        ready: dict[int, int] = {}  # by stage the last node that its buckets so far wait for, on any rank
        for new in plan:
            like = graph.collectives[run.buckets[new.olds[-1]].instance]
            item = replace(like, bytes_in=new.size_bytes, bytes_out=new.size_bytes)
            instance = len(self.loom.collectives)
            self.loom.collectives.append(item)
            self.places.append((new.unit, run.micro_batch))
            share = cost_s(state.network, item, graph.groups) / costs if costs else 0.0
            if not costs:
                share = new.size_bytes / max(1, sum(graph.collectives[each].bytes_in for each in old))
            arrived, moved = [], []
            for rank in run.ranks:
                total = sum(float(state.anatomy.exact_ns[bucket.transfer[rank]]) for bucket in run.buckets)
                arrive = self._arrive(run, new, line, rank, instance, before)
                transfer = self._node(NodeKind.TRANSFER, run, new, rank, instance, arrive[1], round(total * share))
                self.loom.edge(arrive[0], transfer, EdgeKind.STREAM)
                before[rank, self.loom.lane_of(transfer), new.stage] = transfer
                arrived.append(arrive[0])
                moved.append(transfer)
                ready[new.stage] = max(ready.get(new.stage, -1), arrive[1])
            self.loom.meet(arrived, moved, run.step)
            for rank, transfer in zip(run.ranks, moved, strict=True):
                self._await(run, new, rank, transfer, ready[new.stage])

    def _node(
        self, kind: NodeKind, run: Pass, new: Planned, rank: int, instance: int, key: int, dur_ns: int = 0
    ) -> int:
        bucket = run.buckets[new.olds[-1]]
        like = (bucket.arrive if kind is NodeKind.ARRIVE else bucket.transfer)[rank]
        return self.loom.node(
            kind,
            rank=rank,
            lane=int(self.graph.lane[like]),
            name=int(self.graph.name[like]),
            instance=instance,
            step=run.step,
            key=key,
            dur_ns=dur_ns,
            event=len(self.places) - 1,
        )

    def _arrive(
        self,
        run: Pass,
        new: Planned,
        line: Sequence[Gradient],
        rank: int,
        instance: int,
        before: dict[tuple[int, int, int], int],
    ) -> tuple[int, int]:
        """The ARRIVE of one rank and the last node that it waits for: behind the bucket's last gradient, or where the
        recorded bucket that ends there waited."""
        same = run.ends.index(new.last + 1) if new.last + 1 in run.ends else -1
        order = [*([same] if same >= 0 else []), *reversed(new.olds), *range(len(run.buckets))]
        issued = [(at, self._issuers(run.buckets[at].arrive[rank])) for at in order]
        at, edges = next(((at, found) for at, found in issued if found), (order[0], []))
        sources = [
            (int(self.graph.pred[e]) if at == same else self._anchor(int(self.graph.pred[e]), run, new, line, rank), e)
            for e in edges
        ]
        key = max((node for node, _ in sources), default=run.buckets[new.olds[-1]].arrive[rank])
        node = self._node(NodeKind.ARRIVE, run, new, rank, instance, key)
        for source, e in sources:
            self.loom.edge(source, node, EdgeKind(int(self.graph.edge_kind[e])), int(self.graph.lag_ns[e]))
        ahead = before.get((rank, self.loom.lane_of(node), new.stage), -1)
        if ahead >= 0:
            self.loom.edge(ahead, node, EdgeKind.STREAM, self._gap(run.buckets[new.olds[-1]].arrive[rank]))
        return node, key

    def _issuers(self, arrive: int) -> list[int]:
        """Edges that say when a bucket was ready, other than the order of its stream."""
        edges = range(int(self.graph.pred_ptr[arrive]), int(self.graph.pred_ptr[arrive + 1]))
        order = (int(NodeKind.TRANSFER), int(NodeKind.STALL))
        return [e for e in edges if int(self.graph.kind[self.graph.pred[e]]) not in order]

    def _gap(self, arrive: int) -> int:
        """Lag with which a bucket followed the one before on its stream."""
        edges = range(int(self.graph.pred_ptr[arrive]), int(self.graph.pred_ptr[arrive + 1]))
        lags = [int(self.graph.lag_ns[e]) for e in edges if self.graph.edge_kind[e] == int(EdgeKind.STREAM)]
        return max(0, *lags, 0)

    def _anchor(self, like: int, run: Pass, new: Planned, line: Sequence[Gradient], rank: int) -> int:
        """The node of the lane of `like` by which the bucket's last gradient is there: the one that accumulates it, else
        at its share of the unit's backward."""
        graph = self.graph
        mine = self.backward.get((rank, run.step, run.micro_batch, new.unit), _NONE)
        nodes = mine[graph.lane[mine] == graph.lane[like]]
        nodes = nodes if len(nodes) else mine[graph.kind[mine] == graph.kind[like]]
        if not len(nodes):
            return like
        share = 1.0
        if new.last >= 0:
            last = line[new.last]
            named = [node for node in nodes.tolist() if "AccumulateGrad" in graph.name_of(node)]
            # One that issues a bucket or waits is more than one node; the first has added the gradient up.
            _, first = np.unique(self.state.work.op[named], return_index=True)
            if len(first) == last.of:
                return int(np.array(named)[np.sort(first)][last.at])
            whole = sum(each.size_bytes for each in line if each.unit == last.unit)
            share = sum(each.size_bytes for each in line if each.unit == last.unit and each.at <= last.at) / whole
        done = np.cumsum(graph.dur_ns[nodes])
        return int(nodes[min(int(np.searchsorted(done, share * done[-1])), len(nodes) - 1)])

    def _await(self, run: Pass, new: Planned, rank: int, transfer: int, ready: int) -> None:
        """Let what waited for a recorded bucket wait for all that carry a part of it, if it comes behind their gradients;
        and the end of the backward pass for all of them, as DDP does."""
        waits = [e for at in new.olds for e in self._waits(run, run.buckets[at].transfer[rank])]
        behind = {int(self.into[e]): (int(self.graph.edge_kind[e]), int(self.graph.lag_ns[e])) for e in waits}
        kept = {to: how for to, how in behind.items() if to > ready}
        self.early += len(behind) - len(kept)
        end, how = self._end(run, rank, ready)
        if end >= 0:
            kept.setdefault(end, how)
        for to, (kind, lag_ns) in kept.items():
            self.loom.edge(transfer, to, EdgeKind(kind), lag_ns)

    def _end(self, run: Pass, rank: int, ready: int) -> tuple[int, tuple[int, int]]:
        """The last wait for the run's buckets behind the backward pass, else what comes first there: node, kind, lag."""
        graph, anatomy = self.graph, self.state.anatomy
        every = [e for bucket in run.buckets for e in self._waits(run, bucket.transfer[rank])]
        ends = {int(self.into[e]) for e in every if anatomy.unit[self.into[e]] < 0 and self.into[e] > ready}
        if ends:
            end = max(ends)
            of_end = [e for e in every if int(self.into[e]) == end]
            return end, (int(graph.edge_kind[of_end[-1]]), max(int(graph.lag_ns[e]) for e in of_end))
        later = self.ends.get((rank, run.step), _NONE)
        at = int(np.searchsorted(later, ready, side="right"))
        return (int(later[at]) if at < len(later) else -1), (int(EdgeKind.EVENT_WAIT), 0)

    def _waits(self, run: Pass, was: int) -> list[int]:
        """Edges from a recorded bucket to what awaits it, other than buckets and what follows on its stream."""
        graph, out = self.graph, []
        for e in self.leave.get(was, []):
            to = int(self.into[e])
            follows = graph.lane[to] == graph.lane[was] and graph.edge_kind[e] == int(EdgeKind.STREAM)
            bucket = any(graph.instance[to] == each.instance for each in run.buckets)
            if not (bucket or follows or graph.kind[to] == int(NodeKind.RENDEZVOUS)):
                out.append(e)
        return out

    def finish(self, runs: Sequence[Pass]) -> State:
        """The state without the recorded buckets and the stalls that held up nothing else."""
        state, graph = self.state, self.graph
        old = [bucket.instance for run in runs for bucket in run.buckets]
        gone = np.isin(graph.instance, old)
        gone |= _late(graph, np.flatnonzero(gone))
        gone |= orphans(graph, gone)
        woven = self.loom.finish()
        places = [(int(Phase.BACKWARD), unit, batch) for unit, batch in self.places]
        origin, out = woven.origin, finished(state, woven, places)
        out = without_nodes(out, np.asarray((origin >= 0) & gone[origin], np.bool_))
        if self.early:
            out = told(out)
            out.health.dropped["waits for a bucket before all gradients that it carries now are ready"] += self.early
        return out
