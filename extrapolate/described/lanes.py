"""Turns operations on the compute and communication lanes of some ranks into start and end times, with interference.

While both lanes of a rank are busy with operations that contend, both are slower: kernels lose SMs and memory bandwidth
to the collective and advance at 1 / (1 + κ), the collective loses bandwidth to the kernels and advances at 1 / (1 + μ).
A collective of M seconds that hides wholly so costs the step M · κ (1 + μ) / (1 + κ); one that can't hide, since it is
longer than the compute C beside it, is itself prolonged, by C · μ (1 + κ) / (1 + μ).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaletrace.errors import UsageError
from scaletrace.jit import jit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class LaneProgram:
    """Operations in program order on two lanes a rank (compute, communication), under construction.

    An operation takes `fixed_s` + `weight` × the calibrated compute time; it starts when its lane is free and each
    operation of `after` has ended plus that edge's lag. `label` is what the synthesizer and the breakdown call it.
    """

    ranks: int
    fixed_s: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    contends: list[bool] = field(default_factory=list)
    after: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    label: list[str] = field(default_factory=list)

    def compute(self, rank: int, weight: float, after: Sequence[tuple[int, float]] = (), label: str = "") -> int:
        """A stretch of kernels on the compute lane: weight × the calibrated time. Returns the operation's number."""
        return self._add(2 * rank, 0.0, weight, True, after, label)

    def fixed(self, rank: int, seconds: float, after: Sequence[tuple[int, float]] = (), label: str = "") -> int:
        """Work on the compute lane whose time is known and that does not contend (optimizer, blocking send)."""
        return self._add(2 * rank, seconds, 0.0, False, after, label)

    def collective(self, rank: int, seconds: float, after: Sequence[tuple[int, float]] = (), label: str = "") -> int:
        """A collective on the communication lane."""
        return self._add(2 * rank + 1, seconds, 0.0, True, after, label)

    def _add(
        self, lane: int, fixed_s: float, weight: float, contends: bool, after: Sequence[tuple[int, float]], label: str
    ) -> int:
        self.lane.append(lane)
        self.fixed_s.append(fixed_s)
        self.weight.append(weight)
        self.contends.append(contends)
        self.after.append(tuple(after))
        self.label.append(label)
        return len(self.lane) - 1

    def freeze(self) -> FrozenProgram:
        """The program as arrays, operations sorted by lane."""
        lane = np.array(self.lane, np.int64)
        order = np.argsort(lane, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        counts = np.array([len(self.after[i]) for i in order], np.int64)
        edges = [edge for i in order for edge in self.after[i]]
        return FrozenProgram(
            lane_ptr=np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=2 * self.ranks))]).astype(np.int64),
            fixed_s=np.array(self.fixed_s, np.float64)[order],
            weight=np.array(self.weight, np.float64)[order],
            contends=np.array(self.contends, np.bool_)[order],
            dep_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            dep=place[np.array([op for op, _ in edges], np.int64)],
            lag_s=np.array([lag for _, lag in edges], np.float64),
            labels=tuple(self.label[i] for i in order),
            place=place,
        )


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """start_s, end_s float64[n] of every operation, in the frozen order."""

    start_s: FloatArray
    end_s: FloatArray

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max()) if len(self.end_s) else 0.0


@dataclass(frozen=True, slots=True)
class FrozenProgram:
    """n operations sorted by lane: those of lane l are lane_ptr[l] … lane_ptr[l+1]; lane 2r computes, 2r+1 communicates.

    fixed_s, weight float64[n]; contends bool[n]; dependencies of operation v: dep[dep_ptr[v]:dep_ptr[v+1]], lag_s beside.
    """

    lane_ptr: IntArray
    fixed_s: FloatArray
    weight: FloatArray
    contends: BoolArray
    dep_ptr: IntArray
    dep: IntArray
    lag_s: FloatArray
    labels: tuple[str, ...]
    place: IntArray

    @property
    def ranks(self) -> int:
        return (len(self.lane_ptr) - 1) // 2

    def run(self, unit_s: float, kernel_slowdown: float, collective_slowdown: float) -> LaneTimes:
        """Times with `unit_s` seconds for a compute operation of weight 1; raises UsageError on a cyclic program."""
        work = self.fixed_s + unit_s * self.weight
        rates = np.array([1 / (1 + kernel_slowdown), 1 / (1 + collective_slowdown)])
        start, end = _advance(self.lane_ptr, work, self.contends, self.dep_ptr, self.dep, self.lag_s, rates)
        if np.isnan(end).any():
            stuck = self.labels[int(np.flatnonzero(np.isnan(end))[0])]
            raise UsageError(f"the described step waits for itself at {stuck!r}; check the schedule's dependencies")
        return LaneTimes(start, end)


@jit
def _advance(
    lane_ptr: IntArray,
    work: FloatArray,
    contends: BoolArray,
    dep_ptr: IntArray,
    dep: IntArray,
    lag_s: FloatArray,
    shared_rate: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """start and end of every operation; NaN where a cycle keeps it from starting."""
    lanes = len(lane_ptr) - 1
    start, end = np.full(len(work), np.nan), np.full(len(work), np.nan)
    head = lane_ptr[:-1].copy()
    left = np.zeros(lanes)
    ready = np.full(lanes, np.nan)  # known start time of the head, NaN while a dependency is open
    busy = np.zeros(lanes, np.bool_)
    now = 0.0
    while True:
        for lane in range(lanes):
            if busy[lane] or head[lane] == lane_ptr[lane + 1]:
                continue
            op = head[lane]
            if np.isnan(ready[lane]):
                at = now
                for e in range(dep_ptr[op], dep_ptr[op + 1]):
                    at = max(at, end[dep[e]] + lag_s[e]) if not np.isnan(end[dep[e]]) else np.inf
                    if at == np.inf:
                        break
                if at < np.inf:
                    ready[lane] = at
            if ready[lane] <= now:
                busy[lane], start[op], left[lane] = True, now, work[op]
        step = np.inf
        for lane in range(lanes):
            if busy[lane]:
                rate = _rate(lane, busy, head, contends, shared_rate)
                step = min(step, left[lane] / rate)
            elif head[lane] < lane_ptr[lane + 1] and not np.isnan(ready[lane]):
                step = min(step, ready[lane] - now)
        if step == np.inf:
            return start, end
        # Decide which lanes finish before any state changes, since a lane's rate depends on its neighbour.
        done = np.zeros(lanes, np.bool_)
        for lane in range(lanes):
            if busy[lane]:
                need = left[lane] / _rate(lane, busy, head, contends, shared_rate)
                done[lane] = need <= step * (1 + 1e-12) + 1e-15
                left[lane] -= step * _rate(lane, busy, head, contends, shared_rate)
        now += step
        for lane in range(lanes):
            if done[lane]:
                end[head[lane]] = now
                head[lane] += 1
                busy[lane], ready[lane] = False, np.nan


@jit
def _rate(lane: int, busy: BoolArray, head: IntArray, contends: BoolArray, shared_rate: FloatArray) -> float:
    other = lane ^ 1
    if busy[other] and contends[head[lane]] and contends[head[other]]:
        return float(shared_rate[lane & 1])
    return 1.0


def solve_increasing(function: Callable[[float], float], target: float, guess: float, tolerance: float = 1e-9) -> float:
    """x with function(x) = target for an increasing, nearly linear function; raises UsageError where none is positive."""
    low = 0.0
    at_low = function(low)
    if at_low > target:
        raise UsageError(f"communication alone takes {at_low:.4g} s, more than the {target:.4g} s to calibrate on")
    high = guess
    while (at_high := function(high)) < target:
        low, at_low, high = high, at_high, 2 * high
    gap_low, gap_high = at_low - target, at_high - target
    x = high
    for _ in range(60):
        # Illinois variant of regula falsi: halving the gap of an end that stays keeps the other end moving.
        x = (low * gap_high - high * gap_low) / (gap_high - gap_low)
        gap = function(x) - target
        if abs(gap) <= tolerance * target or high - low <= 1e-12 * high:
            break
        if gap < 0:
            low, gap_low, gap_high = x, gap, gap_high / 2
        else:
            high, gap_high, gap_low = x, gap, gap_low / 2
    return x
