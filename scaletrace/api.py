"""The public face of the library: `load(path)` gives a Trace, whose methods answer what the commands answer.

trace = scaletrace.load("runs/8gpu")
trace.replay().to_frame()
trace.critical_path().to_frame()
trace.extrapolate([64, 512], cluster="dgx_h100").to_frame()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrace.parse.build import Built, build
from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.parse.load import load as load_job

if TYPE_CHECKING:
    from scaletrace.extrapolate.curve import ScalingCurve
    from scaletrace.parse.graph import Graph
    from scaletrace.replay.critical_path import CriticalPath
    from scaletrace.replay.result import ReplayResult


class Trace:
    """A loaded job. The graph and its replay are computed on first use and kept."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __repr__(self) -> str:
        return f"Trace({self.job.source!r}, ranks={len(self.job.ranks)} of {self.job.world_size})"

    @cached_property
    def built(self) -> Built:
        """The dependency graph with what was measured and how sure its edges are."""
        return build(self.job)

    @property
    def graph(self) -> Graph:
        return self.built.graph

    @property
    def health(self) -> Health:
        """What reading the files had to repair, drop, guess or leave unmatched."""
        return self.job.health

    @cached_property
    def _replayed(self) -> ReplayResult:
        from scaletrace.replay.result import replay_job

        return replay_job(self.built)

    def replay(self) -> ReplayResult:
        """The measured steps rebuilt from the graph: errors, breakdown, collectives, stragglers, critical path."""
        return self._replayed

    def critical_path(self) -> CriticalPath:
        """The chain of nodes across ranks whose length is the makespan."""
        return self._replayed.path

    def extrapolate(self, gpus: Sequence[int], *, cluster: str | Path | None = None, **options: Any) -> ScalingCurve:
        """The job at other sizes; `cluster` is a name of the catalog or a YAML file, `options` as in extrapolate.curve.

        Raises UsageError for sizes or layouts that make no sense.
        """
        from scaletrace.extrapolate.cluster import Cluster
        from scaletrace.extrapolate.curve import extrapolate

        known = Cluster.load(cluster) if cluster is not None else None
        return extrapolate(self.built, cluster=known, sizes=list(gpus), **options)


def load(source: str | Path | Sequence[str | Path], **options: Any) -> Trace:
    """Read a folder, file, glob or URL of Kineto traces; `options` as in scaletrace.parse.load.

    Raises InputError, naming file, place and remedy, when nothing there can be used.
    """
    return Trace(load_job(source, **options))
