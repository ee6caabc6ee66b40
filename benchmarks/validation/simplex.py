"""Turns a function of a few numbers into the numbers that make it least (Nelder and Mead's simplex), for fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def minimise(
    function: Callable[[FloatArray], float],
    start: FloatArray,
    *,
    step: float = 0.2,
    rounds: int = 400,
    tol: float = 1e-9,
) -> FloatArray:
    """Best point found from `start`; deterministic. Stops when the simplex's values agree within `tol`."""
    n = len(start)
    points = np.vstack([start, start + step * np.eye(n)])
    values = np.array([function(point) for point in points])
    for _ in range(rounds):
        order = np.argsort(values, kind="stable")
        points, values = points[order], values[order]
        if values[-1] - values[0] <= tol * max(1e-30, abs(values[0])):
            break
        centre = points[:-1].mean(axis=0)
        away = centre - points[-1]
        reflected = centre + away
        at_reflected = function(reflected)
        if at_reflected < values[0]:
            expanded = centre + 2 * away
            at_expanded = function(expanded)
            keep = at_expanded < at_reflected
            points[-1], values[-1] = (expanded, at_expanded) if keep else (reflected, at_reflected)
        elif at_reflected < values[-2]:
            points[-1], values[-1] = reflected, at_reflected
        else:
            inside = centre - 0.5 * away if at_reflected >= values[-1] else centre + 0.5 * away
            at_inside = function(inside)
            if at_inside < min(values[-1], at_reflected):
                points[-1], values[-1] = inside, at_inside
            else:
                points[1:] = points[0] + 0.5 * (points[1:] - points[0])
                values[1:] = [function(point) for point in points[1:]]
    best: FloatArray = points[int(np.argmin(values))]
    return best
