"""Turns recorded operator shapes into the model FLOP of one step on one rank: matrix products and attention, nothing else.

Model FLOP are what the mathematics needs, as PaLM's appendix B counts them: nothing that is computed twice. So a forward
that checkpointing runs again in the backward does not count, nor the scores that flash attention works out again there.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from scaletrace.parse.events import BoolArray, Events, IntArray
from scaletrace.parse.job import Job, RankTrace

PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_grouped_mm": (0, 1),
}
"""Operators that multiply two matrices (or batches), and which inputs those are."""
ATTENTION = "aten::_scaled_dot_product_"
FORWARD_CALLS = ("aten::linear", "aten::matmul", "aten::scaled_dot_product_attention")
"""What a model calls; inside an autograd node these are a forward that runs again."""
BACKWARD = "autograd::engine::evaluate_function"
CHECKPOINT = "CheckpointFunctionBackward"


def step_flop(job: Job) -> float | None:
    """FLOP of one step on the mean rank, None where the trace holds no shapes of such operators.

    A product of m × k and k × n counts 2·m·k·n; attention counts 4·s·t·d a head forward and 8·s·t·d backward, without
    regard to masks.
    """
    found = [value for rank in job.ranks if (value := _rank_flop(rank)) is not None]
    return float(np.mean(found)) if found else None


def _rank_flop(rank: RankTrace) -> float | None:
    events = rank.events
    wanted = [i for i, name in enumerate(events.strings) if name in PRODUCTS or name.startswith(ATTENTION)]
    rows = np.flatnonzero(np.isin(events.name, wanted) & (events.dur_ns >= 0))
    dims = events.texts("Input Dims")[rows]
    rows, dims = rows[dims >= 0], dims[dims >= 0]
    steps = [step for step in rank.steps if step.complete]
    if steps:
        inside = np.zeros(len(rows), np.bool_)
        for step in steps:
            inside |= (events.ts_ns[rows] >= step.start_ns) & (events.ts_ns[rows] < step.end_ns)
        rows, dims = rows[inside], dims[inside]
    once = ~_repeated(events, rows)
    rows, dims = rows[once], dims[once]
    if not len(rows):
        return None
    pairs = np.stack([events.name[rows].astype(np.int64), dims.astype(np.int64)])
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    total = sum(
        int(count) * operator_flop(events.strings[int(name)], events.strings[int(text)])
        for name, text, count in zip(kinds[0], kinds[1], counts, strict=True)
    )
    return total / max(1, len(steps)) if total else None


def _repeated(events: Events, rows: IntArray) -> BoolArray:
    """Which operators belong to a forward that is run again in the backward.

    They are called as the model calls them, inside an autograd node; or they lie in checkpointing's own node and in none
    of the nodes that it runs in turn.
    """
    nodes = np.flatnonzero(np.array([name.startswith(BACKWARD) for name in events.strings], np.bool_)[events.name])
    calls = np.flatnonzero(np.array([name in FORWARD_CALLS for name in events.strings], np.bool_)[events.name])
    again = np.array([CHECKPOINT in events.strings[int(name)] for name in events.name[nodes]], np.bool_)
    nested = nodes[~again]
    nested = nested[_inside(events, nested, nodes[again])]
    alone = _inside(events, rows, nodes[again]) & ~_inside(events, rows, nested)
    return alone | (_inside(events, rows, nodes) & _inside(events, rows, calls))


def _inside(events: Events, rows: IntArray, outer: IntArray) -> BoolArray:
    """Whether each row lies within one of `outer` on its thread."""
    out = np.zeros(len(rows), np.bool_)
    for lane in np.unique(events.lane[rows]):
        mine = np.flatnonzero(events.lane[rows] == lane)
        around = outer[events.lane[outer] == lane]
        if not len(around):
            continue
        around = around[np.argsort(events.ts_ns[around], kind="stable")]
        reach = np.maximum.accumulate(events.end_ns[around])
        at = np.searchsorted(events.ts_ns[around], events.ts_ns[rows[mine]], side="right") - 1
        out[mine] = (at >= 0) & (reach[np.maximum(at, 0)] >= events.end_ns[rows[mine]])
    return out


def operator_flop(name: str, dims: str) -> int:
    """FLOP of one call from its "Input Dims"; 0 for other operators or shapes that don't fit."""
    try:
        shapes: list[Any] = json.loads(dims)
    except ValueError:
        return 0
    if name in PRODUCTS:
        left, right = (_shape(shapes, index) for index in PRODUCTS[name])
        if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
            return 0
        return 2 * math.prod(left) * right[-1]
    if not name.startswith(ATTENTION):
        return 0
    backward = name.endswith("_backward")
    query, key = _shape(shapes, int(backward)), _shape(shapes, int(backward) + 1)
    if len(query) != 4 or len(key) != 4:
        return 0
    return (8 if backward else 4) * math.prod(query) * key[2]


def _shape(shapes: list[Any], index: int) -> list[int]:
    shape = shapes[index] if index < len(shapes) else []
    return [int(n) for n in shape] if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else []
