"""Turns a graph and what was measured into errors that mean something: strict identity, and prediction across steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import Graph, Measured, NodeKind
from scaletrace.replay.align import sequences, tokens
from scaletrace.replay.donors import from_other_steps, from_peers, peers_weight
from scaletrace.replay.engine import replay, replay_columns
from scaletrace.replay.timeline import Timeline

_DEVICE = (NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER)
_HOST = (NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT)
EXTERNAL_SHARE = 1 / 3
MOST_TARGETS, MOST_DONORS = 16, 8
WINDOW = -1
"""Step number that stands for the whole window where the trace has no steps."""


@dataclass(frozen=True, slots=True)
class StepError:
    """One step, measured and replayed: from the last step's end (its own start, for the first) to its own."""

    step: int
    measured_ns: int
    replayed_ns: int

    @property
    def error(self) -> float:
        return self.replayed_ns / self.measured_ns - 1 if self.measured_ns else 0.0


def boundary_nodes(graph: Graph) -> BoolArray:
    """Nodes whose ends bound a step: device work, or host work in a job without devices."""
    on_device = any(lane.is_device for lane in graph.lanes)
    return graph.nodes(*(_DEVICE if on_device else _HOST))


def without_stalls(graph: Graph, dur_ns: IntArray | None = None) -> IntArray:
    """Durations with all STALL nodes at zero: the strict mode, in which nothing is forgiven."""
    return np.where(graph.kind == NodeKind.STALL, 0, graph.dur_ns if dur_ns is None else dur_ns)


def step_errors(graph: Graph, measured: Measured, timeline: Timeline) -> list[StepError]:
    """Every step of the job, or the whole window as step -1 where there is none.

    A step that ends before the one before it did (its work was short, or a record was clipped) has no length.
    """
    bounding = boundary_nodes(graph)
    numbers = np.unique(graph.step[bounding & (graph.step >= 0)])
    if not len(numbers):
        if not len(graph):
            return []
        whole = int(measured.end_ns.max() - measured.start_ns.min())
        return [StepError(WINDOW, whole, timeline.makespan_ns)]
    out: list[StepError] = []
    was, now = 0, 0
    for at, number in enumerate(numbers.tolist()):
        inside = graph.step == number
        if at == 0:
            was = int(measured.start_ns[inside].min())
            now = was
        ends = inside & bounding
        end, replayed = int(measured.end_ns[ends].max()), int(timeline.end_ns[ends].max())
        end, replayed = max(end, was), max(replayed, now)
        out.append(StepError(int(number), end - was, replayed - now))
        was, now = end, replayed
    return out


def mean_error(errors: list[StepError]) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(e.error) for e in errors])) if errors else 0.0


def given_steps(graph: Graph, measured: Measured) -> set[int]:
    """Steps of which more than a third passes while work from before the window still arrives: they are partly given."""
    external = boundary_nodes(graph) & (graph.step < 0)
    out = set()
    for number, (start, end) in measured.step_bounds.items():
        inside = external & (measured.start_ns >= start) & (measured.start_ns < end)
        if inside.any() and int(measured.end_ns[inside].max()) - start > EXTERNAL_SHARE * (end - start):
            out.add(number)
    return out


@dataclass(frozen=True, slots=True)
class AcrossSteps:
    """One step predicted from the others: `predicted_ns` with all their durations, `device_only_ns` with own host times.

    Each of the other steps gives all its durations together, so that what happened at once stays together; the
    prediction is the mean of the steps that this makes, low_ns and high_ns the least and the most of them, drawn by
    `peers_weight` towards the mean of the steps that the host times of other ranks make.
    naive_ns  mean of the other measured steps;  mapped: share of the step's nodes that had a counterpart
    host_variation  how far the host's busy time of this step lies from the others' mean, on the rank where it is worst
    """

    step: int
    measured_ns: int
    predicted_ns: int
    device_only_ns: int
    naive_ns: float
    mapped: float
    host_variation: float
    low_ns: int = 0
    high_ns: int = 0
    peers_weight: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted_ns / self.measured_ns - 1

    @property
    def device_only_error(self) -> float:
        return self.device_only_ns / self.measured_ns - 1

    @property
    def naive_error(self) -> float:
        return self.naive_ns / self.measured_ns - 1


def across_steps(graph: Graph, measured: Measured) -> list[AcrossSteps]:
    """Predict each step from the durations of the others on its own structure; empty below two steps.

    Stalls are at zero, blocking calls never keep their durations: what a step needs beyond that can't be predicted.
    Of a long job at most sixteen steps are predicted, each from the eight nearest ones.
    A mean of durations would hide what their spread does: the longest of several ranks' means is shorter than the mean
    of the longest. So every donor step is replayed by itself, all of them in one sweep, and the results are averaged.
    """
    parts, given = sequences(graph), given_steps(graph, measured)
    by_step = {e.step: e for e in step_errors(graph, measured, replay(graph)) if e.measured_ns > 0}
    numbers = sorted({step for _, step, _ in parts if step in by_step and step >= 0 and step not in given})
    if len(numbers) < 2:
        return []
    chosen = [numbers[at] for at in np.unique(np.linspace(0, len(numbers) - 1, MOST_TARGETS).round().astype(int))]
    device, strict, mark = graph.nodes(*_DEVICE), without_stalls(graph), tokens(graph)
    out = []
    for number in chosen:
        nearest = sorted((n for n in numbers if n != number), key=lambda n: (abs(n - number), n))
        others = sorted(nearest[:MOST_DONORS])
        mine = {key: nodes for key, nodes in parts.items() if key[1] == number}
        own = from_other_steps(graph, mark, parts, mine, others, strict)
        predicted = _step_times(graph, own.dur_ns, number)
        own_host = _step_times(graph, np.where(device[:, None], own.dur_ns, strict[:, None]), number)
        weight = peers_weight(graph, own)
        likely, peers = float(predicted.mean()), from_peers(graph, mark, parts, mine, others, own, weight)
        if peers.shape[1]:
            likely += weight * (float(_step_times(graph, peers, number).mean()) - likely)
        whole = sum(len(nodes) for nodes in mine.values())
        out.append(
            AcrossSteps(
                number,
                by_step[number].measured_ns,
                round(likely),
                round(float(own_host.mean())),
                float(np.mean([by_step[n].measured_ns for n in others])),
                float(own.found.sum() / whole) if whole else 0.0,
                _host_variation(graph, number, others),
                int(predicted.min()),
                int(predicted.max()),
                weight if peers.shape[1] else 0.0,
            )
        )
    return out


def _step_times(graph: Graph, dur_ns: IntArray, number: int) -> IntArray:
    """Replayed length of one step with each column of durations int64[n, K]; the steps before it are as they were."""
    end = replay_columns(graph, dur_ns)
    bounding, inside = boundary_nodes(graph), graph.step == number
    before = bounding & (graph.step >= 0) & (graph.step < number)
    start = end[before].max(axis=0) if before.any() else (end - dur_ns)[inside].min(axis=0)
    return np.asarray(np.maximum(end[bounding & inside].max(axis=0) - start, 0))


def _host_variation(graph: Graph, number: int, others: list[int]) -> float:
    """Largest relative distance, over ranks, of one step's host time from the mean of the others'."""
    host = graph.nodes(NodeKind.HOST, NodeKind.LAUNCH)
    worst = 0.0
    for rank in np.unique(graph.rank[host]).tolist():
        mine = host & (graph.rank == rank)
        busy = {n: int(graph.dur_ns[mine & (graph.step == n)].sum()) for n in (number, *others)}
        mean = float(np.mean([busy[n] for n in others]))
        if busy[number] and mean:
            worst = max(worst, abs(mean / busy[number] - 1))
    return worst
