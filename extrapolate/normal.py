"""Turns a number of ranks into the expected largest of that many standard normals, exactly, and its variance."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_GRID = np.linspace(-9.0, 12.0, 8401)


def _log_cdf() -> Floats:
    """log Φ on the grid, accurate in both tails."""
    return np.array(
        [
            math.log1p(-0.5 * math.erfc(x / math.sqrt(2))) if x > 0 else math.log(0.5 * math.erfc(-x / math.sqrt(2)))
            for x in _GRID
        ]
    )


_LOG_CDF = _log_cdf()
_ABOVE_ZERO = np.heaviside(np.round(_GRID, 9), 0.5)


@lru_cache(maxsize=4096)
def expected_max(n: float) -> float:
    """E[max of n standard normals] by the integral of 1 - Φⁿ - [x < 0]; n may be fractional, 0 for n ≤ 1."""
    if n <= 1:
        return 0.0
    below = np.exp(n * _LOG_CDF)
    return float(np.trapezoid(_ABOVE_ZERO - below, _GRID))


@lru_cache(maxsize=4096)
def variance_of_max(n: float) -> float:
    """Variance of the max of n standard normals; 1 for n ≤ 1."""
    if n <= 1:
        return 1.0
    below = np.exp(n * _LOG_CDF)
    second = np.trapezoid(2 * _GRID * (_ABOVE_ZERO - below), _GRID)
    return float(second - expected_max(n) ** 2)


def normal_scores(count: int) -> Floats:
    """`count` quantiles of the standard normal at (i + ½)/count, scaled to mean 0 and variance 1 (n-1)."""
    if count == 1:
        return np.zeros(1)
    levels = (np.arange(count) + 0.5) / count
    scores = np.interp(np.log(levels), _LOG_CDF, _GRID)
    scores -= scores.mean()
    return np.asarray(scores / scores.std(ddof=1), np.float64)
