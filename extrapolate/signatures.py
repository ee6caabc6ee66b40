"""Turns kernels in order of launch into layers, for traces whose operators say nothing (compiled or captured models).

Kernels of one name and grid are one letter; the stack that repeats in a step's forward launches is its layers, and the
one of as many parts in its backward launches is the same layers from the last to the first. The kernels of a CUDA graph
share one launch; they stand in the order in which they ran.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.kernels import Work, classify
from scaletrace.extrapolate.layers import (
    NO_STACK,
    NOTHING,
    OPERATORS,
    Phase,
    Placed,
    Sections,
    agreed,
    attends,
    find_sections,
    passes_of,
    units_of,
)
from scaletrace.extrapolate.lone import by_one_block
from scaletrace.extrapolate.repeats import STACK, Stack, find_stack
from scaletrace.parse.events import BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace

_SERIAL = re.compile(r"^(triton_.*?)_\d+(?=$|[^A-Za-z0-9_])")
"""Triton numbers its kernels through, so that two of one body differ in their last number."""

_INNER = re.compile(r"^(?!.*autograd::)(\w+::\w+|cpp_fused\w*|triton_\w+)")


@dataclass(frozen=True, slots=True)
class Launches:
    """k compute kernels in order of launch, those of one launch in order of start.

    when_ns, row int64[k]; letter int32[k]: equal for one name and grid; dur_ns float64[k]; norm, core bool[k]: begins a
    layer, stands in it once (attention); embeds bool[k]; shared: whether some launch brought several kernels
    """

    when_ns: IntArray
    row: IntArray
    letter: Int32Array
    dur_ns: npt.NDArray[np.float64]
    norm: BoolArray
    core: BoolArray
    embeds: BoolArray
    shared: bool


def sections_of(trace: RankTrace) -> Sections:
    """Sections of every step of a rank by the best evidence that its trace holds: names, operators, then kernels."""
    base = find_sections(trace)
    if base.layers and (base.rule != OPERATORS or _on_device(launched(trace.events), base) >= STACK):
        return base
    if base.layers:
        none = np.full_like(base.unit, -1)
        base = replace(base, unit=none, units=("model",), is_layer=(False,), kind=("",), rule=NOTHING, why=NO_STACK)
    found = sections_from_kernels(trace, base)
    if not found.layers:
        single = find_sections(trace, (by_one_block,))
        return single if single.layers else found
    return found


def _on_device(found: Launches, base: Sections) -> float:
    """Share of the kernels' time that the layers launch, 1 without kernels. Operators may repeat that launch little."""
    at = base.at(found.when_ns)
    unit = np.where(at >= 0, base.unit[np.maximum(at, 0)], -1)
    phase = np.where(at >= 0, base.phase[np.maximum(at, 0)], 0)
    trains = bool((base.phase == int(Phase.BACKWARD)).any())
    counts = np.isin(phase, [int(Phase.FORWARD), int(Phase.BACKWARD)]) if trains else np.ones(len(at), np.bool_)
    total = float(found.dur_ns[counts].sum())
    layers = np.array([*base.is_layer, False], np.bool_)[unit]
    return float(found.dur_ns[counts & layers].sum()) / total if total else 1.0


def sections_from_kernels(trace: RankTrace, base: Sections) -> Sections:
    """`base` with its forward and backward stretches cut into layers, or as it is where kernels do not repeat either.

    The passes must agree on the number of layers; one in which another number repeats stays uncut.
    """
    found, rule = launched(trace.events), "repeated kernels"
    if not len(found.row):
        found, rule = inner_operators(trace.events), "repeated inner operators"
    if not len(found.row):
        return base
    at = base.at(found.when_ns)
    inside = np.maximum(at, 0)
    phase, step, batch = base.phase[inside], base.step[inside], base.micro_batch[inside].copy()
    trains = bool((base.phase == int(Phase.BACKWARD)).any())
    if not trains:
        phase = np.where(at >= 0, int(Phase.FORWARD), 0).astype(np.uint8)
        batch = passes_of(found.letter, found.embeds)
    chunks = _chunks(step, batch, (at >= 0) & (phase == int(Phase.FORWARD)))
    cut = agreed(
        chunks, lambda _, rows, want: _stack(found, rows, want), lambda _, rows: float(found.dur_ns[rows].sum())
    )
    if cut is None:
        return base
    stacks, layers, kinds, uncut = cut
    unit = np.full(len(at), -1, np.int32)
    flight = 1 if trains else _in_flight(trace.events, found, chunks, stacks)
    for (_, rows), stack in zip(chunks, stacks, strict=True):
        if stack is not None:
            mine = units_of(stack, len(rows))
            inside = (mine > 0) & (mine <= layers)
            batch[rows] = batch[rows] * flight + np.where(inside, (mine - 1) % flight, 0)
            unit[rows] = np.where(inside, (mine - 1) // flight + 1, np.where(mine > 0, layers // flight + 1, 0))
    layers, kinds = layers // flight, kinds[::flight]
    for _, rows in _chunks(step, batch, (at >= 0) & (phase == int(Phase.BACKWARD))):
        stack = _stack(found, rows, layers)
        if stack is not None:
            unit[rows] = units_of(stack, len(rows), backwards=True)
    known = np.flatnonzero(unit >= 0)
    names = ("embedding", *(f"layer {i}" for i in range(layers)), "head")
    starts = _marks(found.when_ns[known], np.stack([phase, unit, batch, step], axis=1)[known])
    out = replace(_merged(base, starts, names), rule=rule, kind=("", *kinds, ""), why="", uncut=uncut)
    if not found.shared:
        return out
    order = known[np.argsort(found.row[known])]
    columns = (phase[order].astype(np.uint8), unit[order], batch[order].astype(np.int32), step[order].astype(np.int32))
    return replace(out, placed=Placed(found.row[order], *columns))


def _in_flight(events: Events, found: Launches, chunks: list[tuple[int, IntArray]], stacks: list[Stack | None]) -> int:
    """Batches whose layers take turns in one pass (overlapped decoding): each has its own embedding and its own head."""
    for (_, rows), stack in zip(chunks, stacks, strict=True):
        if stack is None:
            continue
        products = [at for at in range(len(rows)) if classify(events.name_of(int(found.row[rows[at]]))) is Work.MATMUL]
        heads = [at for at in products if at >= int(stack.first[-1])]
        letters = found.letter[rows]
        looked = letters[: int(stack.first[0])][found.embeds[rows][: int(stack.first[0])]]
        if not heads or not len(looked):
            return 1
        count = int((letters == letters[heads[-1]]).sum())
        return count if count == int((looked == looked[-1]).sum()) and len(stack) % count == 0 else 1
    return 1


def _chunks(step: Int32Array, batch: Int32Array, where: BoolArray) -> list[tuple[int, IntArray]]:
    """(step, kernels) of every micro batch of every step."""
    rows = np.flatnonzero(where)
    keys, code = np.unique(np.stack([step[rows], batch[rows]], axis=1), axis=0, return_inverse=True)
    return [(int(key[0]), rows[code.reshape(-1) == at]) for at, key in enumerate(keys)]


def _stack(found: Launches, rows: IntArray, want: int) -> Stack | None:
    return find_stack(
        found.letter[rows], weight=found.dur_ns[rows], opens=found.norm[rows], cores=found.core[rows], want=want
    )


def launched(events: Events) -> Launches:
    """Every compute kernel that a recorded call launched, without communication."""
    kernels = np.flatnonzero(events.in_cats("kernel") & (events.correlation >= 0))
    calls = np.flatnonzero(events.in_cats("cuda_runtime", "cuda_driver", "hip_runtime") & (events.correlation >= 0))
    if not len(kernels) or not len(calls):
        return _described(events, kernels[:0], kernels[:0], "grid")
    order = calls[np.argsort(events.correlation[calls], kind="stable")]
    at = np.minimum(np.searchsorted(events.correlation[order], events.correlation[kernels]), len(order) - 1)
    hit = events.correlation[order[at]] == events.correlation[kernels]
    quiet = np.array(["nccl" in text.lower() or "rccl" in text.lower() for text in events.strings], np.bool_)
    hit &= ~quiet[events.name[kernels]]
    return _described(events, kernels[hit], events.ts_ns[order[at[hit]]], "grid")


def inner_operators(events: Events) -> Launches:
    """The operators that calls of compiled or checkpointed code contain, without those inside of them; each counts one."""
    inner = np.array([bool(_INNER.match(text)) for text in events.strings] + [False], np.bool_)
    rows = np.flatnonzero(events.in_cats("cpu_op") & inner[events.name])
    rows = rows[np.lexsort((-events.dur_ns[rows], events.ts_ns[rows], events.lane[rows]))]
    reach = np.full(len(rows), np.iinfo(np.int64).min)
    for code in np.unique(events.lane[rows]):
        mine = np.flatnonzero(events.lane[rows] == code)
        reach[mine[1:]] = np.maximum.accumulate(events.end_ns[rows[mine]])[:-1]
    rows = rows[events.ts_ns[rows] >= reach]
    found = _described(events, rows, events.ts_ns[rows], "Input Dims")
    return replace(found, dur_ns=np.ones(len(rows)), shared=False)


def _described(events: Events, rows: IntArray, when_ns: IntArray, size: str) -> Launches:
    """Rows in order of `when_ns`, a letter for each name and value of the argument `size`."""
    bodies = [_SERIAL.sub(r"\1", text) for text in events.strings]
    number = {text: at for at, text in enumerate(dict.fromkeys(bodies))}
    body_of = np.array([number[text] for text in bodies] + [0], np.int64)
    order = np.lexsort((events.ts_ns[rows], when_ns))
    rows = rows[order]
    pairs = np.stack([body_of[events.name[rows]], events.texts(size)[rows]], axis=1)
    _, letter = np.unique(pairs, axis=0, return_inverse=True)
    work = [classify(text) for text in events.strings]

    def is_a(kind: Work) -> BoolArray:
        return np.asarray(np.array([one is kind for one in work] + [False], np.bool_)[events.name[rows]], np.bool_)

    _, count = np.unique(events.correlation[rows], return_counts=True)
    return Launches(
        when_ns[order],
        rows.astype(np.int64),
        letter.reshape(-1).astype(np.int32),
        events.dur_ns[rows].astype(np.float64),
        is_a(Work.NORM),
        attends(events, rows),
        is_a(Work.EMBEDDING),
        bool(count.max(initial=0) > 1),
    )


def launches(events: Events) -> tuple[IntArray, Int32Array]:
    """(launch time, letter) of every compute kernel that a recorded call launched, in order of launch."""
    found = launched(events)
    return found.when_ns, found.letter


def _marks(when_ns: IntArray, columns: npt.NDArray[np.int64]) -> list[tuple[int, int, int, int, int]]:
    """Starts of sections: where phase, unit, micro batch or step of the kernels change."""
    if not len(columns):
        return []
    changes = np.flatnonzero(np.append(True, (columns[1:] != columns[:-1]).any(axis=1)))
    return [(int(when_ns[at]), *map(int, columns[at])) for at in changes]  # type: ignore[misc]


def _merged(base: Sections, rows: list[tuple[int, int, int, int, int]], names: tuple[str, ...]) -> Sections:
    """Both sets of starts in order of time; what the base says between the layers' starts goes on with the last layer."""
    columns = np.stack(
        [base.start_ns, base.phase, np.full(len(base.start_ns), -1), base.micro_batch, base.step], axis=1
    )
    table = np.concatenate([columns, np.array(rows, np.int64).reshape(-1, 5)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    working = np.isin(table[:, 1], [int(Phase.FORWARD), int(Phase.BACKWARD)])
    known = np.maximum.accumulate(np.where(table[:, 2] >= 0, np.arange(len(table)), -1))
    same = (
        (known >= 0) & (table[np.maximum(known, 0), 1] == table[:, 1]) & (table[np.maximum(known, 0), 4] == table[:, 4])
    )
    table[:, 2] = np.where(working & same, table[np.maximum(known, 0), 2], table[:, 2])
    first = working & (table[:, 2] < 0)
    last = len(names) - 1
    table[:, 2] = np.where(first, np.where(table[:, 1] == int(Phase.FORWARD), 0, last), table[:, 2])
    return replace(
        base,
        start_ns=table[:, 0],
        phase=table[:, 1].astype(np.uint8),
        unit=table[:, 2].astype(np.int32),
        micro_batch=table[:, 3].astype(np.int32),
        step=table[:, 4].astype(np.int32),
        units=names,
        is_layer=(False, *([True] * (len(names) - 2)), False),
    )
