"""Turns launch latencies into the shift of a device's clock against its host's: a line below all samples."""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import IntArray

PLAUSIBLE_NS = 2_000
"""A kernel can't start earlier than this after the start of its launch call."""
TARGET_NS = 5_000


@jit
def _lower_hull(t: IntArray, y: IntArray) -> IntArray:
    """Indices of the lower convex hull of points sorted by t (monotone chain)."""
    hull = np.empty(len(t), np.int64)
    n = 0
    for i in range(len(t)):
        while n >= 2:
            a, b = hull[n - 2], hull[n - 1]
            cross = float(t[b] - t[a]) * float(y[i] - y[a]) - float(y[b] - y[a]) * float(t[i] - t[a])
            if cross > 0:
                break
            n -= 1
        hull[n] = i
        n += 1
    return hull[:n]


def device_shift(launch_ns: IntArray, latency_ns: IntArray, at_ns: IntArray) -> IntArray:
    """What to add to device times `at_ns` (int64[k]) so that no kernel starts before its launch; zeros on a sane clock.

    launch_ns, latency_ns: host time of each launch call and its kernel's start minus that.
    The lower envelope of the latencies follows offset and drift; it is only corrected where it is impossible.
    """
    zero = np.zeros(len(at_ns), np.int64)
    if len(latency_ns) < 2 or int(latency_ns.min()) >= PLAUSIBLE_NS:
        return zero
    order = np.lexsort((latency_ns, launch_ns))
    t, y = launch_ns[order], latency_ns[order]
    hull = _lower_hull(t, y)
    base = t[0]
    below = np.interp(
        (at_ns - base).astype(np.float64), (t[hull] - base).astype(np.float64), y[hull].astype(np.float64)
    )
    return np.asarray(np.maximum(TARGET_NS - below, 0).astype(np.int64))
