"""Turns the gradient buckets of a DDP job that is to be cut into stages into those that DDP makes of each stage's module.

DDP fills its buckets along the gradients of one module in the order in which they are ready, so a stage has a first
bucket of its own and none reaches into another stage. Where the recorded buckets are found to be runs of the weights
that the operators read, those of the stages are laid by the same rule, gradient by gradient; elsewhere a bucket that
reaches over a border between stages is cut there by the share of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.rewrite.buckets import Bucket, buckets_of, ddp_buckets, measured_caps
from scaletrace.extrapolate.rewrite.loom import Loom, reopen
from scaletrace.extrapolate.rewrite.removal import orphans, without_nodes
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, cost_s, told
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind

HUB_FROM = 3
"""Members from which all meet through one hub instead of an edge for each pair."""
EXACT = "Gradient buckets are those that DDP makes of each stage's weights."
SHARED = "gradient buckets cut at the borders of stages by the share of weights"
CAPS = "bucket size of DDP, of which several would make the recorded buckets"


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One gradient in the order of readiness: its unit, and that it is number `at` of the `of` gradients there."""

    unit: int
    at: int
    of: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """The buckets that one backward pass issued on some ranks, and the gradients that they are made of.

    ends: how many gradients the buckets up to each hold, () where they are no runs of the weights that are known
    """

    step: int
    micro_batch: int
    ranks: tuple[int, ...]
    units: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _New:
    """A bucket of one stage: it is ready with a gradient of `unit` and carries parts of the recorded buckets `olds`.

    last: number of the gradient in the run's order, -1 where the gradients are not known
    """

    stage: int
    size_bytes: int
    unit: int
    olds: tuple[int, ...]
    last: int


def staged_buckets(state: State, stages: Sequence[Sequence[int]]) -> State:
    """`state`, not yet cut, with the buckets of each stage (its units in model order) instead of the recorded ones."""
    stage_of = np.full(len(state.anatomy.units) + 1, -1, np.int64)
    for number, units in enumerate(stages):
        stage_of[list(units)] = number
    width, runs = _runs(state)
    if not runs:
        return state
    lines = [_line(state, run.units, width) for run in runs]
    caps = measured_caps(_distinct(lines, runs)) if width and all(run.ends for run in runs) else None
    plans = [
        _by_gradient(line, run, stage_of, stages, _line(state, _units(state), width), caps[:2])
        if caps
        else _by_share(state, run, stage_of)
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


def _units(state: State) -> tuple[int, ...]:
    return tuple(range(len(state.anatomy.units)))


def _line(state: State, units: Sequence[int], width: int) -> list[_Gradient]:
    """Gradients of some units in the order in which a backward pass has them ready."""
    return [
        _Gradient(unit, at, len(state.work.weights[unit]), weight.elements * width)
        for unit in sorted(units, reverse=True)
        for at, weight in enumerate(reversed(state.work.weights[unit]))
    ]


def _runs(state: State) -> tuple[int, list[_Run]]:
    """(bytes of an element, the recorded buckets by step, ranks and backward pass); 0 bytes where weights don't fit."""
    graph, anatomy = state.graph, state.anatomy
    if _scatters(graph):
        return 0, []
    found: dict[tuple[int, tuple[int, ...]], list[Bucket]] = {}
    for step, buckets in buckets_of(graph).items():
        for bucket in buckets:
            found.setdefault((step, tuple(sorted(bucket.arrive))), []).append(bucket)
    units = {ranks: _held(graph, anatomy, ranks) for _, ranks in found}
    for width in (4, 2, 8):
        runs: list[_Run] = []
        for (step, ranks), buckets in found.items():
            sizes = [gradient.size_bytes for gradient in _line(state, units[ranks], width)]
            passes = _passes([graph.collectives[bucket.instance].bytes_in for bucket in buckets], sizes)
            if not passes:
                break
            for begin, ends in passes:
                mine = tuple(buckets[begin : begin + len(ends)])
                runs.append(_Run(step, _micro_batch(graph, anatomy, mine), ranks, units[ranks], mine, ends))
        else:
            return width, runs
    return 0, [
        _Run(step, batch, ranks, units[ranks], tuple(mine), ())
        for (step, ranks), buckets in found.items()
        for batch, mine in _by_batch(graph, anatomy, buckets).items()
    ]


def _scatters(graph: Graph) -> bool:
    """Whether gradients are scattered, so that what is all-reduced are replicas of shards."""
    return any(
        item.kind == "reduce_scatter" and axis_of_item(item, graph.groups) in ("dp", "fsdp", "world", "")
        for item in graph.collectives
    )


def _held(graph: Graph, anatomy: Anatomy, ranks: Sequence[int]) -> tuple[int, ...]:
    """Units that ranks work on."""
    mine = np.isin(graph.rank, ranks) & (anatomy.unit >= 0) & (anatomy.phase == int(Phase.FORWARD))
    return tuple(np.unique(anatomy.unit[mine]).tolist())


def _passes(buckets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(first bucket, ends in gradients) of every backward pass, if all buckets are runs of whole gradients; else []."""
    borders = {total: number + 1 for number, total in enumerate(accumulate(sizes))}
    whole, held, begin = sum(sizes), 0, 0
    ends: list[int] = []
    out: list[tuple[int, tuple[int, ...]]] = []
    for at, size in enumerate(buckets):
        held += size
        if held not in borders:
            return []
        ends.append(borders[held])
        if held == whole:
            out.append((begin, tuple(ends)))
            held, begin, ends = 0, at + 1, []
    return [] if ends else out


def _micro_batch(graph: Graph, anatomy: Anatomy, buckets: Sequence[Bucket]) -> int:
    """The micro batch that issued some buckets; what a stall has moved out of every pass is told by the others."""
    nodes = [node for bucket in buckets for node in bucket.arrive.values()]
    known = anatomy.micro_batch[nodes]
    return int(known.max()) if (known >= 0).any() else max(0, anatomy.micro_batches - 1)


def _by_batch(graph: Graph, anatomy: Anatomy, buckets: Sequence[Bucket]) -> dict[int, list[Bucket]]:
    out: dict[int, list[Bucket]] = {}
    batch = _micro_batch(graph, anatomy, buckets)
    for bucket in buckets:
        known = anatomy.micro_batch[list(bucket.arrive.values())].max()
        batch = int(known) if known >= 0 else batch
        out.setdefault(batch, []).append(bucket)
    return out


def _distinct(lines: Sequence[list[_Gradient]], runs: Sequence[_Run]) -> list[tuple[Sequence[int], Sequence[int]]]:
    pairs = {(tuple(each.size_bytes for each in line), run.ends) for line, run in zip(lines, runs, strict=True)}
    return list(pairs)


def _by_gradient(
    line: Sequence[_Gradient],
    run: _Run,
    stage_of: IntArray,
    stages: Sequence[Sequence[int]],
    whole: Sequence[_Gradient],
    caps: tuple[int, int],
) -> list[_New]:
    """DDP's own buckets of every stage that are ready on the run's ranks, in order of readiness."""
    number = {(each.unit, each.at): at for at, each in enumerate(line)}
    out = []
    for stage in {int(stage_of[unit]) for unit in run.units}:
        mine = [each for each in whole if stage_of[each.unit] == stage]
        begin = 0
        for end in ddp_buckets([each.size_bytes for each in mine], *caps):
            part, last = mine[begin:end], mine[end - 1]
            begin = end
            if (last.unit, last.at) not in number:
                continue  # ready on the ranks of another recorded stage
            here = [number[each.unit, each.at] for each in part if (each.unit, each.at) in number]
            olds = sorted({int(np.searchsorted(run.ends, at, side="right")) for at in here})
            size = sum(each.size_bytes for each in part)
            out.append(_New(stage, size, last.unit, tuple(olds), number[last.unit, last.at]))
    return sorted(out, key=lambda each: each.last)


def _by_share(state: State, run: _Run, stage_of: IntArray) -> list[_New]:
    """The recorded buckets, each cut where units that it carries are of different stages.

    A bucket carries the units that are done since the one before was issued, up to the one that issued it.
    """
    graph, anatomy = state.graph, state.anatomy
    weight = anatomy.parameters if anatomy.parameters.sum() else np.ones(len(anatomy.units))
    above, out = max(run.units, default=-1) + 1, []
    for at, bucket in enumerate(run.buckets):
        known = anatomy.unit[list(bucket.arrive.values())]
        known = known[(known >= 0) & (known < above)]
        last = int(known.max()) if len(known) else max(above - 1, min(run.units, default=0))
        units = [unit for unit in run.units if last <= unit < above] or [last]
        above = last
        size = graph.collectives[bucket.instance].bytes_in
        parts: dict[int, list[int]] = {}
        for unit in units:
            parts.setdefault(int(stage_of[unit]), []).append(unit)
        shares = {stage: float(weight[mine].sum()) for stage, mine in parts.items()}
        total, given = sum(shares.values()), 0
        for place, (stage, mine) in enumerate(sorted(parts.items(), reverse=True)):
            rest = place == len(parts) - 1
            piece = size - given if rest else round(size * shares[stage] / total) if total else 0
            given += piece
            if piece:
                out.append(_New(stage, piece, min(mine), (at,), -1))
    return out


def _kept(state: State, run: _Run, plan: Sequence[_New]) -> bool:
    """Whether the plan has just the recorded buckets, each within one stage."""
    sizes = [state.graph.collectives[bucket.instance].bytes_in for bucket in run.buckets]
    return [new.olds for new in plan] == [(at,) for at in range(len(sizes))] and [n.size_bytes for n in plan] == sizes


def _moved(state: State, runs: Sequence[_Run], plans: Sequence[Sequence[_New]], stage_of: IntArray) -> State:
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
        self.places: list[tuple[int, int]] = []  # unit and micro batch of each new node, by the mark in its event

    def replace(self, run: _Run, plan: Sequence[_New], line: Sequence[_Gradient]) -> None:
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
            self._meet(run, arrived, moved)
            for rank, transfer in zip(run.ranks, moved, strict=True):
                self._await(run, new, rank, transfer, ready[new.stage])

    def _node(self, kind: NodeKind, run: _Run, new: _New, rank: int, instance: int, key: int, dur_ns: int = 0) -> int:
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
        run: _Run,
        new: _New,
        line: Sequence[_Gradient],
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

    def _anchor(self, like: int, run: _Run, new: _New, line: Sequence[_Gradient], rank: int) -> int:
        """The node of the lane of `like` by which the bucket's last gradient is there: the one that accumulates it, else
        at its share of the unit's backward."""
        graph, anatomy = self.graph, self.state.anatomy
        mine = (graph.rank == rank) & (graph.step == run.step) & (anatomy.micro_batch == run.micro_batch)
        mine &= (anatomy.phase == int(Phase.BACKWARD)) & (anatomy.unit == new.unit) & (graph.instance < 0)
        nodes = np.flatnonzero(mine & (graph.lane == graph.lane[like]))
        nodes = nodes if len(nodes) else np.flatnonzero(mine & (graph.kind == graph.kind[like]))
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

    def _await(self, run: _Run, new: _New, rank: int, transfer: int, ready: int) -> None:
        """Let what waited for a recorded bucket wait for all that carry a part of it, if it comes behind their gradients;
        what waits for none of them then waits with the last that did."""
        waits = [e for at in new.olds for e in self._waits(run, run.buckets[at].transfer[rank])]
        behind = [e for e in waits if int(self.into[e]) > ready]
        self.early += len(waits) - len(behind)
        if not behind:
            every = [e for bucket in run.buckets for e in self._waits(run, bucket.transfer[rank])]
            behind = sorted((e for e in every if int(self.into[e]) > ready), key=lambda e: int(self.into[e]))[-1:]
        for e in behind:
            to, kind = int(self.into[e]), EdgeKind(int(self.graph.edge_kind[e]))
            self.loom.edge(transfer, to, kind, int(self.graph.lag_ns[e]))

    def _waits(self, run: _Run, was: int) -> list[int]:
        """Edges from a recorded bucket to what awaits it, other than buckets and what follows on its stream."""
        graph, out = self.graph, []
        for e in self.leave.get(was, []):
            to = int(self.into[e])
            follows = graph.lane[to] == graph.lane[was] and graph.edge_kind[e] == int(EdgeKind.STREAM)
            bucket = any(graph.instance[to] == each.instance for each in run.buckets)
            if not (bucket or follows or graph.kind[to] == int(NodeKind.RENDEZVOUS)):
                out.append(e)
        return out

    def _meet(self, run: _Run, arrived: Sequence[int], moved: Sequence[int]) -> None:
        if len(arrived) >= HUB_FROM:
            hub = self.loom.node(NodeKind.RENDEZVOUS, name=self.loom.name("rendezvous"), step=run.step)
            for node in arrived:
                self.loom.edge(node, hub, EdgeKind.RENDEZVOUS)
            for node in moved:
                self.loom.edge(hub, node, EdgeKind.RENDEZVOUS)
            return
        for own, transfer in zip(arrived, moved, strict=True):
            for other in arrived:
                if other != own:
                    self.loom.edge(other, transfer, EdgeKind.RENDEZVOUS)

    def finish(self, runs: Sequence[_Run]) -> State:
        """The state without the recorded buckets and the stalls that held up nothing else."""
        state, graph = self.state, self.graph
        old = [bucket.instance for run in runs for bucket in run.buckets]
        gone = np.isin(graph.instance, old)
        gone |= _late(graph, np.flatnonzero(gone))
        gone |= orphans(graph, gone)
        woven = self.loom.finish()
        origin, fresh = woven.origin, np.flatnonzero(woven.origin < 0)
        marked = fresh[woven.graph.event[fresh] >= 0]
        places = np.array(self.places)[woven.graph.event[marked]]
        event = woven.graph.event.copy()
        event[fresh] = -1
        moved = state.anatomy.moved(origin)
        unit, batch, phase = moved.unit.copy(), moved.micro_batch.copy(), moved.phase.copy()
        unit[marked], batch[marked], phase[marked] = places[:, 0], places[:, 1], int(Phase.BACKWARD)
        out = replace(
            state,
            graph=replace(woven.graph, event=event, multiplicity=graph.multiplicity),
            anatomy=replace(
                moved, unit=unit, micro_batch=batch, phase=phase, exact_ns=woven.exact_ns, entry=woven.entry
            ),
            work=state.work.moved(origin),
        )
        out = without_nodes(out, np.asarray((origin >= 0) & gone[origin], np.bool_))
        if self.early:
            out = told(out)
            out.health.dropped["waits for a bucket before all gradients that it carries now are ready"] += self.early
        return out
