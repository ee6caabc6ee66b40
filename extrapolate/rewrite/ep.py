"""Turns a state into one whose experts lie on another number of ranks, with the imbalance of the new split.

What each rank sends stays (its tokens times the experts that each goes to); it goes to more or fewer peers, of which one
is the rank itself. A rank holds fewer or more experts, each with more or fewer tokens, so its products keep their FLOP
and read other weights. The fullest rank sets the pace of exchanges and experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, Layout
from scaletrace.extrapolate.nodework import Role
from scaletrace.extrapolate.rewrite.batch import attention_of
from scaletrace.extrapolate.rewrite.data import resized_item
from scaletrace.extrapolate.rewrite.insert import Insertion, by_place, level_of, neighbours, nodes_of_axis, removed
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, cost_s, recosted, scaled_bytes, stretched, told
from scaletrace.extrapolate.routing import SEED, TINY, Imbalance, imbalance, of_experts
from scaletrace.parse.events import BoolArray, ByteArray, IntArray
from scaletrace.parse.graph import GraphCollective, GraphGroup, NodeKind

FIRST_EXPERT, LAST_EXPERT = 64, 128
"""Bits of NodeWork.mark: ends of a stretch of experts whose exchanges were taken out."""
COUNT_BYTES = 8
_EXPERTS_OWN = re.compile(r"edp|(?<!shared)(?<!shared[ _.-])expert|(in|mod)_ep", re.IGNORECASE)
"""Names of groups that hold the same experts, where a group of one rank shows nothing else. Every rank holds a shared
expert, so its gradients are those of the rest."""


def spread_experts(state: State, degree: int, tokens_by_expert: Sequence[float] = (), seed: int = SEED) -> State:
    """Experts over `degree` ranks.

    tokens_by_expert  tokens of each expert, where the caller knows them better than the capture's split sizes tell
    seed              of the loads that are drawn where experts of one rank are divided
    Raises UsageError where the job shows no experts or they do not divide.
    """
    state = _gradients_apart(state)
    old, groups = state.layout.ep, state.graph.groups
    recorded = [group for group in groups if group.axis == "ep" and group.size > 1]
    old = recorded[0].size if recorded else 1 if not any(group.axis == "ep" for group in groups) else old
    if degree == old and not len(tokens_by_expert):
        return replace(state, layout=replace(state.layout, ep=degree))
    if not recorded and not expert_products(state).any() and not (state.work.mark & FIRST_EXPERT).any():
        raise UsageError(
            "the trace has no expert-parallel group to change and no grouped products of experts; record the job with "
            "ep > 1, or with record_shapes=True"
        )
    _check(state, old, degree, tokens_by_expert)
    before, after = _imbalances(state, old, degree, tokens_by_expert, seed)
    level = level_of(state, "ep")
    if old == 1:
        state = _own_groups(_marked(state), degree)
    out = _divided(state, old, degree, after.value / before.value)
    out = _parameters(out, old, degree) if old > 1 else out
    if degree == 1:
        out = removed(_resized(_marked(out), 1), "ep")
    elif old == 1:
        out = _inserted(out, degree, level * after.value)
    else:
        out = _exchanges(out, degree, before.value, after.value)
    return _noted(replace(out, layout=replace(state.layout, ep=degree)), state, after, tokens_by_expert, seed)


def _check(state: State, old: int, new: int, tokens_by_expert: Sequence[float]) -> None:
    experts = len(tokens_by_expert)
    if new < 1 or (experts and experts % new):
        raise UsageError(f"ep={new} does not divide {experts} experts")
    local = {round(shape.batch) for shape, grouped in zip(state.work.shape, expert_products(state), strict=True)
             if grouped and shape is not None}  # fmt: skip
    for count in local:
        if count * old % new:
            raise UsageError(f"ep={new} does not divide {count * old} experts")


def _imbalances(
    state: State, old: int, new: int, tokens_by_expert: Sequence[float], seed: int
) -> tuple[Imbalance, Imbalance]:
    if len(tokens_by_expert):
        loads = np.array(tokens_by_expert, float)
        both = [1.0 if degree == 1 else of_experts(loads, degree) for degree in (old, new)]
        return Imbalance(both[0], both[0], both[0]), Imbalance(both[1], both[1], both[1])
    return imbalance(state.routing, old, seed), imbalance(state.routing, new, seed)


def _noted(state: State, before: State, after: Imbalance, tokens_by_expert: Sequence[float], seed: int) -> State:
    """The state with what was assumed of the routing in its report, and in its error the share of time it decides."""
    if len(tokens_by_expert) or state.layout.ep == 1:
        return state
    if not before.routing.known:
        out = told(state, guess="expert loads taken as even, since the trace does not tell them")
    elif after.drawn:
        out = told(
            state,
            f"Loads of {state.layout.ep} expert ranks were drawn (seed {seed}): the fullest has {after.value:.2f} times "
            f"the mean, {after.low:.2f} to {after.high:.2f} in nine of ten draws.",
        )
    else:
        out = told(state, f"The fullest of {state.layout.ep} expert ranks has {after.value:.2f} times the mean load, "
                   f"as the {before.routing.source} of the trace tell.")  # fmt: skip
    touched = _experts(state) | (nodes_of_axis(state, "ep") & (state.graph.kind == int(NodeKind.TRANSFER)))
    work = state.work.computes | touched
    total = float(state.anatomy.exact_ns[work].sum())
    share = float(state.anatomy.exact_ns[touched].sum()) / total if total else 0.0
    return replace(out, error=float(np.hypot(out.error, share * after.rel_error)))


def expert_products(state: State) -> BoolArray:
    """Products of several matrices each with rows of its own that are no attention: grouped by expert."""
    attends = attention_of(state)
    return np.array(
        [shape is not None and shape.work is Work.MATMUL and shape.batch > 1 and not attends(shape)
         for shape in state.work.shape], np.bool_
    ) & state.work.computes  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stretch:
    """One micro batch's experts of one layer in one direction: the nodes between dispatch and combine, in order."""

    nodes: IntArray
    phase: int


def _stretches(state: State) -> list[_Stretch]:
    """The computing nodes between the exchanges of tokens, or where none is there between marks or around products."""
    graph, anatomy, computes = state.graph, state.anatomy, state.work.computes
    out = []
    if any(group.axis == "ep" and group.size > 1 for group in graph.groups):
        for run in by_place(state, _token_transfers(state)):
            for first, last in zip(run[::2].tolist(), run[1::2].tolist(), strict=False):
                inside = np.arange(first + 1, last)
                inside = inside[computes[inside] & (graph.rank[inside] == graph.rank[first])]
                inside = inside[anatomy.micro_batch[inside] == anatomy.micro_batch[first]]
                if len(inside):
                    out.append(_Stretch(inside, int(anatomy.phase[first])))
        return out
    marked = (state.work.mark & (FIRST_EXPERT | LAST_EXPERT)) > 0
    for run in by_place(state, marked if marked.any() else expert_products(state)):
        begins = run[(state.work.mark[run] & FIRST_EXPERT) > 0] if marked.any() else run[:1]
        ends = run[(state.work.mark[run] & LAST_EXPERT) > 0] if marked.any() else run[-1:]
        for first, last in zip(begins.tolist(), ends.tolist(), strict=False):
            inside = np.arange(first, last + 1)
            inside = inside[computes[inside] & (graph.rank[inside] == graph.rank[first])]
            out.append(_Stretch(inside, int(anatomy.phase[first])))
    return out


def _token_transfers(state: State) -> BoolArray:
    """TRANSFER nodes of all-to-alls of the expert axis that carry tokens; what carries counts is far smaller."""
    graph = state.graph
    size = np.array([max(i.bytes_in, i.bytes_out) if i.kind == "all_to_all" and axis_of_item(i, graph.groups) == "ep"
                     else -1 for i in graph.collectives] + [-1])  # fmt: skip
    tokens = size >= TINY * size.max(initial=0)
    tokens &= size > 0 if (size > 0).any() else size >= 0
    return np.asarray(tokens[graph.instance] & (graph.kind == int(NodeKind.TRANSFER)), np.bool_)


def _experts(state: State) -> BoolArray:
    out = np.zeros(len(state.graph), np.bool_)
    for each in _stretches(state):
        out[each.nodes] = True
    return out


def _divided(state: State, old: int, new: int, fuller: float) -> State:
    """Work of experts: new / old as many tokens for each of old / new as many experts, times what the fullest has more."""
    tokens = new / old

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        if shape is None:
            return None, fuller
        if shape.work is Work.MATMUL:
            return shape.scaled(rows=tokens * fuller, batch=1 / tokens), fuller
        return shape.scaled(rows=fuller), fuller

    return stretched(state, stretch, _experts(state))


def _parameters(state: State, old: int, new: int) -> State:
    """The experts' own data groups (every ep-th data rank) shrink as experts spread, and move fewer bytes each."""
    layout, groups = state.layout, state.graph.groups
    strides = [group.stride for group in groups if group.axis == "ep" and group.size > 1 and group.stride > 0]
    stride = strides[0] if strides else layout.tp * layout.cp
    data = layout.data_ranks * layout.cp
    own = {index for index, group in enumerate(groups) if _of_experts(group, old, stride, data, layout)}
    if not own:
        return state
    out = tuple(
        replace(group, size=max(1, group.size * old // new), stride=stride * new) if index in own else group
        for index, group in enumerate(groups)
    )
    items: list[GraphCollective] = [
        resized_item(scaled_bytes(item, old / new), groups, out, ()) if item.group in own else item
        for item in state.graph.collectives
    ]
    named = sorted(groups[index].description for index in own if groups[index].size == 1)
    for name in named:
        state = told(state, guess=f"group {name!r} taken for the experts' own by its name, as it has one rank")
    return recosted(state, items, out)


def _own_groups(state: State, new: int) -> State:
    """Gradients of experts, told by their bytes, move to groups of the ranks that will hold the same ones."""
    graph, data = state.graph, state.layout.data_ranks * state.layout.cp
    stride = state.layout.tp * state.layout.cp
    matrices = {
        shape.batch * shape.columns * shape.depth
        for shape, grouped in zip(state.work.shape, expert_products(state), strict=True)
        if grouped and shape is not None
    }
    wanted = {round(elements * width) for elements in matrices for width in (1, 2, 4)}
    found = [
        at
        for at, item in enumerate(graph.collectives)
        if item.kind == "all_reduce"
        and axis_of_item(item, graph.groups) in (*DATA_AXES, "world")
        and graph.groups[item.group].size == data
        and item.bytes_in in wanted
    ]
    if not found:
        return told(
            state, "Which gradients are those of experts is not told by their bytes; all stay with all data ranks."
        )
    groups = (*graph.groups, GraphGroup("dp", data // new, stride * new, 1, "edp"))
    items = list(graph.collectives)
    for at in found:
        items[at] = replace(scaled_bytes(items[at], 1 / new), group=len(graph.groups))
    # Costs are compared in the old groups and the new ones, so the old graph needs the new group too.
    out = replace(state, graph=replace(graph, groups=groups))
    return recosted(out, items, groups)


def _of_experts(group: GraphGroup, ep: int, stride: int, data: int, layout: Layout) -> bool:
    """Whether a data group joins the ranks that hold the same experts: one in `ep` of the data ranks."""
    if group.axis not in DATA_AXES or group.size * ep != data:
        return False
    if group.size == 1:
        return bool(_EXPERTS_OWN.search(group.description))
    return group.stride == stride * ep and getattr(layout, group.axis) != group.size


def _gradients_apart(state: State) -> State:
    """Where experts lie on all data ranks, one group carries tokens and gradients: gradients get one of their own."""
    graph = state.graph
    mixed = [
        at
        for at, item in enumerate(graph.collectives)
        if item.kind == "all_reduce" and axis_of_item(item, graph.groups) == "ep"
    ]
    if not mixed:
        return state
    groups, items = list(graph.groups), list(graph.collectives)
    own: dict[int, int] = {}
    for at in mixed:
        index = items[at].group
        if index not in own:
            own[index] = len(groups)
            groups.append(replace(groups[index], axis="dp"))
        items[at] = replace(items[at], group=own[index])
    return replace(state, graph=replace(graph, groups=tuple(groups), collectives=tuple(items)))


def _exchanges(state: State, new: int, before: float, after: float) -> State:
    """The all-to-alls over `new` peers; their time is the model's ratio at the bytes of the fullest rank."""
    graph, groups = state.graph, _resized(state, new).graph.groups
    exact = state.anatomy.exact_ns.copy()
    factor = np.ones(len(graph.collectives) + 1)
    for at, item in enumerate(graph.collectives):
        if axis_of_item(item, graph.groups) == "ep":
            was = cost_s(state.network, scaled_bytes(item, before), graph.groups)
            now = cost_s(state.network, scaled_bytes(item, after), groups)
            factor[at] = now / was if was > 0 else 1.0
    transfers = graph.kind == int(NodeKind.TRANSFER)
    exact[transfers] *= factor[graph.instance[transfers]]
    out = replace(state, graph=replace(graph, groups=groups), anatomy=replace(state.anatomy, exact_ns=exact))
    return out.with_durations()


def _resized(state: State, new: int) -> State:
    groups = tuple(replace(group, size=new) if group.axis == "ep" else group for group in state.graph.groups)
    return replace(state, graph=replace(state.graph, groups=groups))


def _marked(state: State) -> State:
    """The state with the ends of its experts' stretches marked, so that exchanges can come back there."""
    mark: ByteArray = state.work.mark.copy()
    for each in _stretches(state):
        mark[each.nodes[0]] |= FIRST_EXPERT
        mark[each.nodes[-1]] |= LAST_EXPERT
    return replace(state, work=replace(state.work, mark=mark))


def _inserted(state: State, degree: int, level: float) -> State:
    """The state with tokens counted and dispatched before the experts of every layer and combined behind them.

    The counts of all experts go first in forward, as the receiver has to know how much comes.
    """
    opened = Insertion(state, "ep", degree, state.layout.tp * state.layout.cp, level)
    before, behind = neighbours(state.graph)
    blind = 0
    for each in _stretches(state):
        first, last = int(each.nodes[0]), int(each.nodes[-1])
        products = [shape for node in each.nodes.tolist() if (shape := state.work.shape[node]) is not None
                    and shape.work is Work.MATMUL]  # fmt: skip
        if products:
            tokens = round(products[0].rows * products[0].batch)
            backward = each.phase == int(Phase.BACKWARD)
            ends = (products[-1], products[0]) if backward else (products[0], products[-1])
            width = min(ends[0].depth, ends[1].columns)
            size = round(tokens * width * products[0].element_bytes)
            experts = max(degree, round(products[0].batch * degree))
        else:
            size, experts, blind = state.anatomy.boundary_bytes, degree, blind + 1
        if each.phase != int(Phase.BACKWARD):
            counts = experts * COUNT_BYTES
            opened.exchange("all_to_all", counts, counts, first, [int(before[first])], [first])
        opened.exchange("all_to_all", size, size, first, [int(before[first])], [first])
        opened.exchange("all_to_all", size, size, last, [last], [int(behind[last])])
    out = told(opened.finish(), "All-to-alls of experts were inserted; their times are the cost model's.")
    if blind:
        out = told(out, guess="exchanges of experts whose size no shape tells, taken as one layer's activations")
    return out
