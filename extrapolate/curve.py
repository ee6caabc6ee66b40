"""Turns a measured job into its scaling curve: points with bands, the knee, where communication takes over, what to measure.

curve = extrapolate(built, cluster=Cluster.load("dgx_h100"), sizes=[8, 64, 512])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from scaletrace.errors import UsageError
from scaletrace.extrapolate.base import Base, prepare
from scaletrace.extrapolate.bends import Bend, Level, dominates, grid, knee, rising
from scaletrace.extrapolate.calibrate import Evidence
from scaletrace.extrapolate.cautions import has_data_axis
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.energy import Prices
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.parts import parts_of
from scaletrace.extrapolate.point import Core, Options, Point, core, point_of, stretch
from scaletrace.extrapolate.rewrite.data import Shape
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.extrapolate.strong import told_by_time
from scaletrace.extrapolate.worth import Load, Worth, load_of, worth_measuring
from scaletrace.parse.build import Built
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.replay.timeline import Timeline

KNEE_SHARE = 0.8
LEAST_TOLD = 0.005
"""A smaller share of compute is not worth a name."""


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Points by size, and what they say together.

    knee        size from which doubling gives less than `knee_share` of double the throughput
    dominance   size from which communication costs half of the step: exposed, and what kernels beside it take longer
    evaluated_to  largest size that these two were looked for at: the grid does not depend on the sizes asked for
    worth       sizes whose measurement would narrow the bands most, best first
    left_out    sizes that the global batch can't be divided over, with the reason
    """

    points: tuple[Point, ...]
    base: Base
    options: Options
    knee: Bend = field(default_factory=Bend)
    dominance: Bend = field(default_factory=Bend)
    evaluated_to: int = 0
    worth: tuple[Worth, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    knee_share: float = KNEE_SHARE

    @property
    def health(self) -> Health:
        return self.base.health

    @property
    def knee_gpus(self) -> int | None:
        return self.knee.gpus

    @property
    def comm_dominates_gpus(self) -> int | None:
        return self.dominance.gpus

    @property
    def benchmark_next(self) -> tuple[int, ...]:
        return tuple(each.gpus for each in self.worth)

    def to_json_parts(self) -> dict[str, Any]:
        """The parts of `extrapolate --json` between schema and health."""
        base, origin = self.base, self.base.origin
        limit = base.cluster.device.memory_bytes if any(p.memory_bytes is not None for p in self.points) else None
        return {
            "cluster": base.cluster.name,
            "device": base.cluster.device.name,
            "recorded_on": origin.name or origin.cluster.device.name,
            "compute_is_of": base.cluster.device.name
            if base.compute_moved or not origin.said(base.cluster)
            else origin.name or origin.cluster.device.name,
            "measured_gpus": base.ranks,
            "measured": {
                "gpus": base.fit.gpus,
                "steps": base.fit.steps,
                "step_time_s": base.fit.measured_s,
                "replayed_step_time_s": base.fit.replayed_s,
                "error": base.fit.error,
            },
            "data_axis_seen": has_data_axis(base.graph),
            "axis_certainty": base.certainty,
            "scaling": "weak" if self.options.weak else "strong",
            "points": [point.to_json() for point in self.points],
            "left_out": [{"gpus": gpus, "reason": reason} for gpus, reason in sorted(self.left_out.items())],
            "knee_gpus": self.knee.gpus,
            "knee_range_gpus": self.knee.range,
            "knee_share": self.knee_share,
            "comm_dominates_gpus": self.dominance.gpus,
            "comm_dominates_range_gpus": self.dominance.range,
            "evaluated_to_gpus": self.evaluated_to,
            "best_layout_by_gpus": {str(point.gpus): point.layout.to_json() or {"dp": 1} for point in self.points},
            "benchmark_next": list(self.benchmark_next),
            "benchmark_next_narrows": {str(each.gpus): each.narrows for each in self.worth},
            "memory_limit_bytes": limit,
            "noise": {
                "residual_cv": base.noise.residual_cv,
                "static_cv": base.noise.static_cv,
                "tail": base.noise.tail,
                "source": base.noise.source,
            },
            "overlap_slowdown": {
                "waiting": base.slowdown.default[0],
                "moving": base.slowdown.default[1],
                "transfers": base.slowdown.transfers,
                "evidence": None if base.slowdown.source == "given" else base.slowdown.evidence,
                "provenance": base.slowdown.provenance,
                "source": base.slowdown.source,
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
            row |= {f"retimed_{how}": share for how, share in row.pop("compute_retimed").items()}
            row |= {f"part_{name}": share for name, share in row.pop("parts").items()}
            row |= {f"path_{name}": share for name, share in row.pop("critical_path_share").items()}
            row.pop("unknown")
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
    prices: Prices | None = None,
    knee_share: float = KNEE_SHARE,
    recorded: Cluster | None = None,
) -> ScalingCurve:
    """Stretch a measured job to `sizes` ranks of a cluster (default: the one that the trace looks like).

    layout            degrees to use at every size, dp or the measured data axis filling up; default as measured
    weak              keep each rank's work; False keeps the global batch: fewer micro batches, then smaller ones
    evidence          transfers measured elsewhere (nccl-tests) beside the trace's own
    noise             overrides what the trace tells of jitter and slow ranks
    overlap_slowdown  overrides what the trace tells of compute beside collectives (0.2 = 20 % slower)
    nics              how many of a node's NICs one group drives at most
    units             parameter shapes of each FSDP unit, for exact padding; default: as the scatters' shapes tell
    bucket_bytes      gradient buckets of DDP of at most this size, instead of the measured ones
    prices            money per GPU-hour by device, for what a million tokens cost
    recorded          the cluster that the trace was recorded on, where its network is another one (default: `cluster`)
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
        strong=not weak,
        recorded=recorded,
    )
    if prices is not None:
        prices.hour(base.cluster.device.name)
    options = Options(layout, weak, nics, tokens_per_step_per_gpu, flop_per_step_per_gpu, prices)
    return _curve(base, sorted(set(sizes)), options, knee_share)


def _curve(base: Base, asked: Sequence[int], options: Options, knee_share: float) -> ScalingCurve:
    """The curve of a prepared job: its points, and what the grid beside them says."""
    walk = _walk(base, asked, options)
    shown = [load for load in walk.loads if load.gpus in set(asked)]
    candidates = [load for load in walk.loads if load.gpus <= asked[-1]]
    return ScalingCurve(
        points=_lifted(walk, base, options.weak),
        base=base,
        options=options,
        knee=knee(walk.levels, knee_share, options.weak),
        dominance=dominates(walk.levels),
        evaluated_to=walk.levels[-1].gpus if walk.levels else asked[-1],
        worth=worth_measuring(shown, candidates, base.found, base.cluster, base.ranks, base.calibration, options.nics),
        left_out=walk.left_out,
        knee_share=knee_share,
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """What was found on the way through all sizes: the points asked for, the levels of the grid, loads, what failed."""

    points: tuple[Point, ...]
    levels: tuple[Level, ...]
    loads: tuple[Load, ...]
    left_out: Mapping[int, str]


def _walk(base: Base, asked: Sequence[int], options: Options) -> _Walk:
    """Evaluate the sizes asked for and those of the grid, each once.

    A size of the grid that the layout or the batch does not fit is left out; so is one that was asked for where the
    global batch stays and does not divide, unless none is left. Raises UsageError otherwise.
    """
    ladder = set(grid(base.ranks, asked[-1]))
    points: list[Point] = []
    levels: list[Level] = []
    loads: list[Load] = []
    left_out: dict[int, str] = {}
    retimed = ""
    for gpus in sorted(ladder | set(asked)):
        try:
            found = core(base, gpus, options)
        except UsageError as error:
            if gpus in asked:
                if options.weak:
                    raise
                left_out[gpus] = str(error)
            continue
        error_s = 0.0
        if gpus in asked:
            points.append(point_of(base, found, options))
            error_s = points[-1].comm_error_s
            retimed = _retimed(found) or retimed
        if gpus in asked or gpus <= asked[-1]:
            loads.append(load_of(found.done.graph, found.done.plain_ns, gpus, found.total_s, error_s))
        if gpus in ladder:
            levels.append(Level(gpus, found.total_s, parts_of(found.part, found.keep).communication))
    if not points:
        raise UsageError(next(iter(left_out.values())))
    if left_out:
        names = ", ".join(map(str, left_out))
        base.health.note(f"Left out: {names} GPUs, over which the global batch does not divide (see left_out).")
    if retimed:
        base.health.note(retimed)
    if said := _paced(points):
        base.health.note(said)
    if not options.weak:
        points = _to_linear(points, base)
    return _Walk(tuple(points), tuple(rising(levels, base.cluster) if options.weak else levels), tuple(loads), left_out)


SUPERLINEAR = 0.98
"""A step shorter than this share of what linear scaling gives is remarked on."""


def _to_linear(points: Sequence[Point], base: Base) -> list[Point]:
    """Points of a fixed batch whose bands reach to linear scaling where the step fell below it, which is said.

    A pipeline's fill grows no shorter and launches stay, so more than linear means that the measured step holds what a
    step laid anew does not: a slow first micro batch, the time before ranks first meet, an irregular wait.
    """
    out, beyond = [], []
    for point in points:
        linear_s = base.fit.replayed_s * base.ranks / point.gpus
        if point.gpus > base.ranks and not base.rebuilt and point.p50_s < SUPERLINEAR * linear_s:
            beyond.append(f"{base.fit.replayed_s / point.p50_s:.3g} times as fast at {point.gpus} GPUs")
            point = replace(point, high_s=max(point.high_s, linear_s))
        out.append(point)
    if beyond:
        base.health.note(
            f"More than linear: {', '.join(beyond)} than at the measured {base.ranks}. The measured step holds time that "
            "a step of fewer micro batches, made from the typical one, does not repeat (a slow first micro batch, "
            "irregular waits), so the bands reach up to linear scaling; record more steps after warming up."
        )
    return out


def _retimed(found: Core) -> str:
    """Which kernels a smaller micro batch shortened by their shapes, and which by time alone; "" where none was."""
    done = found.done
    if done.retimed is None or done.base.retiming is None:
        return ""
    sentence = f"Smaller micro batches at {found.gpus} GPUs: {done.retimed.by_shape:.0%} of the time that shrinks is "
    sentence += "re-timed by the models of shapes"
    if done.retimed.by_time < LEAST_TOLD:
        return sentence + "."
    names = told_by_time(done.graph, done.base.retiming, done.plain_ns)
    return f"{sentence}, {done.retimed.by_time:.0%} in proportion to time alone, for want of shapes ({names})."


def _paced(points: Sequence[Point]) -> str:
    """That the host sets the pace, where most of the critical path is its work; "" where it is nowhere."""
    paced = [point for point in points if point.parts.paced_by_host]
    if not paced:
        return ""
    first = paced[0]
    busy = f"{first.compute_fraction:.0%} of the step"
    names = ", ".join(f"{point.gpus:,}" for point in paced)
    return (
        f"The host sets the pace at {names} GPUs: at {first.gpus:,} {first.parts.path['host']:.1%} of the critical path is "
        f"its work, so that faster kernels or links gain little there; beside it kernels run for {busy}."
    )


def _lifted(walk: _Walk, base: Base, weak: bool) -> tuple[Point, ...]:
    """Points whose step never falls with ranks under weak scaling: what fell is lifted to the sizes before, and counted.

    Sizes that leave a node partly filled lift none: filling it helps.
    """
    out: list[Point] = []
    for point in walk.points:
        below = [level.step_s for level in walk.levels if level.gpus <= point.gpus and base.cluster.fills(level.gpus)]
        below += [other.p50_s for other in out if other.gpus >= base.ranks and base.cluster.fills(other.gpus)]
        lift = max(below, default=0.0) - point.p50_s if weak else 0.0
        if lift > 1e-9 * point.p50_s:
            base.health.guessed["sizes whose step was lifted to that of the size before"] += 1
            point = replace(point, low_s=point.low_s + lift, p50_s=point.p50_s + lift, high_s=point.high_s + lift)
        out.append(point)
    return tuple(out)
