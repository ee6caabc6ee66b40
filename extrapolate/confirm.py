"""Turns the best estimates of a search into an order by replay: the measured graph is rewritten for each and replayed.

All are compared as replays: a layout that was not replayed by its estimate times what replays of layouts like it were
times theirs, from the smallest to the largest such ratio, and not at all where no layout like it was replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.errors import ScaletraceError, UsageError
from scaletrace.extrapolate import overlap, transfers
from scaletrace.extrapolate.calibrate import calibrate
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import FAMILY, Calibration
from scaletrace.extrapolate.estimate import Estimate, Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.overlap import Slowdown
from scaletrace.extrapolate.relayout import nodes_under, relayout
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.search import Advance, Found, estimate_json, reasons, silent
from scaletrace.parse.build import Built
from scaletrace.parse.graph import Graph
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_time_s

Floats = npt.NDArray[np.float64]
SWEEPS = 3
"""Replays after which kernels and what runs beside them agree."""
SAME = 0.005
"""Replays that differ by less are called equal."""
SMALL_GRAPH = 200_000
"""Nodes up to which rewriting and replaying takes less than half a second a layout."""
FEW, MORE = 3, 5
NEAREST = 3
"""So many replays, the most like a layout, say what its own would be beside its estimate."""
MOST_NODES = 1_000_000
"""Nodes of a rewritten graph that take some seconds to make and replay."""


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """The replayed step over the estimate: smallest and largest, and how many layouts say so.

    confirmed  0: not of this job, but what estimates of described jobs were off by against measured ones
    """

    low: float
    high: float
    confirmed: int


DESCRIBED = ErrorBand(1.07, 1.30, 0)
"""Steps of described jobs are 7 to 30 % too fast for most real stacks (docs/limits.md)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A layout with its estimate and, where its graph was made, the replayed step with the kernels' error (one sigma).

    as_measured  the layout that the capture ran with, at another size with more data ranks
    host         share of the replay's critical path that is the host's work
    notes        what the rewrite to this layout has to say of it
    """

    estimate: Estimate
    replayed_s: float | None = None
    error: float = 0.0
    why_not: str | None = None
    as_measured: bool = False
    host: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the replay of a layout would be by replays of layouts like it, seconds; middle_s: by their median."""

    low_s: float
    middle_s: float
    high_s: float


def kind_of(layout: Layout) -> tuple[object, ...]:
    """What decides which terms a layout has at all: axes in use, how data ranks shard, whether it computes again."""
    sharding = "fsdp" if layout.fsdp > 1 else "zero" if layout.zero else "replicas"
    used = (layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.ep > 1)
    return (*used, sharding, layout.recompute == "full")


def _unlike(one: Layout, other: Layout) -> tuple[int, float]:
    """(in how many things two layouts are of another kind, how many doublings of degrees lie between them)."""
    apart = sum(a != b for a, b in zip(kind_of(one), kind_of(other), strict=True))
    sizes = ("dp", "fsdp", "tp", "pp", "cp", "ep", "mbs", "chunks")
    return apart, sum(abs(float(np.log2(max(1, getattr(one, name)) / max(1, getattr(other, name))))) for name in sizes)


def bounds(row: Row, rows: Sequence[Row]) -> Bounds | None:
    """What a row's replay would be by the replayed ones of `rows` most like it; None where none is like it.

    Alike are layouts of one kind, or of kinds that differ in one thing. A single one shows no scatter: then the bounds
    reach to the estimate as it is.
    """
    near = sorted((*_unlike(row.estimate.layout, item.estimate.layout), item.replayed_s / item.estimate.step_s)
                  for item in rows if item.replayed_s is not None)  # fmt: skip
    ratios = [ratio for apart, _, ratio in near[:NEAREST] if apart <= 1]
    if not ratios:
        return None
    ratios += [1.0] if len(ratios) == 1 else []
    step_s = row.estimate.step_s
    return Bounds(step_s * min(ratios), step_s * float(np.median(ratios)), step_s * max(ratios))


@dataclass(frozen=True, slots=True)
class Ranking:
    """Rows in their final order (the first replayed where any is); band: None = not known."""

    rows: tuple[Row, ...]
    band: ErrorBand | None

    @property
    def by_replay(self) -> bool:
        return self.rows[0].replayed_s is not None

    def compared_by(self, row: Row) -> str | None:
        """On what a row is compared with the first: replays, bounds of one, two estimates, None = not comparable."""
        if not self.by_replay:
            return "estimate"
        if row.replayed_s is not None:
            return "replay"
        return "bounded estimate" if bounds(row, self.rows) else None

    def step_s(self, row: Row) -> float:
        """The best known step: replayed, else the middle of what a replay would be, else the estimate as it is."""
        if row.replayed_s is not None:
            return row.replayed_s
        found = bounds(row, self.rows)
        return found.middle_s if found else row.estimate.step_s

    def behind(self, row: Row) -> float | None:
        """How far a row is behind the first, at least 0; None beside a replay of which it has only bounds, or none."""
        if self.compared_by(row) not in ("replay", "estimate"):
            return None
        return max(0.0, self.step_s(row) / self.step_s(self.rows[0]) - 1)

    def behind_range(self, row: Row) -> tuple[float, float] | None:
        """From where to where a row that was not replayed is behind a first one that was; below 0: maybe faster."""
        found = bounds(row, self.rows) if self.compared_by(row) == "bounded estimate" else None
        first_s = self.step_s(self.rows[0])
        return (found.low_s / first_s - 1, found.high_s / first_s - 1) if found else None

    def within_error(self, row: Row) -> bool | None:
        """Whether a row may be as fast as the first for all that is known; None where no error is known."""
        first = self.rows[0]
        if first.replayed_s is not None and row.replayed_s is not None:
            return row.replayed_s / first.replayed_s - 1 <= max(SAME, row.error, first.error)
        if first.replayed_s is not None:
            apart = self.behind_range(row)
            return None if apart is None else apart[0] <= 0
        if self.band is None:
            return None
        return row.estimate.step_s * self.band.low <= first.estimate.step_s * self.band.high

    def to_json_parts(self) -> dict[str, Any]:
        """The layouts of `search --json`, in order, and what their order rests on."""
        first, *others = (self._json(row) for row in self.rows)
        band = None if self.band is None else {name: getattr(self.band, name) for name in self.band.__slots__}
        return {
            "ordered_by": "replay" if self.by_replay else "estimate",
            "estimate_error": band,
            "best": first,
            "next": others,
        }

    def _json(self, row: Row) -> dict[str, Any]:
        out = estimate_json(row.estimate) | {
            "rewritten_step_time_s": row.replayed_s,
            "rewritten_error": row.error if row.replayed_s is not None else None,
            "why_not_rewritten": row.why_not,
            "as_measured": row.as_measured,
            "host_share_of_path": row.host,
            "notes": list(row.notes),
            "best_known_step_time_s": self.step_s(row),
        }
        if row is not self.rows[0]:
            why = list(reasons(self.rows[0].estimate, row.estimate))
            out |= {"behind": self.behind(row), "within_error": self.within_error(row), "reasons": why}
            apart = self.behind_range(row)
            out |= {"behind_range": None if apart is None else list(apart), "compared_by": self.compared_by(row)}
        return out


def layout_at(measured: Layout, gpus: int, samples: int, seq: int) -> Layout | None:
    """The measured layout (with its micro batches and length) at a size, more data ranks filling it up.

    None where it does not fill the size, or takes another batch or length than the search.
    """
    factor = gpus // measured.ranks
    if gpus % measured.ranks or measured.seq != seq:
        return None
    axis = "fsdp" if measured.fsdp > 1 and measured.dp == 1 else "dp"
    out = replace(measured, **{axis: getattr(measured, axis) * factor})
    if out.pp > 1:
        out = replace(out, schedule=out.pipeline_schedule)  # spelled as the candidates are
    return out if out.mbs * out.microbatches * out.data_ranks == samples else None


def opened(built: Built, measured: Layout, cluster: Cluster) -> State:
    """The capture's graph, ready to be rewritten for layouts on `cluster`; what it measured of collectives counts."""
    on_cpu = cluster.device.generation == "cpu"
    network = Network(cluster, measured_costs(built.graph, cluster))
    return open_state(built, measured, network, None if on_cpu else Ceilings.of(cluster.device))


def measured_costs(graph: Graph, cluster: Cluster) -> Calibration:
    """What the transfers of a capture say of the costs on its cluster, as when it is stretched."""
    free = overlap.beside_nothing(graph, replay(graph), graph.dur_ns)
    return calibrate(transfers.evidence(graph, free), cluster)


def slowdown_of(built: Built, state: State) -> Slowdown | None:
    """What overlap costs the kernels of an opened capture, as when it is stretched; None where nothing overlaps."""
    return overlap.of_job(built, state.graph, state.network.cluster.device.overlap_slowdown)


def freed(state: State, slowdown: Slowdown) -> State:
    """The state with times as they would be if nothing ran beside them."""
    timeline, kappa = replay(state.graph), slowdown.per_node(state.graph)
    share = overlap.overlap_share(state.graph, timeline.start_ns, timeline.end_ns)
    alone = 1.0 - (share * kappa / (1.0 + kappa)).sum(axis=1)
    return replace(state, anatomy=replace(state.anatomy, exact_ns=state.anatomy.exact_ns * alone)).with_durations()


def _replayed(graph: Graph, slowdown: Slowdown | None, moving: Floats | None) -> tuple[float, float]:
    """(step in seconds, share of the host in the critical path) of a graph; with a slowdown its times are free of
    overlap, and that of its own replay is put in.

    moving: as in overlap.overlap_share
    """
    timeline = replay(graph)
    if slowdown is not None:
        kappa, none = slowdown.per_node(graph), np.zeros((len(graph), 2))
        made = overlap.plan(graph)
        for _ in range(SWEEPS):
            share = overlap.overlap_share(graph, timeline.start_ns, timeline.end_ns, moving, made)
            timeline = replay(graph, overlap.apply(graph.dur_ns, kappa, none, share))
    host = critical_path(timeline).shares().get("host", 0.0)
    return step_time_s(graph, timeline.start_ns, timeline.end_ns), host


def _moving(measured: State, made: State) -> Floats:
    """How hard the collectives of `made` move data, relative to those of their kind that were measured (1 = as hard):
    the share of its time that bytes take, as when a job is stretched (transfers.Scaled); float64[collectives].
    """
    before: dict[str, list[float]] = {}
    for kind, share in _wire_shares(measured):
        before.setdefault(kind, []).extend([share] if share > 0 else [])
    usual = {kind: float(np.median(shares)) for kind, shares in before.items() if shares}
    return np.array(
        [min(1.0, share / usual.get(kind, share)) if share > 0 else 1.0 for kind, share in _wire_shares(made)]
    )


def _wire_shares(state: State) -> list[tuple[str, float]]:
    """Kind and wire share (costs.Cost) of each collective, 0 where there is no model of it."""
    out = []
    for item in state.graph.collectives:
        share = 0.0
        if item.group >= 0 and item.kind in FAMILY and state.graph.groups[item.group].size > 1:
            group = state.graph.groups[item.group]
            size = max(1, transfers.whole_bytes(item, group.size))
            share = state.network.cost(item.kind, size, group.size, max(1, group.stride)).wire_share
        out.append((item.kind, share))
    return out


def confirmed(state: State, row: Row, slowdown: Slowdown | None = None) -> Row:
    """The row with the step of the measured graph made into its layout and replayed, or with the reason why not.

    slowdown  what overlap costs where `state` is freed of it; None: its times count as they are
    """
    target = row.estimate.layout
    try:
        if target.zero != state.layout.zero and target.data_ranks > 1:
            raise UsageError("optimizer states that are sharded alone (zero) are costed, not rewritten")
        if target.recompute == "none" and state.layout.recompute not in ("none", "off") and not row.as_measured:
            target = replace(target, recompute="off")  # "none" would keep the measured checkpointing
        nodes = nodes_under(state, target.over(state.layout))
        if nodes > MOST_NODES and not row.as_measured:
            raise UsageError(
                f"its graph would have about {nodes:,.0f} nodes, and a search replays up to {MOST_NODES:,}"
            )
        made = relayout(state, target)
        step_s, host = _replayed(made.graph, slowdown, _moving(state, made) if slowdown is not None else None)
    except ScaletraceError as error:
        return replace(row, why_not=str(error))
    said = tuple(note for note in made.health.notes if note not in state.health.notes)
    return replace(row, replayed_s=step_s, error=made.error, host=host, notes=said)


def ranked(
    found: Found,
    state: State | None = None,
    most: int | None = None,
    own: Layout | None = None,
    prior: ErrorBand | None = None,
    advance: Advance = silent,
    slowdown: Slowdown | None = None,
) -> Ranking:
    """The found layouts in their final order.

    state  the capture's graph (opened); None: nothing is replayed
    most   how many layouts to replay beside `own`, and as many again of those that may be faster than the fastest by
           what the replays show of the estimates; None: 5, of a graph over 200,000 nodes 3
    own    the measured layout at this size, replayed wherever it is listed
    prior  error of the estimates where nothing is replayed, None = not known
    slowdown  what overlap costs the capture's kernels (slowdown_of); None: nothing
    advance  is told (done, of how many) before each layout is replayed
    """
    rows = [Row(item, as_measured=item.layout == own) for item in (found.best, *(lost.estimate for lost in found.next))]
    if state is None:
        return Ranking(tuple(_ordered(rows)), prior)
    if most is None:
        most = MORE if len(state.graph) <= SMALL_GRAPH else FEW
    alone = freed(state, slowdown) if slowdown is not None else state
    done = tried = 0

    def try_row(at: int) -> None:
        row = rows[at]
        same = row.estimate.layout.over(state.layout) == state.layout  # as measured, overlap and all
        rows[at] = confirmed(state, row) if same else confirmed(alone, row, slowdown)

    for at, row in enumerate(rows):
        if (row.as_measured and most) or (done < most and tried < 2 * most):
            advance(done, most)
            try_row(at)
            tried += not row.as_measured
            done += row.replayed_s is not None and not row.as_measured
    for again in range(most):
        at = _may_be_first(rows)
        if at < 0:
            break
        advance(again, most)
        try_row(at)
    return Ranking(tuple(_ordered(rows)), _band(rows))


def _may_be_first(rows: Sequence[Row]) -> int:
    """Of the rows that were not tried the one that may be furthest ahead of the fastest replay, -1 where none may."""
    fastest_s = min((row.replayed_s for row in rows if row.replayed_s is not None), default=0.0)
    found = [
        (known.low_s, at)
        for at, row in enumerate(rows)
        if row.replayed_s is None and row.why_not is None and (known := bounds(row, rows)) and known.low_s < fastest_s
    ]
    return min(found, default=(0.0, -1))[1]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """The fastest replayed row, then all by one measure: the replay, or the middle of what it would be (bounds). Those
    that can't be compared come last. Of equal ones (three digits) replayed ones are first, of them the measured layout,
    which asks for no change, then the smaller estimate."""
    known = [float(f"{row.replayed_s:.3g}") for row in rows if row.replayed_s is not None]
    if not known:
        return sorted(rows, key=lambda row: row.estimate.step_s)

    def place(row: Row) -> tuple[float, bool, bool, float]:
        if row.replayed_s is not None:
            return float(f"{row.replayed_s:.3g}"), False, not row.as_measured, row.estimate.step_s
        found = bounds(row, rows)
        middle = max(min(known), float(f"{found.middle_s:.3g}")) if found else float("inf")
        return middle, True, True, row.estimate.step_s

    return sorted(rows, key=place)


def _band(rows: Sequence[Row]) -> ErrorBand | None:
    """What the replays show of the estimates, beside the measurement where they agree by construction."""
    ratios = [row.replayed_s / row.estimate.step_s for row in rows if row.replayed_s is not None]
    return ErrorBand(min(1.0, *ratios), max(1.0, *ratios), len(ratios)) if ratios else None
