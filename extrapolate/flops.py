"""Turns recorded operator shapes into the model FLOP of one step on one rank: matrix products and attention, nothing else.

Model FLOP are what the mathematics needs, as PaLM's appendix B counts them: nothing that is computed twice. So a forward
that checkpointing runs again in the backward does not count, nor the scores that flash attention works out again there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.signatures import sections_of
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


@dataclass(frozen=True, slots=True)
class Flop:
    """FLOP of one step on the mean rank, by how they grow with a model: products of layers' weights with the square of
    its width, attention and products of activations in the layers, and all that is outside them (head), in proportion."""

    products: float
    mixing: float
    ends: float

    @property
    def total(self) -> float:
        return self.products + self.mixing + self.ends

    def resized(self, depth: float, width: float) -> float:
        """FLOP of a model with `depth` times the layers and `width` times the width; heads keep their size."""
        return depth * (self.products * width**2 + self.mixing * width) + self.ends * width


MIXING = ("aten::bmm", "aten::baddbmm")
"""Products of batches, which in a layer are of activations with activations."""


def step_flop(job: Job) -> float | None:
    """FLOP of one step on the mean rank, None where the trace holds no shapes of such operators.

    A product of m × k and k × n counts 2·m·k·n; attention counts 4·s·t·d a head forward and 8·s·t·d backward, without
    regard to masks.
    """
    found = [float(flop.sum()) / steps for rank in job.ranks for _, flop, steps in [_counted(rank)] if flop.sum()]
    return float(np.mean(found)) if found else None


def flop_by_growth(job: Job) -> Flop | None:
    """The FLOP of `step_flop` by how they grow; None where there are none, or no layers to tell them apart by."""
    found = []
    for rank in job.ranks:
        rows, flop, steps = _counted(rank)
        sections = sections_of(rank)
        if not flop.sum():
            continue
        if not sections.layers:
            return None
        at = sections.at(rank.events.ts_ns[rows])
        unit = np.where(at >= 0, sections.unit[np.maximum(at, 0)], -1)
        layered = np.array([*sections.is_layer, False], np.bool_)[unit]
        mixes = [name in MIXING or name.startswith(ATTENTION) for name in rank.events.strings]
        mixing = layered & np.array(mixes, np.bool_)[rank.events.name[rows]]
        parts = (flop[layered & ~mixing].sum(), flop[mixing].sum(), flop[~layered].sum())
        found.append([float(part) / steps for part in parts])
    return Flop(*(float(part) for part in np.mean(found, axis=0))) if found else None


def _counted(rank: RankTrace) -> tuple[IntArray, npt.NDArray[np.float64], int]:
    """(rows of the operators that count, FLOP of each, steps that they belong to)."""
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
    pairs = np.stack([events.name[rows].astype(np.int64), dims.astype(np.int64)])
    kinds, which = np.unique(pairs, axis=1, return_inverse=True)
    each = [operator_flop(events.strings[name], events.strings[text]) for name, text in kinds.T.tolist()]
    return rows, np.array(each, np.float64)[which.reshape(-1)], max(1, len(steps))


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
