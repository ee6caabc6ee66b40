"""Turns the compute times of a few ranks and steps into noise: what is new in every segment, and which ranks are slow.

Log time of a segment between collectives = segment + step + rank (static) + residual. The static spread over ranks is
robust to one slow rank, which is an event of its own and no sign of a wide population.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.segments import segments
from scaletrace.extrapolate.stragglers import PRIOR_NOISE, Noise
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind

Floats = npt.NDArray[np.float64]
SMALL_SEGMENT = 0.01
"""Segments below this share of the step are left out: their noise is large and doesn't matter."""
LARGEST_CV = 0.5
OUTLIER = 10.0
LEAST_SAMPLES = 3
UNLIKE = 3.0
"""A segment that takes this many times as long on one rank as on another holds other work there: not comparable."""


def segment_times(graph: Graph, dur_ns: IntArray) -> Floats:
    """Compute ns by rank, step and segment, float64[ranks, steps, segments]; NaN where a rank has other segments."""
    ranks = np.unique(graph.rank[graph.kind == NodeKind.ARRIVE])
    steps = np.unique(graph.step[(graph.step >= 0) & (graph.kind == NodeKind.ARRIVE)])
    compute, segment = compute_nodes(graph), segments(graph, within_steps=True)
    rows: dict[tuple[int, int], npt.NDArray[Any]] = {}
    for r in ranks.tolist():
        for s in steps.tolist():
            mine = np.flatnonzero((graph.rank == r) & (graph.step == s))
            work, length = mine[compute[mine]], int(segment[mine].max(initial=0)) + 1
            rows[r, s] = np.bincount(segment[work], dur_ns[work].astype(np.float64), length)
    if not rows:
        return np.zeros((0, 0, 0))
    lengths = [len(row) for row in rows.values()]
    usual = max(set(lengths), key=lengths.count)
    out = np.full((len(ranks), len(steps), usual), np.nan)
    for (r, s), row in rows.items():
        if len(row) == usual:
            out[np.searchsorted(ranks, r), np.searchsorted(steps, s)] = row
    return out


def measure_noise(graph: Graph, dur_ns: IntArray | None = None) -> Noise:
    """Noise of a measured graph, or the published prior where fewer than two ranks or no segment can tell."""
    times = segment_times(graph, graph.dur_ns if dur_ns is None else dur_ns)
    if times.size == 0 or times.shape[0] < 2:
        return PRIOR_NOISE
    whole = ~np.isnan(times).any(axis=(0, 2))
    times = times[:, whole]
    if times.size == 0:
        return PRIOR_NOISE
    share = times.mean(axis=(0, 1))
    keep = share > SMALL_SEGMENT * share.sum()
    times, share = times[:, :, keep], share[keep] / max(1e-300, float(share[keep].sum()))
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = (times > 0).all(axis=(0, 1)) & (times.max(axis=(0, 1)) < UNLIKE * times.min(axis=(0, 1)))
    times, share = times[:, :, alike], share[alike]
    if times.size == 0:
        return PRIOR_NOISE
    logs = np.log(times)
    logs = logs - logs.mean(axis=(0, 1), keepdims=True)
    static = (logs * share).sum(axis=2).mean(axis=1) / share.sum()
    static = static - np.median(static)
    rest = logs - static[:, None, None]
    rest = rest - rest.mean(axis=0, keepdims=True)
    ranks = times.shape[0]
    residual = float(np.sqrt((rest**2 * share).sum() / (share.sum() * ranks * times.shape[1]) * ranks / (ranks - 1)))
    spread = _spread(static)
    if times.shape[1] * times.shape[2] < LEAST_SAMPLES:
        source = f"spread measured on {ranks} ranks, too few segments to tell its parts; residual from the prior"
        return Noise(PRIOR_NOISE.residual_cv, min(LARGEST_CV, spread), source=source)
    averaged = residual / np.sqrt(times.shape[1] * max(1.0, 1 / float((share**2).sum())))
    static_cv = float(np.sqrt(max(0.0, spread**2 - averaged**2)))
    counts = ((ranks, "rank"), (times.shape[1], "step"), (times.shape[2], "segment"))
    source = f"measured on {', '.join(f'{n} {name}' + 's' * (n != 1) for n, name in counts)}"
    return Noise(min(LARGEST_CV, residual), min(LARGEST_CV, static_cv), source=source)


def _spread(static: Floats) -> float:
    """Standard deviation over ranks without outliers (more than OUTLIER robust deviations from the median)."""
    middle = np.median(static)
    scale = 1.4826 * float(np.median(np.abs(static - middle)))
    inside = static[np.abs(static - middle) <= OUTLIER * scale] if scale > 0 and len(static) > 3 else static
    return float(inside.std(ddof=1)) if len(inside) > 1 else 0.0
