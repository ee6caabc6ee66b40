"""Turns a number of ranks into the expected slowest one and the width of a step's jitter."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def expected_maximum(n: int) -> float:
    """Expected maximum of n independent standard normals, by the exact integral; 0 for n ≤ 1."""
    if n <= 1:
        return 0.0
    # E[max] = ∫ over x > 0 of (1 - F(x)^n) - F(-x)^n, by the trapezoid rule.
    x = np.linspace(0.0, 9.0, 4001)
    cdf = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
    integrand = (1 - cdf**n) - (1 - cdf) ** n
    return float(((integrand[1:] + integrand[:-1]) / 2 * np.diff(x)).sum())


def straggle(spread: float, n: int) -> float:
    """Factor on compute by which the slowest of n ranks stands above the mean."""
    return 1 + spread * expected_maximum(n)


def jitter_width_s(measured_width_s: float, measured_gpus: int, gpus: int) -> float:
    """Width (p05 to p95) of a step's jitter at another size.

    A step waits for the slowest of N ranks. Delays with an exponential tail have a maximum that grows with ln N, whatever
    the length of the step, so the width in seconds is taken to grow with ln N too.
    """
    return measured_width_s * math.log(max(2, gpus)) / math.log(max(2, measured_gpus))
