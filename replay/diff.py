"""Turns the replays of two runs into which operations and waits explain the difference, step for step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scaletrace.parse.graph import NodeKind
from scaletrace.replay.critical_path import CriticalPath
from scaletrace.replay.result import ReplayResult


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the explanation: time on the critical path, per step, in run A and in run B, in nanoseconds."""

    what: str
    kind: str
    a_ns: float
    b_ns: float

    @property
    def delta_ns(self) -> float:
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True)
class Diff:
    """a_ns, b_ns: the measured step time of each run, as `replay` gives it (replay.steps). a_window_ns, b_window_ns: the
    replayed window divided by its steps, which also holds how far ranks and devices were apart when it began; the
    critical path crosses it whole, so the deltas of `path` sum to the difference of these two.

    parts      mean over ranks of each breakdown part, per step
    operations time of all ranks together per step, by kernel or operator name
    """

    a_ns: float
    b_ns: float
    a_window_ns: float
    b_window_ns: float
    path: list[Change]
    parts: list[Change]
    operations: list[Change]
    collectives: list[Change]

    @property
    def delta_ns(self) -> float:
        return self.b_ns - self.a_ns

    @property
    def window_delta_ns(self) -> float:
        return self.b_window_ns - self.a_window_ns

    @property
    def common(self) -> float:
        """Share of all operation time that belongs to operations of both runs; low where they are not of one job."""
        total = sum(c.a_ns + c.b_ns for c in self.operations)
        shared = sum(c.a_ns + c.b_ns for c in self.operations if c.a_ns > 0 and c.b_ns > 0)
        return shared / total if total else 1.0

    def to_frame(self) -> pd.DataFrame:
        rows = [("path", c) for c in self.path] + [("operations", c) for c in self.operations]
        rows += [("parts", c) for c in self.parts] + [("collectives", c) for c in self.collectives]
        return pd.DataFrame(
            [
                {"table": t, "what": c.what, "kind": c.kind, "a_ns": c.a_ns, "b_ns": c.b_ns, "delta_ns": c.delta_ns}
                for t, c in rows
            ]
        )

    def to_json_parts(self, most: int = 50) -> dict[str, Any]:
        def lines(changes: list[Change]) -> list[dict[str, Any]]:
            return [
                {"what": c.what, "kind": c.kind, "a_ns": c.a_ns, "b_ns": c.b_ns, "delta_ns": c.delta_ns}
                for c in changes[:most]
            ]

        return {
            "a_step_ns": self.a_ns,
            "b_step_ns": self.b_ns,
            "delta_ns": self.delta_ns,
            "a_window_ns": self.a_window_ns,
            "b_window_ns": self.b_window_ns,
            "window_delta_ns": self.window_delta_ns,
            "common": self.common,
            "path": lines(self.path),
            "parts": lines(self.parts),
            "operations": lines(self.operations),
            "collectives": lines(self.collectives),
        }


def diff(a: ReplayResult, b: ReplayResult) -> Diff:
    """Compare two runs of a job; they may differ in steps, ranks and names."""
    steps_a, steps_b = max(len(a.steps), 1), max(len(b.steps), 1)
    return Diff(
        float(a.step_time_ns()["measured"]),
        float(b.step_time_ns()["measured"]),
        a.path.length_ns / steps_a,
        b.path.length_ns / steps_b,
        _changes(_on_path(a.path), steps_a, _on_path(b.path), steps_b),
        _changes(_parts(a), steps_a, _parts(b), steps_b),
        _changes(_operations(a), steps_a, _operations(b), steps_b),
        _changes(_collectives(a), steps_a, _collectives(b), steps_b),
    )


Times = dict[tuple[str, str], float]


def _changes(a: Times, steps_a: int, b: Times, steps_b: int) -> list[Change]:
    """One Change a key, the largest difference first."""
    found = [
        Change(what, kind, a.get((what, kind), 0.0) / steps_a, b.get((what, kind), 0.0) / steps_b)
        for what, kind in {**a, **b}
    ]
    return sorted(found, key=lambda c: (-abs(c.delta_ns), c.kind, c.what))


def _on_path(path: CriticalPath) -> Times:
    out: Times = defaultdict(float)
    for segment in path.segments():
        out[str(segment["name"]), str(segment["kind"])] += float(str(segment["dur_ns"]))
    return out


def _parts(result: ReplayResult) -> Times:
    out: Times = defaultdict(float)
    for part in result.breakdown:
        for key, value in part.to_json().items():
            if key.endswith("_ns") and isinstance(value, int) and key != "wall_ns":
                out[key.removesuffix("_ns"), "part"] += value / len(result.breakdown)
    return out


def _operations(result: ReplayResult) -> Times:
    graph = result.built.graph
    timed = graph.nodes(NodeKind.KERNEL, NodeKind.COPY, NodeKind.HOST, NodeKind.LAUNCH, NodeKind.TRANSFER)
    out: Times = defaultdict(float)
    for kind in NodeKind:
        at = np.flatnonzero(timed & (graph.kind == kind))
        totals = np.bincount(graph.name[at], weights=graph.dur_ns[at], minlength=len(graph.names))
        for name in np.flatnonzero(totals).tolist():
            out[graph.names[name], kind.name.lower()] += float(totals[name])
    return out


def _collectives(result: ReplayResult) -> Times:
    out: Times = defaultdict(float)
    for one in result.collectives:
        label = f"{one.axis or 'unknown axis'} {one.kind}"
        out[label, "wait"] += one.wait_ns
        out[label, "transfer"] += one.transfer_ns
    return out
