"""Turns a rank's sections into how many micro batches it holds at once, and those of all stages into their schedule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.layers import Phase, Sections
from scaletrace.extrapolate.memory import alive
from scaletrace.extrapolate.rewrite.schedules import SCHEDULES, build

NEAR = 0.5
"""Micro batches by which the number held may miss a schedule's for it to be told."""


def held_micro_batches(sections: Sections) -> float:
    """Micro batches whose activations the rank holds at the peak, as parts of all its layers; 1.0 where none are told.

    A layer's activations are there from its forward to the end of its backward, in the first step.
    """
    layers = np.flatnonzero(np.array(sections.is_layer, np.bool_))
    steps = sections.step[sections.step >= 0]
    if not len(layers) or not len(steps):
        return 1.0
    mine = (sections.step == steps[0]) & (sections.micro_batch >= 0) & np.isin(sections.unit, layers)
    rows = np.flatnonzero(mine & np.isin(sections.phase, [int(Phase.FORWARD), int(Phase.BACKWARD)]))
    pair = sections.unit[rows].astype(np.int64) * (sections.micro_batches + 1) + sections.micro_batch[rows]
    forward = sections.phase[rows] == int(Phase.FORWARD)
    opened = rows[forward][np.unique(pair[forward], return_index=True)[1]]
    # A section ends where the next one starts; the last one of a pair frees it.
    behind, back = rows[~forward][::-1], pair[~forward][::-1]
    closed = behind[np.unique(back, return_index=True)[1]]
    moves = np.concatenate([np.stack([opened, np.ones_like(opened)]), np.stack([closed, -np.ones_like(closed)])], 1)
    moves = moves[:, np.argsort(moves[0], kind="stable")]
    most = int(np.cumsum(moves[1]).max(initial=0))
    return max(1.0, most / len(layers))


def schedule_of(held: Mapping[int, float], stages: int, micro_batches: int) -> str:
    """The schedule with one stage a rank that holds what each stage (0 … stages - 1) was seen to; "" where none does.

    1F1B where several do.
    """
    names = ("1F1B", *(name for name in SCHEDULES if name != "1F1B"))
    for name in names:
        try:
            wanted = alive(build(name, stages, micro_batches))
        except UsageError:
            continue
        if all(abs(wanted[stage] - seen) <= NEAR for stage, seen in held.items() if stage < len(wanted)):
            return name
    return ""
