"""Turns one rank's host events into sections: which layer, phase and micro batch each moment of a step belongs to.

Evidence, best first: pipeline actions (`PP:3F0`, `Forward 0`) for micro batches; for layers FSDP's annotations with
module names, frames of modules and annotations (ranges.py), the stack that repeats among the operators (repeats.py), and
where no two layers stand in one pass, the one attention. A backward operator belongs to the layer whose forward
operator has its autograd sequence number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from scaletrace.extrapolate.kernels import Work, classify
from scaletrace.extrapolate.operators import Operators, outermost
from scaletrace.extrapolate.ranges import find_ranges, named_layers, plain, stem
from scaletrace.extrapolate.repeats import STACK, Stack, find_stack
from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace, Step

_FSDP = re.compile(r"^FSDP::(pre_forward|post_forward|root_pre_forward)(?: \((.*)\))?$")
_ACTION = re.compile(r"^PP:(\d+)([FBIW])(\d+)$")
_CHUNK = re.compile(r"^(Forward|Backward) (\d+)$")
_INDEX = re.compile(r"(?:^|[._])\d+(?=$|[._])")
_LAST_INDEX = re.compile(r"^(?:.*[._])?\d+(?=$|[._])")
_UPDATE = re.compile(r"_fused_|_foreach_|multi_tensor|adam|sgd|lamb|addcdiv|::lerp_", re.IGNORECASE)
_EMBEDS = re.compile(r"emb|tok|wte", re.IGNORECASE)
_HEADS = re.compile(r"head|output|logit|classif|unembed", re.IGNORECASE)
_SOFTMAX = re.compile(r"^(?!.*log_?softmax).*(::_?softmax$|softmax_warp_forward|SoftMaxForward)", re.IGNORECASE)
_EVENLY = 0.3
_UNSIZED, _WHOLE = 3, 12
"""Operators of a layer at least where no sizes are recorded: a product and its activation may differ in every layer. One
that stands for as many others as _WHOLE (a compiled or checkpointed block) is enough."""
NOTHING = "nothing repeats"
OPERATORS = "repeated operators"
NO_STACK = (
    "no stretch that repeats covers half of the forward pass: the model is no stack of like layers, or its operators and "
    "kernels do not tell them; to name them record with_modules=True, or a record_function around each layer"
)


class Phase(IntEnum):
    """What a moment of a step is for."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    RECOMPUTE = 4
    """Forward work that is done again inside backward (activation checkpointing)."""


@dataclass(frozen=True, slots=True)
class Placed:
    """k kernels by row in the rank's Events (ascending), with phase, unit, micro batch and step as in Sections."""

    row: IntArray
    phase: ByteArray
    unit: Int32Array
    micro_batch: Int32Array
    step: Int32Array


@dataclass(frozen=True, slots=True)
class Sections:
    """s sections of one rank in order of time; each lasts until the next one starts.

    start_ns int64[s]; phase uint8[s] (Phase); unit, micro_batch, step int32[s], -1 = none.
    units: names in model order; `is_layer` says which of them are the repeated ones, `kind` what sort of layer each is
    ("" for the others). `rule` is the evidence used; `why` says why there are no layers, with the remedy.
    uncut: passes in which another number of layers was seen, so that they stay whole
    placed: kernels whose launch does not tell their layer (a whole CUDA graph is one launch), by event row
    """

    start_ns: IntArray
    phase: ByteArray
    unit: Int32Array
    micro_batch: Int32Array
    step: Int32Array
    units: tuple[str, ...]
    is_layer: tuple[bool, ...]
    rule: str
    kind: tuple[str, ...] = ()
    why: str = ""
    uncut: int = 0
    placed: Placed | None = None

    @property
    def layers(self) -> int:
        """How many units are repeated layers."""
        return sum(self.is_layer)

    @property
    def micro_batches(self) -> int:
        """Micro batches of a step."""
        return int(self.micro_batch.max()) + 1 if len(self.micro_batch) else 0

    def at(self, times_ns: IntArray) -> IntArray:
        """Index of the section that holds each moment, -1 before the first."""
        return np.searchsorted(self.start_ns, times_ns, side="right") - 1


@dataclass(slots=True)
class _Marks:
    """Sections while they are collected."""

    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def add(self, start_ns: int, phase: Phase, unit: int, micro_batch: int, step: int) -> None:
        self.rows.append((start_ns, int(phase), unit, micro_batch, step))


def _annotations(events: Events, step: Step) -> list[tuple[int, int, str]]:
    """(start, end, name) of the annotations of a step, in order of time."""
    rows = np.flatnonzero(
        events.in_cats("user_annotation") & (events.ts_ns >= step.start_ns) & (events.ts_ns < step.end_ns)
    )
    return [(int(events.ts_ns[row]), int(events.end_ns[row]), events.name_of(int(row))) for row in rows]


@dataclass(frozen=True, slots=True)
class Pass:
    """The operators of one step: `forward` are the rows of Operators that belong to forward passes, `batch` int32 of
    every operator its micro batch (-1 unknown)."""

    step: Step
    ops: Operators
    notes: list[tuple[int, int, str]]
    forward: IntArray
    batch: Int32Array


def find_sections(trace: RankTrace, evidence: Sequence[Evidence] = ()) -> Sections:
    """Sections of every step of one rank; without marked steps the whole window is one, number -1.

    evidence: what is asked for layers, best first; default: names, then repeated operators
    """
    read = [(step, outermost(trace.events, step), _annotations(trace.events, step)) for step in steps_of(trace)]
    trains = any((ops.backward & (ops.partner >= 0)).any() for _, ops, _ in read)
    passes = [_pass(trace.events, *one, trains) for one in read]
    found = _found(trace.events, passes, evidence or (_by_fsdp, _by_name, _by_repetition))
    marks = _Marks()
    for one, unit in zip(passes, found.unit, strict=True):
        _mark_step(marks, one, _filled(one.ops, unit, one.batch, trains), trace.events)
    rows = np.array(sorted(marks.rows), np.int64).reshape(-1, 5)
    return Sections(
        rows[:, 0],
        rows[:, 1].astype(np.uint8),
        rows[:, 2].astype(np.int32),
        rows[:, 3].astype(np.int32),
        rows[:, 4].astype(np.int32),
        found.names,
        found.is_layer,
        found.rule,
        found.kind,
        "" if any(found.is_layer) else _why(passes),
        found.uncut,
    )


def steps_of(trace: RankTrace) -> tuple[Step, ...]:
    """The marked steps, or one over the whole window."""
    if trace.steps:
        return trace.steps
    known = trace.events.ts_ns != TIME_UNKNOWN
    if not known.any():
        return ()
    return (Step(-1, int(trace.events.ts_ns[known].min()), int(trace.events.end_ns[known].max()) + 1),)


def _pass(events: Events, step: Step, ops: Operators, notes: list[tuple[int, int, str]], trains: bool) -> Pass:
    if trains:
        forward = np.flatnonzero(~ops.backward & (ops.partner >= 0))
        return Pass(step, ops, notes, forward, _micro_batch(ops, notes))
    forward = np.arange(len(ops.row))
    embeds = np.array([classify(text) is Work.EMBEDDING for text in events.strings] + [False], np.bool_)
    return Pass(step, ops, notes, forward, passes_of(ops.token, embeds[events.name[ops.row]]))


def passes_of(tokens: Int32Array, embeds: BoolArray) -> Int32Array:
    """Which pass through the model each item of an inference belongs to: each begins with the same embedding."""
    n = len(tokens)
    best = np.zeros(0, np.int64)
    for token in np.unique(tokens[embeds]).tolist():
        starts = np.flatnonzero(embeds & (tokens == token))
        gaps = np.diff(np.append(starts, n))
        # One that stands several times in a pass (positions, types) is not spread evenly.
        if len(starts) > len(best) and gaps.min() >= _EVENLY * n / len(starts):
            best = starts
    return np.asarray(np.maximum(np.searchsorted(best, np.arange(n), side="right") - 1, 0), np.int32)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of each outermost operator of a step: Phase, unit and micro batch, -1 unknown (int32)."""

    phase: Int32Array
    unit: Int32Array
    micro_batch: Int32Array


@dataclass(frozen=True, slots=True)
class Found:
    """Unit of every operator of each step (int32, -1 unknown), and the units."""

    unit: list[Int32Array]
    names: tuple[str, ...] = ("model",)
    is_layer: tuple[bool, ...] = (False,)
    kind: tuple[str, ...] = ("",)
    rule: str = NOTHING
    uncut: int = 0


Evidence = Callable[[Events, "list[Pass]"], "Found | None"]
"""Turns the passes of a rank into units, None where it sees no layers."""


def _found(events: Events, passes: list[Pass], evidence: Sequence[Evidence]) -> Found:
    """The units by the best evidence there is."""
    for look in evidence:
        found = look(events, passes)
        if found is not None:
            return found
    return Found([np.full(len(one.ops.row), -1, np.int32) for one in passes])


def _why(passes: list[Pass]) -> str:
    """Why no layers were found, and what to record instead."""
    if not any(len(one.ops.row) for one in passes):
        return "the trace holds no operators; record CPU activities too, or name modules with with_modules=True"
    return NO_STACK


def framed(
    count: int, names: Sequence[str], kinds: Sequence[str]
) -> tuple[tuple[str, ...], tuple[bool, ...], tuple[str, ...]]:
    """Names, flags and kinds of `count` layers between embedding and head."""
    return ("embedding", *names, "head"), (False, *([True] * count), False), ("", *kinds, "")


def _by_fsdp(events: Events, passes: list[Pass]) -> Found | None:
    """The modules that FSDP names, where one of them is a layer; modules of one layer count as that layer."""
    modules = _modules([one.notes for one in passes])
    unit_of = _merged_modules(modules)
    units = list(dict.fromkeys(unit_of.values()))
    flags = _layer_flags(units)
    if not any(flags):
        return None
    # A module of its own for embedding or head is what the frame stands for.
    first = not flags[0] and bool(_EMBEDS.search(units[0]))
    last = not flags[-1] and bool(_HEADS.search(units[-1]))
    inner = units[first : len(units) - last]
    place = {unit: at + 1 for at, unit in enumerate(inner)}
    place |= {units[0]: 0} if first else {}
    place |= {units[-1]: len(inner) + 1} if last else {}
    number = {module: place[unit] for module, unit in unit_of.items()}
    flags = flags[first : len(flags) - last]
    kinds = [plain(stem(unit)) if is_layer else "" for unit, is_layer in zip(inner, flags, strict=True)]
    unit = [_by_module(one.ops, one.notes, number, len(inner)) for one in passes]
    return Found(unit, ("embedding", *inner, "head"), (False, *flags, False), ("", *kinds, ""), "FSDP annotations")


def _modules(steps: list[list[tuple[int, int, str]]]) -> list[str]:
    """Modules that FSDP names, in the order of their first forward; the root ("") is not one."""
    seen: dict[str, None] = {}
    for notes in steps:
        for _, _, name in notes:
            found = _FSDP.match(name)
            if found and found[1] == "pre_forward" and found[2]:
                seen.setdefault(found[2])
    return list(seen)


def _merged_modules(modules: list[str]) -> dict[str, str]:
    """Unit of each module: `layers.3.attention` and `layers.3.mlp` are both `layers.3`, as what is inside of it is."""
    whole = {name: _LAST_INDEX.match(name) for name in modules}
    units = {name: found[0] if found else name for name, found in whole.items()}
    heads = sorted(set(units.values()), key=len)
    return {name: next(head for head in heads if f"{unit}.".startswith(f"{head}.")) for name, unit in units.items()}


def _layer_flags(modules: list[str]) -> tuple[bool, ...]:
    """A module is a layer if another has the same name but for its number, or if it is the only one with a number."""
    stems = Counter(_INDEX.sub("#", name) for name in modules)
    numbered = [name for name in stems if "#" in name]
    most = max((stems[name] for name in numbered), default=0)
    return tuple(stems[_INDEX.sub("#", name)] > 1 or (most == 1 and bool(_INDEX.search(name))) for name in modules)


def _by_name(events: Events, passes: list[Pass]) -> Found | None:
    """Layers that frames of modules or annotations name, the same in every step."""
    named = []
    for one in passes:
        ranges = find_ranges(events, one.step, one.ops.start_ns[one.forward])
        named.append(named_layers(ranges, one.ops.token[one.forward], one.batch[one.forward]))
    counts = Counter(len(found.names) for found in named if found is not None)
    if not counts:
        return None
    layers = counts.most_common(1)[0][0]
    first = next(found for found in named if found is not None and len(found.names) == layers)
    unit, uncut = [], 0
    for one, found in zip(passes, named, strict=True):
        mine = np.full(len(one.ops.row), -1, np.int32)
        if found is not None and len(found.names) == layers:
            mine[one.forward] = _spread(found.spans, one.batch[one.forward], layers)
        else:
            uncut += 1
        unit.append(mine)
    return Found(unit, *framed(layers, first.names, first.kinds), first.rule, uncut)


def _spread(spans: Sequence[tuple[int, int, int]], batch: Int32Array, layers: int) -> Int32Array:
    """Unit of each forward operator: its layer, else the one before it in its pass; 0 ahead of all, layers + 1 behind."""
    out = np.full(len(batch), -1, np.int32)
    for first, last, unit in spans:
        out[first:last] = unit + 1
    for number in np.unique(batch).tolist():
        mine = np.flatnonzero(batch == number)
        known = np.flatnonzero(out[mine] > 0)
        if not len(known):
            continue
        at = np.maximum.accumulate(np.where(out[mine] > 0, np.arange(len(mine)), -1))
        out[mine] = np.where(at >= 0, out[mine[np.maximum(at, 0)]], 0)
        out[mine[known[-1] + 1 :]] = layers + 1
    return out


def _by_repetition(events: Events, passes: list[Pass]) -> Found | None:
    """Layers from what repeats among the operators of each micro batch; most micro batches agree on how many."""
    work = [classify(text) for text in events.strings]
    norms = np.array([kind is Work.NORM for kind in work] + [False], np.bool_)
    dims = events.texts("Input Dims")
    inside = [one.ops.inside(events) for one in passes]
    chunks: list[tuple[int, IntArray]] = []
    for number, one in enumerate(passes):
        batch = one.batch[one.forward]
        chunks += [(number, one.forward[batch == at]) for at in np.unique(batch).tolist()]

    def find(number: int, rows: IntArray, want: int) -> Stack | None:
        ops = passes[number].ops
        mine = ops.row[rows]
        stack = find_stack(
            ops.token[rows],
            weight=inside[number][rows].astype(np.float64),
            opens=norms[events.name[mine]],
            cores=attends(events, mine),
            sizes=np.where(inside[number][rows] >= _WHOLE, inside[number][rows], 1),
            want=want,
        )
        if stack is None or (dims[mine] >= 0).any():
            return stack
        through = slice(int(stack.first[0]), int(stack.last[-1]))
        whole = int(inside[number][rows[through]].max()) >= _WHOLE
        return stack if whole or through.stop - through.start >= _UNSIZED * len(stack) else None

    cut = agreed(chunks, find, lambda number, rows: float(inside[number][rows].sum()))
    if cut is None:
        return None
    stacks, layers, kinds, uncut = cut
    unit = [np.full(len(one.ops.row), -1, np.int32) for one in passes]
    for (number, rows), stack in zip(chunks, stacks, strict=True):
        if stack is not None:
            unit[number][rows] = units_of(stack, len(rows))
    names = [f"layer {i}" for i in range(layers)]
    return Found(unit, *framed(layers, names, kinds), OPERATORS, uncut)


def attends(events: Events, rows: IntArray) -> BoolArray:
    """Which of some operators or kernels is the one of attention that stands in a layer once.

    It is the fused one; where none is fused the softmax, which routers of experts have too.
    """
    codes, place = np.unique(events.name[rows], return_inverse=True)
    texts = [events.strings[code] for code in codes.tolist()]
    fused = np.array([classify(text) is Work.ATTENTION for text in texts], np.bool_)
    if not fused.any():
        fused = np.array([bool(_SOFTMAX.search(text)) for text in texts], np.bool_)
    return np.asarray(fused[place.reshape(-1)], np.bool_)


def agreed(
    chunks: Sequence[tuple[int, IntArray]],
    find: Callable[[int, IntArray, int], Stack | None],
    weigh: Callable[[int, IntArray], float],
) -> tuple[list[Stack | None], int, list[str], int] | None:
    """(stack of each chunk, layers, kinds, chunks without) when the chunks are cut into as many layers as most of them.

    find(number, rows, want) looks for a stack, of `want` layers where that is not 0; weigh(number, rows) is what a
    chunk counts. None where the layers hold less than half of all chunks.
    """
    stacks = [find(number, rows, 0) for number, rows in chunks]
    weights = [weigh(number, rows) for number, rows in chunks]
    counts: dict[int, float] = defaultdict(float)
    for stack, weight in zip(stacks, weights, strict=True):
        if stack is not None:
            counts[len(stack)] += weight
    if not counts:
        return None
    layers = max(counts, key=lambda count: (counts[count], count))
    for at, (number, rows) in enumerate(chunks):
        stack = stacks[at]
        if stack is None or len(stack) != layers:
            stacks[at] = find(number, rows, layers)
    held = sum(stack.share * weight for stack, weight in zip(stacks, weights, strict=True) if stack is not None)
    if held < STACK * sum(weights):
        return None
    first = next(stack for stack in stacks if stack is not None)
    return stacks, layers, kind_names(first), sum(stack is None for stack in stacks)


def kind_names(stack: Stack) -> list[str]:
    """What the kinds of a stack are called: layer, or layer A, layer B, …"""
    several = int(stack.kind.max()) > 0
    return [f"layer {'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[kind % 26]}" if several else "layer" for kind in stack.kind.tolist()]


def units_of(stack: Stack, n: int, backwards: bool = False) -> Int32Array:
    """Unit of each of the n items that a stack was found in; in a backward pass the last layer comes first."""
    at = np.searchsorted(stack.first, np.arange(n), side="right")
    behind = np.arange(n) >= stack.last[-1]
    unit = np.where(behind, len(stack) + 1, at)
    return np.asarray(len(stack) + 1 - unit if backwards else unit, np.int32)


def _micro_batch(ops: Operators, notes: list[tuple[int, int, str]]) -> Int32Array:
    """Micro batch of each forward operator that has a backward node: by annotation, else by the pass that it is in."""
    out = np.full(len(ops.start_ns), -1, np.int32)
    forward = np.flatnonzero(~ops.backward & (ops.partner >= 0))
    for start, end, name in notes:
        action, chunk = _ACTION.match(name), _CHUNK.match(name)
        number = action[3] if action else chunk[2] if chunk else None
        if number is not None:
            out[(ops.start_ns >= start) & (ops.start_ns < end)] = int(number)
    block = ops.block[ops.partner[forward]]
    told = out[forward]
    if not (told >= 0).any():
        order = {int(number): at for at, number in enumerate(dict.fromkeys(block.tolist()))}
        out[forward] = [order[number] for number in block.tolist()]
        return out
    # What an annotation leaves out (the loss) goes with the rest of its backward pass.
    of_block = {int(b): int(m) for b, m in zip(block.tolist(), told.tolist(), strict=True) if m >= 0}
    out[forward] = [m if m >= 0 else of_block.get(b, -1) for b, m in zip(block.tolist(), told.tolist(), strict=True)]
    return out


def _by_module(ops: Operators, notes: list[tuple[int, int, str]], number: Mapping[str, int], units: int) -> Int32Array:
    """Unit of each operator from the FSDP annotations around it: 0 before the first unit, units + 1 after the last."""
    marks = []
    for start, end, name in notes:
        found = _FSDP.match(name)
        if found and found[2] in number:
            unit = number[found[2]]
            if found[1] == "pre_forward":
                marks.append((start, unit))
            elif found[1] == "post_forward" and unit == units:
                marks.append((end, unit + 1))
        elif found and found[1] == "root_pre_forward":
            marks.append((start, 0))
    marks.sort()
    if not marks:
        return np.full(len(ops.row), -1, np.int32)
    starts = np.array([start for start, _ in marks], np.int64)
    at = np.searchsorted(starts, ops.start_ns, side="right") - 1
    numbers = np.array([number for _, number in marks], np.int32)
    return np.where(at >= 0, numbers[np.maximum(at, 0)], 0).astype(np.int32)


def _filled(ops: Operators, unit: Int32Array, batch: Int32Array, trains: bool) -> _Plan:
    """Backward nodes get the unit and micro batch of their operator, everything between that of its neighbour before."""
    if not trains:
        return _Plan(np.full(len(unit), int(Phase.FORWARD), np.int32), unit, batch)
    paired = ops.partner >= 0
    nodes = np.flatnonzero(ops.backward & paired)
    unit, batch = unit.copy(), batch.copy()
    unit[nodes], batch[nodes] = unit[ops.partner[nodes]], batch[ops.partner[nodes]]
    phase = np.where(ops.backward, int(Phase.BACKWARD), int(Phase.FORWARD)).astype(np.int32)
    known = paired
    at = np.maximum.accumulate(np.where(known, np.arange(len(unit)), -1))
    ahead = np.flatnonzero(known)
    first = int(ahead[0]) if len(ahead) else 0
    use = np.where(at >= 0, at, first)
    if not len(ahead):
        return _Plan(np.zeros(len(unit), np.int32), np.full(len(unit), -1, np.int32), np.full(len(unit), -1, np.int32))
    # An autograd node without a partner that opens a backward pass (the loss) goes with what follows it.
    behind = np.minimum.accumulate(np.where(known, np.arange(len(unit)), len(unit))[::-1])[::-1]
    opens = ops.backward & ~known & ~ops.backward[use] & (behind < len(unit))
    use = np.where(opens, np.minimum(behind, len(unit) - 1), use)
    return _Plan(phase[use], unit[use], batch[use])


def _mark_step(marks: _Marks, one: Pass, plan: _Plan, events: Events) -> None:
    """One section wherever phase, unit or micro batch change; the optimizer's annotation ends the last of them."""
    step, ops, number = one.step, one.ops, one.step.number
    marks.add(step.start_ns, Phase.OTHER, -1, -1, number)
    back = np.flatnonzero(ops.backward)
    working = int(back[-1]) + 1 if len(back) else len(ops.row) if (plan.phase == int(Phase.FORWARD)).any() else 0
    columns = np.stack([plan.phase, plan.unit, plan.micro_batch], axis=1)[:working]
    differs = (columns[1:] != columns[:-1]).any(axis=1)
    for at in np.flatnonzero(np.append(True, differs)) if working else ():
        marks.add(int(ops.start_ns[at]), Phase(int(columns[at, 0])), int(columns[at, 1]), int(columns[at, 2]), number)
    optimizer = [(start, end) for start, end, name in one.notes if name.startswith("Optimizer.step")]
    if not optimizer and len(back):
        optimizer = _updates(ops, events, working)
    for start, end in optimizer:
        marks.add(start, Phase.OPTIMIZER, -1, -1, number)
        marks.add(end, Phase.OTHER, -1, -1, number)
    if len(back) and working < len(ops.row) and not any(start <= ops.start_ns[working] for start, _ in optimizer):
        marks.add(int(ops.start_ns[working]), Phase.OTHER, -1, -1, number)


def _updates(ops: Operators, events: Events, begin: int) -> list[tuple[int, int]]:
    """Where no annotation tells: from the first to the last operator behind the backward pass that updates weights."""
    named = np.array([bool(_UPDATE.search(text)) for text in events.strings] + [False], np.bool_)
    rows = begin + np.flatnonzero(named[events.name[ops.row[begin:]]])
    return [(int(ops.start_ns[rows[0]]), int(ops.end_ns[rows[-1]]))] if len(rows) else []
