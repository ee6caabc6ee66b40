"""Turns recorded operator shapes into the FLOP of one step on one rank: matrix products and attention, nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from scaletrace.parse.job import Job, RankTrace

PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
"""Operators that multiply two matrices (or batches), and which inputs those are."""
ATTENTION = "aten::_scaled_dot_product_"


def step_flop(job: Job) -> float | None:
    """FLOP of one step on the mean rank, None where the trace holds no shapes of such operators.

    A product of m × k and k × n counts 2·m·k·n; attention counts 4·s·t·d a head forward and 10·s·t·d backward, without
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
    if not len(rows):
        return None
    pairs = np.stack([events.name[rows].astype(np.int64), dims.astype(np.int64)])
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    total = sum(
        int(count) * operator_flop(events.strings[int(name)], events.strings[int(text)])
        for name, text, count in zip(kinds[0], kinds[1], counts, strict=True)
    )
    return total / max(1, len(steps)) if total else None


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
    return (10 if backward else 4) * math.prod(query) * key[2]


def _shape(shapes: list[Any], index: int) -> list[int]:
    shape = shapes[index] if index < len(shapes) else []
    return [int(n) for n in shape] if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else []
