"""Turns the steps of a curve at doublings of its smallest size into where it bends, each with the range that it lies in.

The sizes are those of a fixed grid and not the ones that a user asked for, so that the answers are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scaletrace.extrapolate.cluster import Cluster

LARGEST = 131_072
"""The grid goes up to this many ranks, or to the largest size asked for."""
DOMINATES = 0.5


@dataclass(frozen=True, slots=True)
class Level:
    """The curve at one size of the grid: seconds a step, and the share of it that communication costs: exposed, and what
    kernels beside it take longer."""

    gpus: int
    step_s: float
    communication: float


@dataclass(frozen=True, slots=True)
class Bend:
    """A size at which something changes, and the neighbouring sizes of the grid between which it does; None = never.

    low equals high where it is so from the smallest size on.
    """

    gpus: int | None = None
    low: int | None = None
    high: int | None = None

    @property
    def range(self) -> list[int] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def grid(first: int, largest: int) -> list[int]:
    """`first` and its doublings up to LARGEST or beyond `largest`, whichever is more."""
    end = max(LARGEST, largest)
    return [first << k for k in range(max(1, math.ceil(math.log2(end / first)) + 1))]


def rising(levels: Sequence[Level], cluster: Cluster) -> list[Level]:
    """The same with steps that never fall: what fell is lifted to the sizes before, but for those that leave a node
    partly filled, since filling it helps."""
    out: list[Level] = []
    for level in levels:
        below = [other.step_s for other in out if cluster.fills(other.gpus)]
        out.append(Level(level.gpus, max([level.step_s, *below]), level.communication))
    return out


def knee(levels: Sequence[Level], share: float, weak: bool) -> Bend:
    """First size of the grid from which a doubling gives less than `share` of twice the throughput."""
    before: Level | None = None
    for level, doubled in pairwise(levels):
        if doubled.gpus != 2 * level.gpus:
            # A size between them does not fit, so what a doubling gives here is not known.
            before = level
            continue
        gain = level.step_s / doubled.step_s * (1.0 if weak else 0.5) if doubled.step_s else 1.0
        if gain < share:
            return Bend(level.gpus, before.gpus if before else level.gpus, level.gpus)
        before = level
    return Bend()


def dominates(levels: Sequence[Level]) -> Bend:
    """Size at which communication costs half of the step, between sizes of the grid by their logarithm."""
    before: Level | None = None
    for level in levels:
        if level.communication >= DOMINATES:
            if before is None:
                return Bend(level.gpus, level.gpus, level.gpus)
            share = (DOMINATES - before.communication) / (level.communication - before.communication)
            size = round(math.exp(math.log(before.gpus) + share * math.log(level.gpus / before.gpus)))
            return Bend(size, before.gpus, level.gpus)
        before = level
    return Bend()
