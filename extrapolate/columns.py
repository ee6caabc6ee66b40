"""Turns a graph of rank classes into finish times of a whole population of ranks: one sweep over columns of samples.

A class stands for `inner` × `outer` ranks that do the same work (inner: along the axis whose groups lie closest, outer:
along the rest). It is kept as A × B sampled ranks (columns a·B + b), plus one column a class for its expected worst
static rank. A collective over the population ends, for Gaussian noise, at mean + sd · E[max of n] of the sampled
arrivals, instead of at their largest. Collectives inside one rank column (pipelines) meet column by column.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, Int32Array, IntArray

Floats = npt.NDArray[np.float64]
PLAIN, ARRIVE, MEET = 0, 1, 2
"""Roles of a node: any, the arrival of a member, and where the members' arrivals meet (hub or transfer)."""
NONE, INNER, OUTER, BOTH = 0, 1, 2, 3
"""How far an instance reaches: column by column, within an outer group, across outer groups, everywhere."""


@jit
def mixture_max(mean: Floats, sd: Floats, n: Floats) -> float:
    """E[max] of n[c] normals of mean[c] and sd[c] for each class c, by the trapezoid rule."""
    low, high = mean[0], mean[0]
    for c in range(len(mean)):
        low = max(low, mean[c]) if c else mean[c]
        high = max(high, mean[c] + 6.5 * sd[c])
    spread = 0.0
    for c in range(len(mean)):
        spread = max(spread, sd[c])
    low -= 4.0 * spread
    if high - low < 1e-9:
        return float(high)
    steps = 400
    width = (high - low) / steps
    total = 0.0
    for i in range(steps + 1):
        x = low + i * width
        log_below = 0.0
        for c in range(len(mean)):
            if sd[c] <= 1e-12:
                if x < mean[c]:
                    log_below = -1e300
            else:
                below = 0.5 * math.erfc(-(x - mean[c]) / sd[c] / 1.4142135623730951)
                log_below += n[c] * math.log(below) if below > 0 else -1e300
        weight = 0.5 if i in (0, steps) else 1.0
        total += weight * (1.0 - math.exp(max(log_below, -700.0)))
    return float(low + total * width)


@jit
def _location_scale(x: Floats, robust: bool) -> tuple[float, float]:
    """Mean and standard deviation, or median and quartile distance over that of a normal."""
    count = len(x)
    if count == 1:
        return x[0], 0.0
    if robust:
        order = np.sort(x)
        quarter = count // 4
        return order[count // 2], (order[count - 1 - quarter] - order[quarter]) / 1.3489795
    mean = x.mean()
    total = 0.0
    for value in x:
        total += (value - mean) ** 2
    return mean, math.sqrt(total / (count - 1))


@jit
def _largest(samples: Floats, n: float, gain: float, robust: bool) -> float:
    """E[max] over n ranks a class; samples float64[k, m] are m sampled arrivals of k classes."""
    k = samples.shape[0]
    mean, sd, count = np.empty(k), np.empty(k), np.full(k, n)
    for c in range(k):
        mean[c], sd[c] = _location_scale(samples[c], robust)
    if k == 1:
        return float(mean[0] + gain * sd[0])
    if robust:
        best = mean[0] + gain * sd[0]
        for c in range(1, k):
            best = max(best, mean[c] + gain * sd[c])
        return float(best)
    return mixture_max(mean, sd, count)


@jit
def _meet(
    arrivals: Floats,
    reach: int,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
    robust: bool,
) -> Floats:
    """When the members that the columns stand for have all arrived; arrivals float64[k, C], answer float64[C].

    shape (A, B, extra columns); n ranks (inner, outer); gain E[max] for inner and outer and the sd of the inner max;
    luck float64[A]: standard scores that keep the spread between inner groups.
    """
    k, columns = arrivals.shape
    a_count, b_count, extra = shape
    sampled = a_count * b_count
    out = np.empty(columns)
    if reach == NONE:
        for j in range(columns):
            best = arrivals[0, j]
            for c in range(1, k):
                best = max(best, arrivals[c, j])
            out[j] = best
        return out
    late = -1e300
    for j in range(sampled, columns):
        for c in range(k):
            late = max(late, arrivals[c, j])
    if reach == OUTER and b_count > 1:
        for b in range(b_count):
            level = _largest(np.ascontiguousarray(arrivals[:, b:sampled:b_count]), n[1], gain[1], robust)
            if b == 0:
                level = max(level, late)
            for a in range(a_count):
                out[a * b_count + b] = level
        for j in range(sampled, columns):
            out[j] = max(out[0], late)
        return out
    group = np.empty((1, a_count))
    if b_count > 1:
        for a in range(a_count):
            part = np.ascontiguousarray(arrivals[:, a * b_count : (a + 1) * b_count])
            level = _largest(part, n[0], gain[0], robust)
            width = 0.0
            for c in range(k):
                width = max(width, _location_scale(part[c], robust)[1])
            group[0, a] = level + width * gain[2] * luck[a]
    if reach == INNER:
        typical = group[0].mean()
        for a in range(a_count):
            for b in range(b_count):
                out[a * b_count + b] = group[0, a]
        for j in range(sampled, columns):
            own = arrivals[0, j]
            for c in range(1, k):
                own = max(own, arrivals[c, j])
            out[j] = max(own, typical)
        return out
    level = (
        _largest(arrivals[:, :sampled], n[1], gain[1], robust)
        if b_count == 1
        else _largest(group, n[1], gain[1], robust)
    )
    out[:] = max(level, late) if extra else level
    return out


@jit
def sweep_columns(
    dur_ns: Floats,
    noisy: npt.NDArray[np.bool_],
    segment: Int32Array,
    cls: Int32Array,
    role: ByteArray,
    instance: Int32Array,
    pred_ptr: IntArray,
    pred: Int32Array,
    lag_ns: Floats,
    reach: ByteArray,
    noise: Floats,
    static: Floats,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
    robust: bool,
    exact: bool,
    shapes: Floats,
) -> tuple[Floats, int]:
    """Finish of every class in every column, float64[classes, C], and how many rows of `shapes` were filled.

    noise float64[P, C]: relative noise, one row a (class, segment) in turn; static float64[classes, C].
    exact: the columns are the whole population, so meeting takes their largest (A = outer, B = inner).
    shapes float64[R, A]: receives standardised arrivals of outer meetings, for the tails; may have no rows.
    """
    columns = noise.shape[1]
    nodes = len(dur_ns)
    end = np.empty((nodes, columns))
    finish = np.full((static.shape[0], columns), -1e300)
    filled = 0
    a_count, b_count, _ = shape
    for v in range(nodes):
        t = np.full(columns, -1e300)
        first, last = pred_ptr[v], pred_ptr[v + 1]
        members, hub = 0, False
        if role[v] == MEET:
            for e in range(first, last):
                if instance[pred[e]] == instance[v]:
                    if role[pred[e]] == MEET:
                        hub = True
                    elif role[pred[e]] == ARRIVE:
                        members += 1
        for e in range(first, last):
            u = pred[e]
            if role[v] == MEET and role[u] == ARRIVE and instance[u] == instance[v]:
                continue
            for j in range(columns):
                t[j] = max(t[j], end[u, j] + lag_ns[e])
        if members and not hub:
            arrivals = np.empty((members, columns))
            m = 0
            for e in range(first, last):
                u = pred[e]
                if role[u] == ARRIVE and instance[u] == instance[v]:
                    for j in range(columns):
                        arrivals[m, j] = end[u, j] + lag_ns[e]
                    m += 1
            far = reach[instance[v]]
            if exact:
                met = _meet_exact(arrivals, far, a_count, b_count)
            else:
                met = _meet(arrivals, far, shape, n, gain, luck[v % luck.shape[0]], robust)
                if filled < shapes.shape[0] and far >= OUTER and b_count == 1:
                    middle, scale = _location_scale(arrivals[0, :a_count], robust)
                    if scale > 0:
                        for a in range(a_count):
                            shapes[filled, a] = (arrivals[0, a] - middle) / scale
                        filled += 1
            for j in range(columns):
                t[j] = max(t[j], met[j])
        c = cls[v]
        row = (segment[v] * static.shape[0] + c) % noise.shape[0]
        for j in range(columns):
            began = t[j] if t[j] > -1e299 else 0.0
            stretch = 1.0 + noise[row, j] + static[c, j] if noisy[v] else 1.0
            end[v, j] = began + dur_ns[v] * stretch
            finish[c, j] = max(finish[c, j], end[v, j])
    return finish, filled


@jit
def _meet_exact(arrivals: Floats, reach: int, a_count: int, b_count: int) -> Floats:
    """The largest arrival of each group, where the columns are all ranks."""
    k, columns = arrivals.shape
    best = arrivals[0].copy()
    for c in range(1, k):
        for j in range(columns):
            best[j] = max(best[j], arrivals[c, j])
    if reach == NONE:
        return best
    if reach == BOTH or (reach == OUTER and b_count == 1):
        best[:] = best.max()
    elif reach == INNER:
        for a in range(a_count):
            best[a * b_count : (a + 1) * b_count] = best[a * b_count : (a + 1) * b_count].max()
    else:
        for b in range(b_count):
            best[b::b_count] = best[b::b_count].max()
    return best


def finish_time(
    finish: Floats, shape: tuple[int, int, int], n: tuple[float, float], gain: tuple[float, float, float], robust: bool
) -> float:
    """When the last rank of all classes is done: a meeting of everyone."""
    return float(_meet(finish, BOTH, shape, n, gain, np.zeros(shape[0]), robust)[0])
