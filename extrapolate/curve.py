"""Turns a measured job into its scaling curve: points with bands, the knee, where communication takes over, what to measure.

curve = extrapolate(built, cluster=Cluster.load("dgx_h100"), sizes=[8, 64, 512])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from scaletrace.errors import UsageError
from scaletrace.extrapolate.base import Base, has_data_axis, prepare
from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.point import Options, Point, evaluate, stretch
from scaletrace.extrapolate.rewrite.data import Shape
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.build import Built
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.replay.timeline import Timeline

KNEE_SHARE = 0.8
DOMINATES = 0.5
MOST_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Points by size, and what they say together.

    knee_gpus            size from which doubling gives less than `knee_share` of double the throughput; None if never
    comm_dominates_gpus  size from which exposed communication takes half of the step; None if never
    benchmark_next       sizes whose measurement would narrow the bands most, best first
    """

    points: tuple[Point, ...]
    base: Base
    options: Options
    knee_gpus: int | None
    comm_dominates_gpus: int | None
    benchmark_next: tuple[int, ...]
    knee_share: float = KNEE_SHARE

    @property
    def health(self) -> Health:
        return self.base.health

    def to_json_parts(self) -> dict[str, Any]:
        """The parts of `extrapolate --json` between schema and health."""
        return {
            "cluster": self.base.cluster.name,
            "measured_gpus": self.base.ranks,
            "data_axis_seen": has_data_axis(self.base.graph),
            "scaling": "weak" if self.options.weak else "strong",
            "points": [point.to_json() for point in self.points],
            "knee_gpus": self.knee_gpus,
            "knee_share": self.knee_share,
            "comm_dominates_gpus": self.comm_dominates_gpus,
            "best_layout_by_gpus": {str(point.gpus): point.layout.to_json() or {"dp": 1} for point in self.points},
            "benchmark_next": list(self.benchmark_next),
            "noise": {
                "residual_cv": self.base.noise.residual_cv,
                "static_cv": self.base.noise.static_cv,
                "tail": self.base.noise.tail,
                "source": self.base.noise.source,
            },
            "overlap_slowdown": {
                "waiting": self.base.slowdown.default[0],
                "moving": self.base.slowdown.default[1],
                "source": self.base.slowdown.source,
            },
        }

    def to_frame(self) -> pd.DataFrame:
        """One row a point; bands as three columns, layouts as text."""
        rows = []
        for point in self.points:
            row = point.to_json()
            band = row.pop("step_time_s")
            row |= {f"step_{name}_s": band[name] for name in ("low", "p50", "high")}
            row["layout"] = ",".join(f"{k}={v}" for k, v in row["layout"].items())
            row |= {f"exposed_{axis}": value for axis, value in row.pop("exposed_by_axis").items()}
            row |= {f"provenance_{part}": word for part, word in row.pop("provenance").items()}
            rows.append(row)
        return pd.DataFrame(rows)

    def timeline(self, gpus: int) -> Timeline:
        """The predicted timeline at a size: the rewritten graph of the measured ranks, replayed."""
        return stretch(self.base, gpus, self.options)[1].timeline


def extrapolate(
    source: Built | Job,
    *,
    cluster: Cluster | None = None,
    sizes: Sequence[int],
    layout: Layout | None = None,
    weak: bool = True,
    evidence: Iterable[Evidence] = (),
    noise: Noise | None = None,
    overlap_slowdown: float | None = None,
    nics: int | None = None,
    units: Sequence[Sequence[Shape]] = (),
    bucket_bytes: int | None = None,
    tokens_per_step_per_gpu: float | None = None,
    flop_per_step_per_gpu: float | None = None,
    knee_share: float = KNEE_SHARE,
) -> ScalingCurve:
    """Stretch a measured job to `sizes` ranks of a cluster (default: the one that the trace looks like).

    layout            degrees to use at every size, dp or the measured data axis filling up; default as measured
    weak              keep each rank's work; False keeps the global batch
    evidence          transfers measured elsewhere (nccl-tests) beside the trace's own
    noise             overrides what the trace tells of jitter and slow ranks
    overlap_slowdown  overrides what the trace tells of compute beside collectives (0.2 = 20 % slower)
    nics              how many of a node's NICs one group drives at most
    units             parameter shapes of each FSDP unit, for exact padding
    bucket_bytes      gradient buckets of DDP of at most this size, instead of the measured ones
    Raises UsageError for sizes or layouts that don't fit, InputError where the trace holds nothing to build on.
    """
    if not sizes or any(size < 1 for size in sizes):
        raise UsageError(f"sizes are numbers of ranks ≥ 1, got {list(sizes)}")
    base = prepare(
        source,
        cluster,
        more_evidence=evidence,
        noise=noise,
        slowdown=overlap_slowdown,
        units=units,
        asked=layout,
        bucket_bytes=bucket_bytes,
    )
    options = Options(layout, weak, nics, tokens_per_step_per_gpu, flop_per_step_per_gpu)
    points = tuple(_rising([evaluate(base, size, options) for size in sorted(set(sizes))], base, weak))
    return ScalingCurve(
        points=points,
        base=base,
        options=options,
        knee_gpus=knee(points, knee_share, weak),
        comm_dominates_gpus=dominates(points),
        benchmark_next=benchmark_next(points, base.ranks),
        knee_share=knee_share,
    )


def _rising(points: Sequence[Point], base: Base, weak: bool) -> list[Point]:
    """Points whose step never falls with ranks under weak scaling: what fell is lifted to the size before, and counted."""
    out: list[Point] = []
    for point in points:
        lift = out[-1].p50_s - point.p50_s if out and weak and out[-1].gpus >= base.ranks else 0.0
        if lift > 1e-9 * point.p50_s:
            base.health.guessed["sizes whose step was lifted to that of the size before"] += 1
            point = replace(point, low_s=point.low_s + lift, p50_s=point.p50_s + lift, high_s=point.high_s + lift)
        out.append(point)
    return out


def _between(points: Sequence[Point], gpus: float, value: str) -> float:
    """A value of the curve at any size inside it, linear in log size."""
    xs = [math.log(point.gpus) for point in points]
    ys = [getattr(point, value) for point in points]
    x = math.log(gpus)
    for i in range(len(xs) - 1):
        if x <= xs[i + 1]:
            share = (x - xs[i]) / (xs[i + 1] - xs[i])
            return float(ys[i] + share * (ys[i + 1] - ys[i]))
    return float(ys[-1])


def knee(points: Sequence[Point], share: float, weak: bool) -> int | None:
    """First size on the curve from which a doubling gives less than `share` of twice the throughput."""
    for point in points:
        if point.gpus * 2 > points[-1].gpus:
            return None
        later = _between(points, point.gpus * 2, "p50_s")
        gain = point.p50_s / later if weak else point.p50_s / later / 2
        if gain < share:
            return point.gpus
    return None


def dominates(points: Sequence[Point]) -> int | None:
    """Size at which exposed communication takes half of the step, between points by log size; None if it never does."""
    for before, after in zip((None, *points), points, strict=False):
        if after.exposed_comm_fraction < DOMINATES:
            continue
        if before is None:
            return after.gpus
        share = (DOMINATES - before.exposed_comm_fraction) / (
            after.exposed_comm_fraction - before.exposed_comm_fraction
        )
        return round(math.exp(math.log(before.gpus) + share * math.log(after.gpus / before.gpus)))
    return None


def benchmark_next(points: Sequence[Point], measured: int) -> tuple[int, ...]:
    """Sizes whose measurement would narrow the bands most for the ranks it takes.

    A measured size replaces the communication error of its own point, and beyond it leaves only what grows from there:
    each point's relative variance falls by the share that the doublings up to the benchmark contribute.
    """
    wide = [point for point in points if point.gpus > measured and point.comm_error_s > 0]
    if not wide:
        return ()
    gains = []
    for candidate in wide:
        narrowed = 0.0
        for point in wide:
            variance = (point.comm_error_s / point.p50_s) ** 2
            if candidate.gpus >= point.gpus:
                left = 0.0 if candidate.gpus == point.gpus else 0.1
            else:
                left = math.log2(point.gpus / candidate.gpus) / math.log2(point.gpus / measured)
            narrowed += variance * (1 - min(1.0, left))
        gains.append((narrowed / math.log2(2 * candidate.gpus / measured), candidate.gpus))
    best = max(gain for gain, _ in gains)
    worth = [gpus for gain, gpus in sorted(gains, key=lambda pair: (-pair[0], pair[1])) if gain >= 0.5 * best]
    return tuple(worth[:MOST_SUGGESTIONS])
