"""Turns one rank's host events into sections: which layer, phase and micro batch each moment of a step belongs to.

Evidence, best first: pipeline actions (`PP:3F0`, `Forward 0`), FSDP's annotations with module names, and where nothing
is named the longest run of repeated operators. A backward operator belongs to the layer whose forward operator has its
autograd sequence number.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from scaletrace.extrapolate.operators import Operators, outermost
from scaletrace.parse.events import ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace, Step

MAX_PERIOD = 4096
"""Longest repeated unit that is looked for, in operators."""

_FSDP = re.compile(r"^FSDP::(pre_forward|post_forward|root_pre_forward)(?: \((.*)\))?$")
_ACTION = re.compile(r"^PP:(\d+)([FBIW])(\d+)$")
_CHUNK = re.compile(r"^(Forward|Backward) (\d+)$")
_INDEX = re.compile(r"(?:^|[._])\d+(?=$|[._])")


class Phase(IntEnum):
    """What a moment of a step is for."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    RECOMPUTE = 4
    """Forward work that is done again inside backward (activation checkpointing)."""


@dataclass(frozen=True, slots=True)
class Sections:
    """s sections of one rank in order of time; each lasts until the next one starts.

    start_ns int64[s]; phase uint8[s] (Phase); unit, micro_batch, step int32[s], -1 = none.
    units: names in model order; `is_layer` says which of them are the repeated ones. `rule` is the evidence used.
    """

    start_ns: IntArray
    phase: ByteArray
    unit: Int32Array
    micro_batch: Int32Array
    step: Int32Array
    units: tuple[str, ...]
    is_layer: tuple[bool, ...]
    rule: str

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


@dataclass(frozen=True, slots=True)
class Repeats:
    """A stretch of a sequence that repeats: from `start`, `count` times `period` items; count 1 = nothing repeats."""

    start: int
    period: int
    count: int


def find_repeats(tokens: Int32Array, max_period: int = MAX_PERIOD) -> Repeats:
    """The repetition that covers most of `tokens`; of those that cover as much, the one with the shortest period."""
    n = len(tokens)
    best = Repeats(0, n, 1)
    covered = 0
    for period in range(1, min(n // 2, max_period) + 1):
        same = tokens[period:] == tokens[:-period]
        if int(same.sum()) + period <= covered:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        at = int(np.argmax(lengths)) if len(lengths) else -1
        if at < 0 or lengths[at] < period:
            continue
        count = int(lengths[at]) // period + 1
        if count * period > covered:
            covered = count * period
            best = Repeats(int(starts[at]), period, count)
    return best


def _annotations(events: Events, step: Step) -> list[tuple[int, int, str]]:
    """(start, end, name) of the annotations of a step, in order of time."""
    rows = np.flatnonzero(
        events.in_cats("user_annotation") & (events.ts_ns >= step.start_ns) & (events.ts_ns < step.end_ns)
    )
    return [(int(events.ts_ns[row]), int(events.end_ns[row]), events.name_of(int(row))) for row in rows]


def find_sections(trace: RankTrace) -> Sections:
    """Sections of every step of one rank."""
    per_step = []
    for step in trace.steps:
        ops, notes = outermost(trace.events, step), _annotations(trace.events, step)
        per_step.append((step, ops, notes))
    names, layer_flags, rule, plans = _units(per_step)
    marks = _Marks()
    for (step, ops, notes), plan in zip(per_step, plans, strict=True):
        _mark_step(marks, step, ops, notes, plan)
    rows = np.array(sorted(marks.rows), np.int64).reshape(-1, 5)
    return Sections(
        rows[:, 0],
        rows[:, 1].astype(np.uint8),
        rows[:, 2].astype(np.int32),
        rows[:, 3].astype(np.int32),
        rows[:, 4].astype(np.int32),
        names,
        layer_flags,
        rule,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of each outermost operator of a step: Phase, unit and micro batch, -1 unknown (int32)."""

    phase: Int32Array
    unit: Int32Array
    micro_batch: Int32Array


def _units(
    per_step: list[tuple[Step, Operators, list[tuple[int, int, str]]]],
) -> tuple[tuple[str, ...], tuple[bool, ...], str, list[_Plan]]:
    """Names of the units, which are layers, the evidence, and the plan of every step."""
    modules = _modules(per_step)
    plans: list[_Plan] = []
    names: tuple[str, ...] = ("model",)
    flags: tuple[bool, ...] = (False,)
    rule = "nothing repeats"
    for _, ops, notes in per_step:
        batch = _micro_batch(ops, notes)
        if modules:
            unit = _by_module(ops, notes, modules)
            names = ("embedding", *modules, "head")
            flags = (False, *_layer_flags(modules), False)
            rule = "FSDP annotations"
        else:
            unit, found = _by_repetition(ops, batch)
            if found:
                names = ("embedding", *(f"layer {i}" for i in range(found)), "head")
                flags = (False, *([True] * found), False)
                rule = "repeated operators"
        plans.append(_filled(ops, unit, batch))
    return names, flags, rule, plans


def _modules(per_step: list[tuple[Step, Operators, list[tuple[int, int, str]]]]) -> list[str]:
    """Modules that FSDP names, in the order of their first forward; the root ("") is not one."""
    seen: dict[str, None] = {}
    for _, _, notes in per_step:
        for _, _, name in notes:
            found = _FSDP.match(name)
            if found and found[1] == "pre_forward" and found[2]:
                seen.setdefault(found[2])
    return list(seen)


def _layer_flags(modules: list[str]) -> tuple[bool, ...]:
    """A module is a layer if another has the same name but for its number."""
    stems = Counter(_INDEX.sub("#", name) for name in modules)
    return tuple(stems[_INDEX.sub("#", name)] > 1 for name in modules)


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


def _by_module(ops: Operators, notes: list[tuple[int, int, str]], modules: list[str]) -> Int32Array:
    """Unit of each operator from the FSDP annotations around it: 0 before the first module, len + 1 after the last."""
    marks = []
    for start, end, name in notes:
        found = _FSDP.match(name)
        if found and found[2] in modules:
            number = modules.index(found[2]) + 1
            if found[1] == "pre_forward":
                marks.append((start, number))
            elif found[1] == "post_forward" and number == len(modules):
                marks.append((end, number + 1))
        elif found and found[1] == "root_pre_forward":
            marks.append((start, 0))
    marks.sort()
    starts = np.array([start for start, _ in marks], np.int64)
    at = np.searchsorted(starts, ops.start_ns, side="right") - 1
    numbers = np.array([number for _, number in marks], np.int32)
    return np.where(at >= 0, numbers[np.maximum(at, 0)], 0).astype(np.int32)


def _by_repetition(ops: Operators, batch: Int32Array) -> tuple[Int32Array, int]:
    """(unit of each forward operator, layers) from what repeats inside the first micro batch; 0 layers = nothing."""
    unit = np.full(len(batch), -1, np.int32)
    forward = np.flatnonzero(~ops.backward & (ops.partner >= 0))
    if not len(forward):
        return unit, 0
    numbers = np.unique(batch[forward])
    first = forward[batch[forward] == numbers[0]]
    inner = find_repeats(ops.token[first])
    if inner.count < 2:
        return unit, 0
    for number in numbers.tolist():
        mine = forward[batch[forward] == number]
        layer = (np.arange(len(mine)) - inner.start) // inner.period
        unit[mine] = np.where(layer < 0, 0, np.minimum(layer, inner.count) + 1)
    return unit, inner.count


def _filled(ops: Operators, unit: Int32Array, batch: Int32Array) -> _Plan:
    """Backward nodes get the unit and micro batch of their operator, everything between that of its neighbour before."""
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


def _mark_step(marks: _Marks, step: Step, ops: Operators, notes: list[tuple[int, int, str]], plan: _Plan) -> None:
    """One section wherever phase, unit or micro batch change; the optimizer's annotation ends the last of them."""
    number = step.number
    marks.add(step.start_ns, Phase.OTHER, -1, -1, number)
    optimizer = [(start, end) for start, end, name in notes if name.startswith("Optimizer.step")]
    last = np.flatnonzero(ops.backward)
    after = int(ops.start_ns[last[-1]]) if len(last) else step.start_ns
    before = (int(Phase.OTHER), -1, -1)
    for i, start in enumerate(ops.start_ns.tolist()):
        if not len(last) or start > after:
            break
        now = (int(plan.phase[i]), int(plan.unit[i]), int(plan.micro_batch[i]))
        if now != before:
            marks.add(start, Phase(now[0]), now[1], now[2], number)
            before = now
    for start, end in optimizer:
        marks.add(start, Phase.OPTIMIZER, -1, -1, number)
        marks.add(end, Phase.OTHER, -1, -1, number)
    if not optimizer and len(last):
        row = int(last[-1]) + 1
        if row < len(ops.start_ns):
            marks.add(int(ops.start_ns[row]), Phase.OTHER, -1, -1, number)
