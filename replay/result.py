"""Turns a Job into the answers of `scaletrace replay`: errors, where time went, who kept whom waiting, the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scaletrace.parse.build import BuildOptions, Built, build
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.parse.waits import Instances, bus_bandwidth, instances_of
from scaletrace.replay import stragglers as straggling
from scaletrace.replay.accuracy import (
    AcrossSteps,
    StepError,
    across_steps,
    mean_error,
    step_errors,
    without_stalls,
)
from scaletrace.replay.breakdown import RankBreakdown, breakdown
from scaletrace.replay.critical_path import CriticalPath, critical_path, next_paths
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_window
from scaletrace.replay.stragglers import Straggler, judged
from scaletrace.replay.timeline import Timeline

NEXT_PATHS = 3


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """Collectives of one axis, kind, group size and payload: how many, how long waited and moved (all members), speed.

    busbw_Bps  as `inspect` has it: of what was measured, the median over the instances all of whose members were seen
    """

    axis: str
    kind: str
    group_size: int
    bytes: int
    count: int
    wait_ns: int
    transfer_ns: int
    busbw_Bps: float | None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Everything that `replay` says. `steps` replay the graph with its stalls, `strict` without them."""

    built: Built
    timeline: Timeline
    path: CriticalPath
    steps: list[StepError]
    strict: list[StepError]
    across: list[AcrossSteps]
    breakdown: list[RankBreakdown]
    collectives: list[CollectiveSummary]
    stragglers: list[Straggler]

    @property
    def health(self) -> Health:
        """What the job's reading and the graph's building repaired, dropped, guessed or left unmatched."""
        out = Health()
        out.add(self.built.job.health)
        out.add(self.built.health)
        return out

    def step_time_ns(self) -> dict[str, int]:
        """The step time, measured and replayed (replay.steps): from end to end on each rank."""
        graph, measured = self.built.graph, self.built.measured
        seen = step_window(graph, measured.start_ns, measured.end_ns).mean_ns
        return {
            "measured": round(seen),
            "replayed": round(step_window(graph, self.timeline.start_ns, self.timeline.end_ns).mean_ns),
        }

    def to_json_parts(self) -> dict[str, Any]:
        """The content of `replay --json` (docs/cli.md) without its frame."""
        quality = self.built.quality
        across = [abs(a.error) for a in self.across]
        return {
            "steps": [
                {"step": e.step, "measured_ns": e.measured_ns, "replayed_ns": e.replayed_ns, "error": e.error}
                for e in self.steps
            ],
            "step_time_ns": self.step_time_ns(),
            "mean_abs_error": mean_error(self.steps),
            "quality": {
                "strict_error": mean_error(self.strict),
                "across_steps_error": float(np.mean(across)) if across else None,
                "unexplained_stall_fraction": quality.worst_stall_fraction,
                "explained_starts_fraction": quality.explained_starts,
                "offered": quality.offered,
                "contradicted": quality.contradicted,
                "time_sliced_ranks": list(quality.time_sliced_ranks),
            },
            "breakdown": {str(part.rank): part.to_json() for part in self.breakdown},
            "collectives": [one.to_json() for one in self.collectives],
            "stragglers": [s.to_json() for s in self.stragglers],
            "critical_path": path_json(self.path),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row a step: measured, replayed and strictly replayed nanoseconds with their errors."""
        strict = {e.step: e for e in self.strict}
        return pd.DataFrame(
            [
                {
                    "step": e.step,
                    "measured_ns": e.measured_ns,
                    "replayed_ns": e.replayed_ns,
                    "error": e.error,
                    "strict_ns": strict[e.step].replayed_ns,
                    "strict_error": strict[e.step].error,
                }
                for e in self.steps
            ]
        )


def path_json(path: CriticalPath, most: int = 500) -> dict[str, Any]:
    """The `critical_path` part: the longest `most` segments in order of time, what the rest sums to, shares, next paths."""
    segments = path.segments()
    kept = sorted(range(len(segments)), key=lambda at: -int(str(segments[at]["dur_ns"])))[:most]
    shown = [segments[at] for at in sorted(kept)]
    return {
        "length_ns": path.length_ns,
        "segments": shown,
        "segments_total": len(segments),
        "segments_left_out_ns": path.length_ns - sum(int(str(s["dur_ns"])) for s in shown),
        "share": path.shares(),
        "loader_ns": path.loader_ns(),
        "by_axis_ns": path.time_by("axis"),
        "by_rank_ns": path.time_by("rank"),
        "by_layer_ns": path.time_by("layer"),
        "next": [
            {"length_ns": length, "ends_with": path.timeline.graph.name_of(int(nodes[-1])), "nodes": len(nodes)}
            for length, nodes in next_paths(path.timeline, NEXT_PATHS)[1:]
        ],
    }


def replay_job(source: Job | Built, options: BuildOptions | None = None) -> ReplayResult:
    """Build the graph of a job (unless it is built), replay it, and answer every question of `scaletrace replay`."""
    built = source if isinstance(source, Built) else build(source, options)
    graph = built.graph
    timeline = replay(graph)
    return ReplayResult(
        built,
        timeline,
        critical_path(timeline),
        step_errors(graph, built.measured, timeline),
        step_errors(graph, built.measured, replay(graph, without_stalls(graph))),
        across_steps(graph, built.measured),
        breakdown(timeline),
        summarise_collectives(timeline, built.job),
        judged(timeline, built.job),
    )


def summarise_collectives(timeline: Timeline, job: Job) -> list[CollectiveSummary]:
    """Collectives by axis, kind, group size and payload, the longest in sum first; speeds as measured in `job`."""
    graph, each = timeline.graph, instances_of(job)
    nodes = np.flatnonzero(graph.nodes(NodeKind.TRANSFER) & (graph.instance >= 0))
    waited, _ = straggling.waits(timeline)
    moving = timeline.end_ns - timeline.start_ns
    members: dict[tuple[str, str, int, int], list[int]] = {}
    for node in nodes.tolist():
        members.setdefault(_collective_key(graph, each, node), []).append(node)
    found = []
    for (axis, kind, size, moved), of_key in members.items():
        at = np.array(of_key)
        instance = np.unique(graph.instance[at])
        speed = bus_bandwidth(kind, size, each.bytes[instance], each.transfer_ns[instance])
        wait, transfer = int(waited[at].sum()), int(moving[at].sum())
        found.append(CollectiveSummary(axis, kind, size, moved, len(instance), wait, transfer, speed))
    return sorted(found, key=lambda c: (-c.transfer_ns - c.wait_ns, c.axis, c.kind, c.bytes))


def _collective_key(graph: Graph, each: Instances, node: int) -> tuple[str, str, int, int]:
    instance = int(graph.instance[node])
    one = graph.collectives[instance]
    group = graph.groups[one.group] if one.group >= 0 else None
    return (group.axis if group else "", one.kind, group.size if group else -1, int(each.bytes[instance]))
