"""Turns a state into one whose samples' tokens are spread over another number of context-parallel ranks.

Queries are divided, keys and values come from all ranks: attention costs local times global tokens, everything else its
local tokens. The exchanges are those of PyTorch's context_parallel: with causal masks each rank holds one early and one
late piece of the sample, so that all ranks do the same, and attention runs in as many parts as there are ranks, each on
the keys of one of them. Gradients are reduced over context and data ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Work, classify
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES, EXCHANGES
from scaletrace.extrapolate.rewrite.batch import attention_of, more_tokens, token_stretch
from scaletrace.extrapolate.rewrite.data import group_shapes, resized_item
from scaletrace.extrapolate.rewrite.insert import (
    LANES,
    PART,
    Insertion,
    by_place,
    level_of,
    merged,
    multiplied,
    neighbours,
    removed,
    shared,
    spread_groups,
    uninserted,
)
from scaletrace.extrapolate.rewrite.removal import without_nodes
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, passes, recosted, told
from scaletrace.parse.events import BoolArray, Int32Array
from scaletrace.parse.graph import NodeKind

ACCUMULATE_BYTES = 4
"""Gradients of keys and values travel in float32 from rank to rank, whatever the model's precision."""


def spread_context(state: State, degree: int, exchange: str = "") -> State:
    """Tokens of each sample over `degree` context ranks.

    exchange  one of EXCHANGES; "" = as the job does it, or "all_gather"
    Raises UsageError where the tokens do not divide in two causal halves a rank.
    """
    layout, old, recorded = state.layout, state.layout.cp, measured_exchange(state)
    if exchange and exchange not in EXCHANGES:
        raise UsageError(f"keys and values are exchanged by one of {', '.join(EXCHANGES)}, not {exchange!r}")
    if degree < 1 or (degree > 1 and layout.seq % (2 * degree)):
        raise UsageError(f"cp={degree} needs a multiple of {2 * degree} tokens a sample, and there are {layout.seq}")
    wanted = exchange or layout.exchange or recorded or EXCHANGES[0]
    named = replace(layout, cp=degree, exchange=exchange or layout.exchange)
    if degree == old and (degree == 1 or wanted == recorded or not recorded):
        return replace(state, layout=named)
    level = level_of(state, "cp")
    parts = _recorded_parts(state)
    bare = _without_inserted_gradients(state) if old > 1 else state
    recorded_so = old > 1 and not any(lane.name == LANES["cp"] for lane in state.graph.lanes)
    never_reduced = recorded_so and not _reduces(state)
    out = merged(removed(bare, "cp")) if old > 1 else state
    out = _divided(out, old, degree, parts)
    out = _over_more_ranks(out, old, degree)
    out = replace(out, layout=named)
    if degree > 1:
        out = _exchanged(out, degree, wanted, level, parts)
        if never_reduced:
            out = told(out, "The measured context ranks reduce no gradients, so none are reduced over more of them.")
        else:
            out = _gradients(out, degree)
    return multiplied(out, old, degree)


def measured_exchange(state: State) -> str:
    """How the graph's context ranks exchange keys and values, told by what forward and backward issue; "" for none."""
    graph = state.graph
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.instance >= 0)).tolist():
        item = graph.collectives[int(graph.instance[node])]
        if axis_of_item(item, graph.groups) == "cp":
            kinds[int(state.anatomy.phase[node]) == int(Phase.BACKWARD)].add(item.kind)
    forward, backward = kinds[False], kinds[True]
    if not forward | backward:
        return ""
    if "reduce_scatter" in backward:
        return "gather_scatter"
    return "all_gather" if "all_gather" in forward | backward else "ring"


def _recorded_parts(state: State) -> int:
    """In how many parts the trace itself runs each attention: as many as ranks where its keys are local, else one."""
    old = state.layout.cp
    local = state.layout.seq / old
    keys = [
        shape.columns
        for shape, name in zip(state.work.shape, state.graph.name.tolist(), strict=True)
        if shape is not None and shape.work is Work.ATTENTION and not state.graph.names[name].endswith(PART)
    ]
    made_here = any(name.endswith(PART) for name in state.graph.names)
    return old if old > 1 and keys and not made_here and max(keys) <= local else 1


def _divided(state: State, old: int, new: int, parts: int) -> State:
    """Local work: a recorded part becomes new / old parts of old / new of its queries and keys, in one node."""
    factor = old / new
    if parts == 1:
        return more_tokens(state, factor, token_stretch(state, factor, queries=factor, keys=1.0))
    return more_tokens(state, factor, token_stretch(state, factor, batch=1 / factor, queries=factor, keys=factor))


def _over_more_ranks(state: State, old: int, new: int) -> State:
    """Groups and bytes: parameters are spread, or their gradients reduced, over data and context ranks together."""
    graph = state.graph
    used = {graph.groups[item.group].axis for item in graph.collectives if item.group >= 0}
    wide = "fsdp" if "fsdp" in used else "dp"
    groups = tuple(
        replace(before, size=max(1, before.size * new // old)) if before.axis == wide else after
        for before, after in zip(graph.groups, spread_groups(graph.groups, "cp", old, new), strict=True)
    )
    units = group_shapes(state.work.weights, state.anatomy.is_layer)
    items = [resized_item(i, graph.groups, groups, units) if i.group >= 0 else i for i in graph.collectives]
    return recosted(state, items, groups)


@dataclass(frozen=True, slots=True)
class _Attention:
    """One attention of one micro batch: the computing nodes of each of its operators, and the node that does most."""

    operators: tuple[tuple[int, ...], ...]
    cores: tuple[int, ...]
    backward: bool
    local_bytes: int
    gradient_bytes: int


def _attentions(state: State, degree: int, parts: int) -> list[_Attention]:
    """All attentions in order of nodes; without a recorded shape the bytes are those between two layers, twice."""
    out = []
    for run in by_place(state, _attention_nodes(state)):
        operators: list[list[int]] = []
        for node in run.tolist():
            number = int(state.work.op[node])
            new = not operators or number < 0 or int(state.work.op[operators[-1][-1]]) != number
            if new and not (operators and _unfused(state, node) and _unfused(state, operators[-1][-1])):
                operators.append([])
            operators[-1].append(node)
        backward = int(state.anatomy.phase[run[0]]) == int(Phase.BACKWARD)
        for at in range(0, len(operators), parts):
            group = operators[at : at + parts]
            cores = tuple(max(nodes, key=lambda node: float(state.anatomy.exact_ns[node])) for nodes in group)
            size, elements = _key_bytes(state, cores[0], degree, parts)
            gradient = elements * max(ACCUMULATE_BYTES, size // elements) if elements else size
            out.append(_Attention(tuple(map(tuple, group)), cores, backward, size, gradient))
    return out


def _attention_nodes(state: State) -> BoolArray:
    attends = attention_of(state)
    named = np.array([classify(name) is Work.ATTENTION for name in state.graph.names] + [False], np.bool_)
    shaped = np.array([shape is not None and attends(shape) for shape in state.work.shape], np.bool_)
    blind = np.array([shape is None for shape in state.work.shape], np.bool_)
    where = shaped | (blind & named[state.graph.name])
    return np.asarray(where & state.work.computes & passes(state), np.bool_)


def _unfused(state: State, node: int) -> bool:
    shape = state.work.shape[node]
    return shape is not None and shape.work is not Work.ATTENTION


def _key_bytes(state: State, core: int, degree: int, parts: int) -> tuple[int, int]:
    """(bytes, elements) of the keys and values that one rank holds; elements 0 where no shape tells."""
    shape, tokens = state.work.shape[core], state.layout.seq / degree
    if shape is None:
        return 2 * state.anatomy.boundary_bytes, 0
    # A recorded part stands for new / old parts, each of all samples and heads.
    heads = shape.batch * (parts / degree if parts > 1 else 1.0)
    head = shape.depth if shape.work is Work.ATTENTION else min(shape.columns, shape.depth)
    elements = round(2 * heads / shape.queries_per_key * tokens * head)
    return round(elements * shape.element_bytes), elements


def _exchanged(state: State, degree: int, exchange: str, level: float, parts: int) -> State:
    """The state with keys, values and their gradients exchanged around every attention."""
    found = _attentions(state, degree, parts)
    if not found:
        return told(state, "No attention was found, so the exchange of keys and values is missing.")
    if not found[0].local_bytes:
        return told(state, "The size of keys and values is not known, so their exchange is missing.")
    state = replace(state, anatomy=replace(state.anatomy, exact_ns=state.anatomy.exact_ns.copy()))
    shapes = list(state.work.shape)
    split = exchange != "gather_scatter"
    for each in found if split else ():
        if len(each.cores) == 1 and not _unfused(state, each.cores[0]):
            core = each.cores[0]
            time, shape = shared(
                float(state.anatomy.exact_ns[core]), shapes[core], 1 / degree, state.ceilings,
                float(state.work.held_ns[core]) if len(state.work.held_ns) else 0.0,
            )  # fmt: skip
            state.anatomy.exact_ns[core], shapes[core] = time, shape
    state = replace(state, work=replace(state.work, shape=tuple(shapes))).with_durations()
    opened = Insertion(state, "cp", degree, state.layout.tp, level)
    before, behind = neighbours(state.graph)
    for each in found:
        _around(opened, each, exchange, before, behind)
    out = opened.finish()
    return told(out, f"{len(found)} exchanges of keys and values were inserted; their times are the cost model's.")


def _around(opened: Insertion, each: _Attention, exchange: str, before: Int32Array, behind: Int32Array) -> None:
    """The exchanges of one attention; parts wait for the keys that they work on."""
    degree, first, last = opened.size, each.operators[0][0], each.operators[-1][-1]
    size, like = each.local_bytes, each.cores[0]
    if exchange == "gather_scatter":
        half = size // 2
        for _ in range(2):
            if each.backward:
                opened.exchange("reduce_scatter", half * degree, half, like, [last], [int(behind[last])])
            else:
                opened.exchange("all_gather", half, half * degree, like, [int(before[first])], [first])
        return
    parts = _parts(opened, each, behind)

    def part(number: int) -> int:
        return parts[min(number * len(parts) // degree, len(parts) - 1)]

    for number in range(degree):
        if exchange == "ring" and number < degree - 1:
            opened.exchange("all_to_all", size, size, like, [] if number else [int(before[first])], [part(number + 1)])
        elif exchange == "all_gather" and number == 0:
            opened.exchange("all_gather", size, size * degree, like, [int(before[first])], [part(1)])
        if each.backward:
            waits = int(behind[last]) if number == degree - 1 else -1
            grown = each.gradient_bytes
            opened.exchange("all_to_all", grown, grown, like, [part(number)], [waits])


def _parts(opened: Insertion, each: _Attention, behind: Int32Array) -> Sequence[int]:
    """The nodes that work on one rank's keys each: those recorded, or the core and the parts cut off it."""
    core = each.cores[0]
    if len(each.cores) > 1 or _unfused(opened.state, core):
        return each.cores
    parts = [core]
    dur_ns = round(float(opened.state.anatomy.exact_ns[core]))
    for _ in range(opened.size - 1):
        parts.append(opened.part(core, parts[-1], int(behind[core]), dur_ns))
    return parts


def _reduces(state: State) -> bool:
    """Whether the job has collectives over its data ranks, or all of them."""
    groups = state.graph.groups
    return any(item.group >= 0 and groups[item.group].axis in (*DATA_AXES, "world") for item in state.graph.collectives)


def _gradients(state: State, degree: int) -> State:
    """Gradients of a job without data ranks are reduced over context ranks: one all-reduce behind each unit's backward."""
    anatomy = state.anatomy
    if _reduces(state):
        return state
    if not anatomy.parameters.sum():
        return told(state, "No weights are known, so the reduction of gradients over context ranks is missing.")
    width = next((shape.element_bytes for shape in state.work.shape if shape is not None), 4.0)
    last_batch = int(anatomy.micro_batch.max(initial=-1))
    backward = state.work.computes & (anatomy.phase == int(Phase.BACKWARD)) & (anatomy.unit >= 0)
    backward &= anatomy.micro_batch == last_batch
    opened = Insertion(state, "dp", degree, state.layout.tp)
    for run in by_place(state, backward):
        last = int(run[-1])
        size = round(float(anatomy.parameters[int(anatomy.unit[last])]) * width)
        if size:
            opened.exchange("all_reduce", size, size, last, [last], [_optimizer_of(state, last)])
    return told(opened.finish(), "Gradients are reduced over context ranks by all-reduces that were inserted.")


def _optimizer_of(state: State, node: int) -> int:
    """The first computing node of the optimizer behind a node on its rank and step, -1 where none was recorded."""
    graph = state.graph
    mine = (graph.rank == graph.rank[node]) & (graph.step == graph.step[node]) & (graph.instance < 0)
    mine &= state.anatomy.phase == int(Phase.OPTIMIZER)
    mine[:node] = False
    found = np.flatnonzero(mine & np.isin(graph.kind, [int(NodeKind.KERNEL), int(NodeKind.HOST)]))
    return int(found[0]) if len(found) else -1


def _without_inserted_gradients(state: State) -> State:
    """The state without what `_gradients` put in, which the new degree decides anew."""
    own = np.array([lane.name == LANES["dp"] for lane in state.graph.lanes] + [False], np.bool_)[state.graph.lane]
    out = without_nodes(state, own)
    return replace(out, graph=uninserted(out.graph)) if own.any() else state
