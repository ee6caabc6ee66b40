"""Turns scored rows into a source's verdict: errors, distribution, gates met or missed, and the naive baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from benchmarks.validation.rows import Scored


class Verdict(Enum):
    """What became of a gate."""

    GOAL = "goal met"
    MET = "met"
    MISSED = "MISSED"
    REPORTED = "reported"


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate: the figure reached, the bound that must hold and the goal beyond, and the reason where it is missed."""

    source: str
    name: str
    figure: float
    bound: float
    goal: float
    unit: str = "%"
    baseline: str = ""
    reason: str = ""
    at_least: bool = False
    reported_only: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.reported_only:
            return Verdict.REPORTED
        if not math.isfinite(self.figure):
            return Verdict.MISSED
        sign = -1.0 if self.at_least else 1.0
        if sign * self.figure <= sign * self.goal:
            return Verdict.GOAL
        return Verdict.MET if sign * self.figure <= sign * self.bound else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Result:
    """One source: what was fitted, what was predicted, and the gates. `unit` says what the scored numbers are."""

    source: str
    title: str
    unit: str
    fitted: tuple[str, ...]
    scored: tuple[Scored, ...]
    gates: tuple[Gate, ...]
    notes: tuple[str, ...] = ()
    peers: str = ""
    tables: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = field(default=())


def worst(errors: Sequence[float]) -> float:
    """The error of largest magnitude, in percent, as a magnitude; NaN without rows."""
    return 100 * max((abs(error) for error in errors), default=math.nan)


def mean_abs(errors: Sequence[float]) -> float:
    """Mean absolute error in percent; NaN without rows."""
    return 100 * float(np.mean(np.abs(errors))) if errors else math.nan


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of y over x, fitted by relative error."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    design = np.vstack([xs, np.ones_like(xs)]).T / ys[:, None]
    slope, intercept = np.linalg.lstsq(design, np.ones_like(ys), rcond=None)[0]
    return float(slope), float(intercept)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]
