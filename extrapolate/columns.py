"""Turns a reduced graph of rank classes into finish times of a whole population: one sweep over columns of samples.

A class stands for `inner` × `outer` ranks that do the same work (inner: along the axis whose groups lie closest, outer:
along the rest). It is kept as A × B sampled ranks (columns a·B + b), plus columns for the expected worst static rank of
each class. A collective over the population ends, for Gaussian noise, at mean + sd · E[max of n] of the sampled
arrivals, instead of at their largest. Collectives inside one rank column (pipelines) meet column by column.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.reduce import ARRIVE, MEET
from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, Int32Array, IntArray

Floats = npt.NDArray[np.float64]
NONE, INNER, OUTER, BOTH = 0, 1, 2, 3
"""How far an instance reaches: column by column, within an outer group, across outer groups, everywhere."""


@jit
def mixture_max(mean: Floats, sd: Floats, n: float) -> float:
    """E[max] of n normals of mean[c] and sd[c] for each class c, by the trapezoid rule."""
    low, high, spread = mean[0], mean[0], 0.0
    for c in range(len(mean)):
        low, high = max(low, mean[c]), max(high, mean[c] + 6.5 * sd[c])
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
                log_below += -1e300 if x < mean[c] else 0.0
            else:
                below = 0.5 * math.erfc(-(x - mean[c]) / sd[c] / 1.4142135623730951)
                log_below += n * math.log(below) if below > 0 else -1e300
        weight = 0.5 if i in (0, steps) else 1.0
        total += weight * (1.0 - math.exp(max(log_below, -700.0)))
    return float(low + total * width)


@jit
def _spread(x: Floats) -> float:
    """Standard deviation of a sample, 0 for one value."""
    if len(x) == 1:
        return 0.0
    mean, total = x.mean(), 0.0
    for value in x:
        total += (value - mean) ** 2
    return math.sqrt(total / (len(x) - 1))


@jit
def _largest(samples: Floats, n: float, gain: float) -> float:
    """E[max] over n ranks a class; samples float64[k, m] are m sampled arrivals of k classes."""
    k = samples.shape[0]
    mean, sd = np.empty(k), np.empty(k)
    for c in range(k):
        mean[c], sd[c] = samples[c].mean(), _spread(samples[c])
    if k == 1:
        return float(mean[0] + gain * sd[0])
    return mixture_max(mean, sd, n)


@jit
def _columnwise(arrivals: Floats) -> Floats:
    """The latest of all members in each column."""
    out = np.empty(arrivals.shape[1])
    for j in range(arrivals.shape[1]):
        out[j] = arrivals[0, j]
        for c in range(1, arrivals.shape[0]):
            out[j] = max(out[j], arrivals[c, j])
    return out


@jit
def _meet(
    arrivals: Floats,
    reach: int,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
) -> Floats:
    """When the members that the columns stand for have all arrived; arrivals float64[k, C], answer float64[C].

    shape (A, B, extra columns); n ranks (inner, outer); gain E[max] for inner and outer and the sd of the inner max;
    luck float64[A]: standard scores that keep the spread between inner groups.
    """
    k, columns = arrivals.shape
    a_count, b_count, extra = shape
    sampled = a_count * b_count
    own = _columnwise(arrivals)
    if reach == NONE:
        return own
    late = own[sampled:].max() if extra else -1e300
    out = np.empty(columns)
    if reach == OUTER and b_count > 1:
        for b in range(b_count):
            level = _largest(np.ascontiguousarray(arrivals[:, b:sampled:b_count]), n[1], gain[1])
            if b == 0:
                level = max(level, late)
            out[b:sampled:b_count] = level
        out[sampled:] = out[0]
        return out
    if b_count == 1 and reach != INNER:
        out[:] = max(_largest(arrivals[:, :sampled], n[1], gain[1]), late)
        return out
    group = np.empty((1, a_count))
    for a in range(a_count):
        part = np.ascontiguousarray(arrivals[:, a * b_count : (a + 1) * b_count])
        width = 0.0
        for c in range(k):
            width = max(width, _spread(part[c]))
        group[0, a] = _largest(part, n[0], gain[0]) + width * gain[2] * luck[a]
    if reach == INNER:
        for a in range(a_count):
            out[a * b_count : (a + 1) * b_count] = group[0, a]
        for j in range(sampled, columns):
            out[j] = max(own[j], group[0].mean())
        return out
    out[:] = max(_largest(group, n[1], gain[1]), late)
    return out


@jit
def _meet_exact(arrivals: Floats, reach: int, shape: tuple[int, int, int], boost: float) -> Floats:
    """The largest arrival of each group, where the columns are ranks one by one.

    boost: how much further than the columns' own largest the whole population's lies from the mean (1 = all are here).
    """
    best = _columnwise(arrivals)
    a_count, b_count, _ = shape
    if reach == NONE:
        return best
    if reach == BOTH or (reach == OUTER and b_count == 1):
        best[:] = best.mean() + boost * (best.max() - best.mean())
    elif reach == INNER:
        for a in range(a_count):
            best[a * b_count : (a + 1) * b_count] = best[a * b_count : (a + 1) * b_count].max()
    else:
        for b in range(b_count):
            part = best[b::b_count]
            best[b::b_count] = part.mean() + boost * (part.max() - part.mean())
    return best


@jit
def _members(
    v: int, first: int, last: int, pred: Int32Array, role: ByteArray, instance: Int32Array
) -> tuple[int, bool]:
    """How many arrivals of its own instance a node joins, and whether a hub has joined them already."""
    members, hub = 0, False
    if role[v] == MEET:
        for e in range(first, last):
            if instance[pred[e]] == instance[v]:
                hub = hub or role[pred[e]] == MEET
                members += role[pred[e]] == ARRIVE
    return members, hub


@jit
def _shaped(arrivals: Floats, out: Floats) -> int:
    """Write the standardised latest arrivals of each column to `out`; 1 if they differ at all, else 0."""
    best = _columnwise(arrivals)
    width = _spread(best)
    if width > 0:
        out[:] = (best - best.mean()) / width
        return 1
    return 0


@jit
def sweep_columns(
    dur_ns: Floats,
    segment: Int32Array,
    cls: Int32Array,
    role: ByteArray,
    instance: Int32Array,
    pred_ptr: IntArray,
    pred: Int32Array,
    fixed_ns: Floats,
    noisy_ns: Floats,
    reach: ByteArray,
    noise: Floats,
    static: Floats,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    luck: Floats,
    boost: float,
    shapes: Floats,
) -> tuple[Floats, int]:
    """End of every node in every column, float64[nodes, C], and how many rows of `shapes` were filled.

    dur_ns, noisy_ns (of an edge) and fixed_ns as reduce.longest_paths gives them; node durations are not noisy.
    noise float64[P, C]: relative noise, one row a (class, segment) in turn; static float64[classes, C].
    boost > 0: columns are ranks one by one (_meet_exact); 0: columns are samples (_meet).
    shapes float64[R, C]: receives standardised arrivals of meetings across the population; may have no rows.
    """
    columns, classes = noise.shape[1], static.shape[0]
    nodes = len(dur_ns)
    end = np.empty((nodes, columns))
    filled = 0
    for v in range(nodes):
        t = np.full(columns, -1e300)
        first, last = pred_ptr[v], pred_ptr[v + 1]
        members, hub = _members(v, first, last, pred, role, instance)
        row = (segment[v] * classes + cls[v]) % noise.shape[0]
        arrivals = np.empty((members, columns))
        m = 0
        for e in range(first, last):
            u = pred[e]
            own = role[v] == MEET and role[u] == ARRIVE and instance[u] == instance[v]
            for j in range(columns):
                reached = end[u, j] + fixed_ns[e]
                if noisy_ns[e] != 0.0:
                    reached += noisy_ns[e] * (1.0 + noise[row, j] + static[cls[v], j])
                if own:
                    arrivals[m, j] = reached
                else:
                    t[j] = max(t[j], reached)
            m += own
        if members and not hub:
            far = reach[instance[v]]
            if boost > 0:
                met = _meet_exact(arrivals, far, shape, boost)
            else:
                met = _meet(arrivals, far, shape, n, gain, luck[v % luck.shape[0]])
            if filled < shapes.shape[0] and far >= OUTER:
                filled += _shaped(arrivals, shapes[filled])
            for j in range(columns):
                t[j] = max(t[j], met[j])
        for j in range(columns):
            end[v, j] = (t[j] if t[j] > -1e299 else 0.0) + dur_ns[v]
    return end, filled


def everyone(
    finish: Floats,
    shape: tuple[int, int, int],
    n: tuple[float, float],
    gain: tuple[float, float, float],
    boost: float,
) -> float:
    """When the last rank of all classes is done: a meeting of everyone; finish float64[classes, C]."""
    if boost > 0:
        return float(_meet_exact(finish, BOTH, shape, boost)[0])
    return float(_meet(finish, BOTH, shape, n, gain, np.zeros(shape[0]))[0])
