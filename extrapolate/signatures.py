"""Turns kernels in order of launch into layers, for traces whose operators say nothing (compiled or captured models).

Kernels of one name and grid are one letter; the longest repetition in a step's forward launches are its layers, and the
repetition of as many parts in its backward launches are the same layers from the last to the first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaletrace.extrapolate.layers import MAX_PERIOD, Phase, Repeats, Sections, find_repeats, find_sections
from scaletrace.parse.events import Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace


def sections_of(trace: RankTrace) -> Sections:
    """Sections of every step of a rank by the best evidence that its trace holds: names, operators, then kernels."""
    base = find_sections(trace)
    return base if base.layers else sections_from_kernels(trace, base)


def sections_from_kernels(trace: RankTrace, base: Sections) -> Sections:
    """`base` with its forward and backward stretches cut into layers, or as it is where kernels do not repeat either.

    The steps must agree on the number of layers; a step in which another number repeats stays uncut.
    """
    launched, token = launches(trace.events)
    if not len(launched):
        return base
    at = base.at(launched)
    found = []
    for step in np.unique(base.step).tolist():
        for batch in np.unique(base.micro_batch[base.step == step]).tolist():
            mine = (at >= 0) & (base.step[np.maximum(at, 0)] == step) & (base.micro_batch[np.maximum(at, 0)] == batch)
            forward = np.flatnonzero(mine & (base.phase[np.maximum(at, 0)] == int(Phase.FORWARD)))
            backward = np.flatnonzero(mine & (base.phase[np.maximum(at, 0)] == int(Phase.BACKWARD)))
            found.append((step, batch, forward, backward, find_repeats(token[forward])))
    counts = [repeats.count for *_, repeats in found if repeats.count > 1]
    if not counts:
        return base
    layers = int(np.bincount(counts).argmax())
    rows: list[tuple[int, int, int, int, int]] = []
    for step, batch, forward, backward, repeats in found:
        if repeats.count != layers:
            continue
        rows += _marks(launched[forward], repeats, Phase.FORWARD, step, batch)
        back = repeats_of_count(token[backward], layers)
        if back is not None:
            rows += _marks(launched[backward], back, Phase.BACKWARD, step, batch)
    names = ("embedding", *(f"layer {i}" for i in range(layers)), "head")
    return _merged(base, rows, names)


def launches(events: Events) -> tuple[IntArray, Int32Array]:
    """(launch time, letter) of every compute kernel that a recorded call launched, in order of launch."""
    kernels = np.flatnonzero(events.in_cats("kernel") & (events.correlation >= 0))
    calls = np.flatnonzero(events.in_cats("cuda_runtime", "cuda_driver", "hip_runtime") & (events.correlation >= 0))
    if not len(kernels) or not len(calls):
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    order = calls[np.argsort(events.correlation[calls], kind="stable")]
    at = np.minimum(np.searchsorted(events.correlation[order], events.correlation[kernels]), len(order) - 1)
    hit = events.correlation[order[at]] == events.correlation[kernels]
    quiet = np.array(["nccl" in text.lower() or "rccl" in text.lower() for text in events.strings], np.bool_)
    hit &= ~quiet[events.name[kernels]]
    kernels, when = kernels[hit], events.ts_ns[order[at[hit]]]
    pairs = np.stack([events.name[kernels], events.texts("grid")[kernels]], axis=1)
    _, letter = np.unique(pairs, axis=0, return_inverse=True)
    by_time = np.argsort(when, kind="stable")
    return when[by_time], letter.reshape(-1).astype(np.int32)[by_time]


def repeats_of_count(tokens: Int32Array, count: int, max_period: int = MAX_PERIOD) -> Repeats | None:
    """The longest stretch that is `count` equal parts, None where there is none."""
    best: Repeats | None = None
    for period in range(min(len(tokens) // count, max_period), 0, -1):
        same = tokens[period:] == tokens[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        long = np.flatnonzero(edges[1::2] - edges[::2] >= (count - 1) * period)
        if len(long):
            best = Repeats(int(edges[::2][long[0]]), period, count)
            break
    return best


def _marks(
    launched: IntArray, repeats: Repeats, phase: Phase, step: int, batch: int
) -> list[tuple[int, int, int, int, int]]:
    """Section starts of one stretch: before the layers, each layer, behind them."""
    forward = phase is Phase.FORWARD
    ends = (0, repeats.count + 1) if forward else (repeats.count + 1, 0)
    out = [(int(launched[0]), ends[0])] if repeats.start else []
    for part in range(repeats.count):
        unit = part + 1 if forward else repeats.count - part
        out.append((int(launched[repeats.start + part * repeats.period]), unit))
    behind = repeats.start + repeats.count * repeats.period
    if behind < len(launched):
        out.append((int(launched[behind]), ends[1]))
    return [(start, int(phase), unit, batch, step) for start, unit in out]


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
        rule="repeated kernels",
    )
