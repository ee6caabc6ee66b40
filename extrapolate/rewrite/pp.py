"""Turns a graph into that of another pipeline: layers cut into stages, actions laid in a schedule, messages between.

Warm-up, steady state and drain are not computed: they emerge when the new graph is replayed. Two forms share one
schedule: `pipeline_graph` makes a graph of single nodes from the times of the actions, `cut` re-lays a measured graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.anatomy import MESSAGES, Anatomy
from scaletrace.extrapolate.described.stages import layers_by_chunk
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.rewrite.fetches import fetches
from scaletrace.extrapolate.rewrite.loom import FloatArray, Loom, Woven
from scaletrace.extrapolate.rewrite.messages import MessageTime, Run, add_messages, pipeline_group
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program, message_of
from scaletrace.extrapolate.rewrite.state import axis_of_item
from scaletrace.extrapolate.rewrite.weave import Copy, weave
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.health import Health

ActionTime = Callable[[Action], int]
INPUT_SHARE = 0.5
"""Share of a backward pass that computes the gradient of the input; of a matrix product it is one of two products."""


def pipeline_graph(
    program: Program, time_ns: ActionTime, message_ns: MessageTime, message_bytes: int = 0, *, overlap: bool = True
) -> Graph:
    """One node an action on each rank's lane, and the messages between them.

    overlap  a message travels beside compute; otherwise it also occupies the sender, as blocking sends do
    """
    draft = Draft(groups=[GraphGroup("pp", program.ranks, 1)])
    done: dict[Action, int] = {}
    tail: list[int | None] = [None] * program.ranks
    arrived: dict[Action, int] = {}
    heads = [0] * program.ranks
    left = sum(len(row) for row in program.actions)
    while left:
        progress = False
        for rank, row in enumerate(program.actions):
            while heads[rank] < len(row) and all(need in done for need in program.needs(row[heads[rank]])):
                action = row[heads[rank]]
                heads[rank] += 1
                left -= 1
                progress = True
                needs = [arrived.get(need, done[need]) for need in program.needs(action) if need.stage != action.stage]
                before = tail[rank]
                after = needs if before is None else [before, *needs]
                node = draft.node(
                    NodeKind.KERNEL, time_ns(action), rank=rank, lane="stream 7", name=str(action), after=after
                )
                done[action] = tail[rank] = node
                found = message_of(program, action)
                if found:
                    sent = _send(draft, program, found, node, rank, message_bytes, message_ns)
                    arrived[action] = sent
                    if not overlap:
                        tail[rank] = sent
        if not progress:
            raise UsageError(f"{program.schedule}: the actions wait for each other; check the order")
    return draft.graph()


def _send(
    draft: Draft,
    program: Program,
    found: tuple[Action, Action, int],
    node: int,
    rank: int,
    size_bytes: int,
    message_ns: MessageTime,
) -> int:
    """The message that follows a node, as one transfer; returns its node."""
    send, _, peer = found
    instance = len(draft.collectives)
    draft.collectives.append(GraphCollective("send", 0, size_bytes, size_bytes))
    return draft.node(
        NodeKind.TRANSFER,
        message_ns(size_bytes, rank, peer),
        rank=rank,
        lane="stream p2p",
        name=str(send),
        after=[node],
        instance=instance,
    )


@dataclass(frozen=True, slots=True)
class Stages:
    """Which units (indices into Anatomy.units) each stage holds, in model order."""

    units: tuple[tuple[int, ...], ...]


def split_units(anatomy: Anatomy, stages: int, counts: Sequence[int] = ()) -> Stages:
    """Cut the layers into `stages` runs; what comes before goes to the first, what comes after to the last.

    counts: layers of each; default: equal, and where they don't divide, the first and last get fewer (layers_by_chunk).
    Raises UsageError for fewer layers than stages, or counts that don't add up.
    """
    layers = [unit for unit, is_layer in enumerate(anatomy.is_layer) if is_layer]
    if stages == 1 and not counts:
        return Stages((tuple(range(len(anatomy.units))),))
    if not counts:
        if len(layers) < stages:
            raise UsageError(
                f"{len(layers)} layers can't be cut into {stages} stages; take at most {max(1, len(layers))}"
            )
        counts = layers_by_chunk(len(layers), stages)
    if len(counts) != stages or sum(counts) != len(layers) or min(counts) < 0:
        raise UsageError(f"{list(counts)} layers a stage don't add up to {len(layers)} layers on {stages} stages")
    bounds = np.concatenate([[0], np.cumsum(counts)])
    out = [list(layers[a:b]) for a, b in pairwise(bounds.tolist())]
    between = set(range(len(anatomy.units))) - set(layers)
    first = layers[0]
    out[0] = sorted(unit for unit in between if unit < first) + out[0]
    out[-1] = out[-1] + sorted(unit for unit in between if unit > first)
    return Stages(tuple(tuple(stage) for stage in out))


@dataclass(frozen=True, slots=True)
class Cut:
    """A graph after `cut`, its anatomy, and where each node comes from (origin int32[n], -1 = new)."""

    graph: Graph
    anatomy: Anatomy
    origin: Int32Array
    health: Health


Key = tuple[int, int, int, int, int]
"""(rank, step, phase, unit, micro batch) of a piece."""


def cut(
    graph: Graph,
    anatomy: Anatomy,
    program: Program,
    message_ns: MessageTime,
    *,
    columns: Sequence[Sequence[int]] = (),
    stages: Stages | None = None,
    message_bytes: int = 0,
    model: Sequence[int] = (),
    recompute: bool | None = None,
) -> Cut:
    """The graph with its layers on program.ranks pipeline ranks.

    columns  for each data-parallel column the measured ranks of its stages in order; default: every rank is a column
             of its own, that is, the source has no pipeline. New rank = pipeline rank × columns + column.
    stages   which units each stage holds; default: equal runs of layers
    model    the measured unit that stands for each unit of the new model, in order; default: all, each once
    recompute  whether a layer's forward runs again before its backward (activation checkpointing); None: as measured
    Raises UsageError where a layer was not measured or does not divide.
    """
    health = Health()
    ranks = sorted(int(rank) for rank in np.unique(graph.rank[graph.kind != int(NodeKind.RENDEZVOUS)]))
    columns = columns or [[rank] for rank in ranks]
    measured = anatomy
    model = model or range(len(anatomy.units))
    anatomy = _remodelled(anatomy, model)
    stages = stages or split_units(anatomy, program.stages)
    pieces, piece = _pieces(graph, measured)
    size = message_bytes or anatomy.boundary_bytes
    if program.ranks > 1 and not size:
        health.guessed["messages whose size no shape tells"] += 1
    plan = _Plan(program, stages, model, anatomy, recompute, *_fetching(graph, measured, piece))
    laid = [
        _sequence(pieces, plan, members, home, home * len(columns) + column)
        for home in range(program.ranks)
        for column, members in enumerate(columns)
    ]
    rows, plans = [row for row, _ in laid], [runs for _, runs in laid]
    copies = [copy for row in rows for copy in row]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    loom = weave(graph, piece, rows, anatomy.exact_ns, anatomy.entry)
    _issue_behind(loom, copies)
    held = {rank: sorted({key[3] for key in pieces if key[0] == rank and key[3] >= 0}) for rank in ranks}
    _scale_ends(loom, plan, measured, rows, held, graph.rank)
    again = np.array([copy.team >= plan.beyond for copy in copies], np.bool_)
    _split_backwards(loom, plans, starts, again, health)
    group = pipeline_group(loom, program.ranks, len(columns))
    add_messages(loom, program, plans, starts, len(columns), group, size, message_ns)
    if loom.dropped:
        health.dropped["dependencies between layers on different stages"] += loom.dropped
    woven = loom.finish()
    made = replace(woven.graph, multiplicity=_counts(graph, ranks, program.ranks, columns))
    return Cut(made, _moved(anatomy, woven, plans, starts, copies, plan.beyond), woven.origin, health)


def _counts(graph: Graph, ranks: Sequence[int], stages: int, columns: Sequence[Sequence[int]]) -> Int32Array:
    """How many real ranks each new rank stands for: as many as its column's first rank did."""
    if len(graph.multiplicity) != len(ranks):
        return np.ones(stages * len(columns), np.int32)
    of_rank = dict(zip(ranks, graph.multiplicity.tolist(), strict=True))
    return np.array([of_rank[column[0]] for _ in range(stages) for column in columns], np.int32)


def _pieces(graph: Graph, anatomy: Anatomy) -> tuple[dict[Key, int], Int32Array]:
    """Number the pieces; nodes of messages and hubs belong to none."""
    out = np.full(len(graph), -1, np.int32)
    inside = np.flatnonzero(~anatomy.is_message & (graph.kind != int(NodeKind.RENDEZVOUS)))
    phase = anatomy.phase.astype(np.int64).copy()
    ends = np.isin(phase, [int(Phase.OPTIMIZER), int(Phase.OTHER)])
    after = _after_backward(graph, anatomy)
    # Per-step work is two pieces, before the first forward and after the last backward.
    phase[ends] = np.where(after[ends], int(Phase.OPTIMIZER), int(Phase.OTHER))
    # What ends a unit's own work there (its gradients' scatter) is a piece of its own, laid behind its stage's last pass.
    unit = np.where(ends & ~after, -1, anatomy.unit)
    batch = np.where(ends, -1, anatomy.micro_batch)
    keys = np.stack([graph.rank, _steps(graph), phase, unit, batch], axis=1)[inside]
    distinct, code = np.unique(keys, axis=0, return_inverse=True)
    out[inside] = code.reshape(-1)
    return {tuple(key): number for number, key in enumerate(distinct.tolist())}, out


def _fetching(graph: Graph, anatomy: Anatomy, piece: Int32Array) -> tuple[frozenset[int], bool]:
    """The pieces in which parameters are gathered, and whether backward passes are among them."""
    gathers = [
        item.kind == "all_gather" and axis_of_item(item, graph.groups) in DATA_AXES for item in graph.collectives
    ]
    nodes = np.flatnonzero(np.array([*gathers, False], np.bool_)[graph.instance] & (piece >= 0))
    return frozenset(piece[nodes].tolist()), bool((anatomy.phase[nodes] == int(Phase.BACKWARD)).any())


def _steps(graph: Graph) -> IntArray:
    """Step of each node; what stands outside any step before the first keeps -1, and what follows gets a number of its
    own behind the last, so that it is laid there."""
    out = graph.step.astype(np.int64)
    within = np.flatnonzero(out >= 0)
    if not len(within):
        return out
    first = dict(zip(graph.rank[within[::-1]].tolist(), within[::-1].tolist(), strict=True))
    begin = np.array([first.get(rank, len(out)) for rank in range(int(graph.rank.max()) + 1)], np.int64)
    behind = (out < 0) & (graph.rank >= 0) & (np.arange(len(out)) > begin[np.maximum(graph.rank, 0)])
    out[behind] = int(out.max()) + 1
    return out


def _after_backward(graph: Graph, anatomy: Anatomy) -> BoolArray:
    """Whether a node stands behind the first backward node of its rank and step."""
    key = graph.rank.astype(np.int64) * 2**32 + _steps(graph)
    back = np.flatnonzero(anatomy.phase == int(Phase.BACKWARD))
    first = dict(zip(key[back[::-1]].tolist(), back[::-1].tolist(), strict=True))
    limit = np.array([first.get(value, len(key)) for value in np.unique(key).tolist()], np.int64)
    return np.arange(len(key)) > limit[np.searchsorted(np.unique(key), key)]


def template(micro_batch: int, new: int, measured: int) -> int:
    """Which measured micro batch stands for number `micro_batch` of `new`: ends keep their place, the middle repeats."""
    if new <= measured and micro_batch < new - 1:
        return micro_batch
    if micro_batch == new - 1:
        return measured - 1
    if measured < 3:
        return 0
    return micro_batch if micro_batch == 0 else 1 + (micro_batch - 1) % (measured - 2)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be laid: the program, which units (of `anatomy`, the new model) each stage holds, and the measured
    unit that stands for each.

    fetching: pieces in which sharded parameters are gathered; reshards: whether that is so in backward passes too, since
    forward ones give them away
    """

    program: Program
    stages: Stages
    model: Sequence[int]
    anatomy: Anatomy
    recompute: bool | None
    fetching: frozenset[int]
    reshards: bool

    @property
    def beyond(self) -> int:
        """Collective members of teams from here on are those of work that is run again."""
        return self.program.ranks * (len(self.model) + 1)


def _remodelled(anatomy: Anatomy, model: Sequence[int]) -> Anatomy:
    """The anatomy with the units of the new model; layers beyond the measured ones are numbered on."""
    if list(model) == list(range(len(anatomy.units))):
        return anatomy
    names: list[str] = []
    for unit in model:
        name = anatomy.units[unit]
        names.append(name if name not in names else f"{name} copy {len(names)}")
    return replace(
        anatomy,
        units=tuple(names),
        is_layer=tuple(anatomy.is_layer[unit] for unit in model),
        parameters=anatomy.parameters[list(model)],
    )


def _sequence(
    pieces: Mapping[Key, int], plan: _Plan, members: Sequence[int], home: int, new: int
) -> tuple[list[Copy], list[Run]]:
    """The copies of one new rank in order, over all steps, and which of them each action takes."""
    out = _Sequence(pieces, plan, members, home, new)
    for step in sorted({key[1] for key in pieces if key[0] in members}):
        out.lay(step)
    if out.runs and all(run.begin == run.end for run in out.runs if run.action.op is not Op.WEIGHT):
        raise UsageError("the trace shows neither forward nor backward layers, so there is nothing to cut into stages")
    return out.row, out.runs


class _Sequence:
    """The copies of one new rank while they are laid."""

    def __init__(self, pieces: Mapping[Key, int], plan: _Plan, members: Sequence[int], home: int, new: int) -> None:
        self.pieces, self.plan, self.home, self.new = pieces, plan, home, new
        self.where = {(key[3], key[1]): key[0] for key in pieces if key[0] in members and key[3] >= 0}
        self.source = members[home * len(members) // plan.program.ranks]
        self.fetched = fetches(plan.program, home, plan.reshards).passes if plan.fetching else set()
        self.row: list[Copy] = []
        self.runs: list[Run] = []

    def lay(self, step: int) -> None:
        """Lay one step: what comes before the passes, each action, what ends its stage, and the optimizer."""
        actions = self.plan.program.actions[self.home]
        done: Counter[int] = Counter()
        left = Counter(action.stage for action in actions if action.op is not Op.FORWARD)
        self._add((self.source, step, int(Phase.OTHER), -1, -1), self.home)
        for action in actions:
            begin = len(self.row)
            if action.op is not Op.WEIGHT:
                # Backward passes may run in another order, and it is the last of them that reduces gradients.
                place = action.micro_batch if action.op is Op.FORWARD else done[action.stage]
                done[action.stage] += action.op is not Op.FORWARD
                self._pass(step, action, place, action in self.fetched)
            self.runs.append(Run(step, action, begin, len(self.row)))
            left[action.stage] -= action.op is not Op.FORWARD
            if action.op is not Op.FORWARD and not left[action.stage]:
                for unit in self.plan.stages.units[action.stage]:
                    rank, team = self._of(unit, step)
                    self._add((rank, step, int(Phase.OPTIMIZER), self.plan.model[unit], -1), team, -1, unit)
        self._add((self.source, step, int(Phase.OPTIMIZER), -1, -1), self.home)

    def _pass(self, step: int, action: Action, place: int, fetched: bool) -> None:
        """One forward or backward of a stage, the `place`-th of its kind; fetched: its parameters are to be gathered."""
        plan, units, forward = self.plan, self.plan.stages.units[action.stage], action.op is Op.FORWARD
        measured = max(1, plan.anatomy.micro_batches)
        batch = template(place, plan.program.micro_batches, measured)
        for unit in units if forward else reversed(units):
            old = plan.model[unit]
            rank, team = self._of(unit, step)
            recorded = (rank, step, int(Phase.RECOMPUTE), old, batch)
            if not forward and plan.recompute is not False and recorded in self.pieces:
                self._add(recorded, team + plan.beyond, action.micro_batch, unit)
            elif not forward and plan.recompute and plan.anatomy.is_layer[unit]:
                again = (rank, step, int(Phase.FORWARD), old, batch)
                self._add(again, team + plan.beyond, action.micro_batch, unit)
            phase = int(Phase.FORWARD if forward else Phase.BACKWARD)
            taken = batch
            if fetched and self.pieces.get((rank, step, phase, old, batch)) not in plan.fetching:
                # A recorded pass that needed no gather can't stand for one that does.
                near = sorted(range(measured), key=lambda other: abs(other - batch))
                fit = (other for other in near if self.pieces.get((rank, step, phase, old, other)) in plan.fetching)
                taken = next(fit, batch)
            self._add((rank, step, phase, old, taken), team, action.micro_batch, unit)

    def _of(self, unit: int, step: int) -> tuple[int, int]:
        """The measured rank of a unit, and its team: copies of one measured layer are different collectives."""
        old = self.plan.model[unit]
        team = self.home + self.plan.program.ranks * list(self.plan.model[:unit]).count(old)
        return self.where.get((old, step), self.source), team

    def _add(self, key: Key, team: int, tag: int = -1, unit: int = -1) -> None:
        piece = self.pieces.get(key)
        if piece is not None:
            self.row.append(Copy(piece, self.new, team, tag, unit))


def _issue_behind(loom: Loom, copies: Sequence[Copy]) -> None:
    """What ends a unit's own work (its gradients' scatter) is issued when the passes laid before it are done, also where
    the recorded call that issued it stands in a backward pass."""
    ends = np.array([copy.tag < 0 <= copy.unit for copy in copies] + [False], np.bool_)
    arrive = np.flatnonzero((loom.columns["kind"] == int(NodeKind.ARRIVE)) & ends[loom.copy])
    for node in arrive.tolist():
        at = int(loom.copy[node]) - 1
        while at >= 0 and copies[at].rank == copies[at + 1].rank and loom.last[at] < 0:
            at -= 1
        if at >= 0 and copies[at].rank == loom.columns["rank"][node] and loom.last[at] >= 0:
            loom.edge(int(loom.last[at]), node, EdgeKind.HAND_OVER)


def _scale_ends(
    loom: Loom,
    plan: _Plan,
    measured: Anatomy,
    rows: Sequence[Sequence[Copy]],
    held: Mapping[int, Sequence[int]],
    source_rank: Int32Array,
) -> None:
    """Scale what stands behind the last backward (the optimizer) to the stage's share of the parameters.

    held: units that each measured rank holds; source_rank int32: rank of every node of the source.
    """
    new_units, old_units = (_weight_of_units(anatomy) for anatomy in (plan.anatomy, measured))
    new = np.zeros(plan.program.ranks)
    for stage, units in enumerate(plan.stages.units):
        new[plan.program.rank_of_stage[stage]] += new_units[list(units)].sum()
    old = np.array([old_units[list(held.get(rank, ()))].sum() for rank in range(int(source_rank.max()) + 1)])
    home = np.array([copy.team % plan.program.ranks for row in rows for copy in row], np.int64)
    ends = (measured.phase[loom.origin] == int(Phase.OPTIMIZER)) & (measured.unit[loom.origin] < 0)
    at = np.flatnonzero(ends & (loom.columns["instance"] < 0))
    was, now = old[source_rank[loom.origin[at]]], new[home[loom.copy[at]]]
    change = (was > 0) & (was != now)
    loom.exact_ns[at[change]] *= now[change] / was[change]


def _weight_of_units(anatomy: Anatomy) -> FloatArray:
    """Parameters of each unit, equal layers where no shape tells."""
    known = bool(anatomy.parameters.sum())
    return anatomy.parameters if known else np.array([float(is_layer) for is_layer in anatomy.is_layer])


def _split_backwards(
    loom: Loom, plans: Sequence[Sequence[Run]], starts: IntArray, again: BoolArray, health: Health
) -> None:
    """Where a schedule splits backward, the input part keeps the nodes at a share of their time and the weight part
    becomes one node of the rest, since a trace of whole backward passes does not tell them apart.

    again: bool[copies], forward work that is run again there and is whole in the input part
    """
    split = [(new, run) for new, runs in enumerate(plans) for run in runs if run.action.op is Op.INPUT]
    if not split:
        return
    held = np.zeros(int(starts[-1]), np.bool_)
    for new, run in split:
        held[starts[new] + run.begin : starts[new] + run.end] = True
    compute = np.isin(loom.columns["kind"], [int(NodeKind.HOST), int(NodeKind.KERNEL), int(NodeKind.COPY)])
    at = np.flatnonzero(compute & (held & ~again)[loom.copy])
    main = loom.columns["lane"][np.maximum(loom.first, 0)]
    on_main = at[loom.columns["lane"][at] == main[loom.copy[at]]]
    rest = np.bincount(
        loom.copy[on_main], weights=loom.exact_ns[on_main] * (1 - INPUT_SHARE), minlength=len(held)
    ).astype(np.float64)
    loom.exact_ns[at] *= INPUT_SHARE
    health.guessed["backward passes split evenly into input and weight parts"] += len(split)
    for new, runs in enumerate(plans):
        _weight_nodes(loom, runs, new, starts, rest)


def _weight_nodes(loom: Loom, runs: Sequence[Run], new: int, starts: IntArray, rest: FloatArray) -> None:
    """One node for each weight backward of a rank, between the copies before and after it on the main lane."""
    base, end = int(starts[new]), int(starts[new + 1])
    pending: dict[tuple[int, int, int], int] = {}
    tail, tail_is_new = -1, False
    for run in runs:
        key = (run.step, run.action.stage, run.action.micro_batch)
        if run.end > run.begin:
            if tail_is_new:
                _follow(loom, tail, int(loom.first[base + run.begin]))
            tail, tail_is_new = int(loom.last[base + run.end - 1]), False
        if run.action.op is Op.INPUT:
            pending[key] = round(rest[base + run.begin : base + run.end].sum())
        elif run.action.op is Op.WEIGHT and key in pending and tail >= 0:
            node = _weight_node(loom, tail, new, run, pending.pop(key))
            _follow(loom, tail, node)
            tail, tail_is_new = node, True
            # The optimizer, or the next step's first piece, if no action follows.
            _follow(loom, node, next((int(at) for at in loom.first[base + run.end : end] if at >= 0), -1))


def _weight_node(loom: Loom, tail: int, new: int, run: Run, dur_ns: int) -> int:
    lane = loom.lane_of(tail)
    on_host = not loom.lanes[lane].is_device
    return loom.node(
        NodeKind.HOST if on_host else NodeKind.KERNEL,
        dur_ns=dur_ns,
        rank=new,
        lane=lane,
        name=loom.name(str(run.action)),
        step=run.step,
    )


def _follow(loom: Loom, src: int, dst: int) -> None:
    if src >= 0 and dst >= 0:
        on_host = not loom.lanes[loom.lane_of(src)].is_device
        loom.edge(src, dst, EdgeKind.PROGRAM if on_host else EdgeKind.STREAM)


def _moved(
    anatomy: Anatomy,
    woven: Woven,
    plans: Sequence[Sequence[Run]],
    starts: IntArray,
    copies: Sequence[Copy],
    beyond: int,
) -> Anatomy:
    """The anatomy of the new graph; micro batches are those of the new program, new nodes are messages.

    beyond: copies of teams from here on are work that is run again.
    """
    out, graph, copy = anatomy.moved(woven.origin), woven.graph, woven.copy
    batch = np.full(int(starts[-1]) + 1, -1, np.int32)
    for new, runs in enumerate(plans):
        for run in runs:
            batch[starts[new] + run.begin : starts[new] + run.end] = run.action.micro_batch
    micro = np.where((copy >= 0) & (batch[copy] >= 0), batch[copy], out.micro_batch).astype(np.int32)
    kinds = np.array([item.kind in MESSAGES for item in graph.collectives] + [False], np.bool_)
    message = kinds[graph.instance] | out.is_message
    of_copy = np.array([*(each.unit for each in copies), -1], np.int32)
    again = np.array([*(each.team >= beyond for each in copies), False], np.bool_)
    phase = np.where((copy >= 0) & again[copy], int(Phase.RECOMPUTE), out.phase).astype(np.uint8)
    unit = np.where((copy >= 0) & (of_copy[copy] >= 0), of_copy[copy], -1).astype(np.int32)
    out = replace(out, phase=phase, unit=unit, micro_batch=micro, is_message=message)
    return replace(out, exact_ns=woven.exact_ns, entry=woven.entry)
