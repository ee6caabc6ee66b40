"""Turns the ends of nodes into the step time of a job, by one definition for what was measured, replayed and predicted.

A rank's step ends with its last device work (host work in a job without devices). The step time is the mean, over ranks
and steps, of the time from the end of one step to the end of the next on the same rank.

Why so: ranks begin and end a window apart, and a device is behind its host. From the first start of any rank to the last
end of any rank a window of few steps holds both lags once, and no step does (four gloo ranks, three steps: 56 ms, where
each rank takes 45; a device two steps behind: 270 ms for 156). From end to end on one rank the lags cancel. The first
step of a window therefore only opens it; it counts, from its own start, where there is no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.graph import Graph, NodeKind

KERNEL, COPY = int(NodeKind.KERNEL), int(NodeKind.COPY)
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What of each rank's time is counted: ranks, low_ns, high_ns and steps, int64[r]; rank ranks[i] does steps[i] whole
    steps from low_ns[i] to high_ns[i], those among them included that only other ranks marked. each_ns int64[r, k]: every
    counted step where all ranks have k and marked them, else [0, 0]."""

    ranks: IntArray
    low_ns: IntArray
    high_ns: IntArray
    steps: IntArray
    each_ns: IntArray

    @property
    def mean_ns(self) -> float:
        """The step time; 0 for a graph without work."""
        count = int(self.steps.sum())
        return float((self.high_ns - self.low_ns).sum()) / count if count else 0.0

    @property
    def times_ns(self) -> IntArray:
        """The mean over ranks of every step, rounded, int64[k]; the step time alone where ranks have different steps."""
        if not self.each_ns.size:
            return np.array([round(self.mean_ns)], np.int64)
        return np.asarray(np.rint(self.each_ns.mean(axis=0)), np.int64)


def bounding_kinds(graph: Graph) -> tuple[NodeKind, ...]:
    """Kinds of nodes whose ends bound a step: device work, or host work where no kernel or copy runs on a device."""
    lanes = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)
    if _works_on_device(graph.kind, graph.lane, lanes):
        return NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER
    return NodeKind.HOST, NodeKind.LAUNCH, NodeKind.WAIT


@jit
def _works_on_device(kind: ByteArray, lane: Int32Array, on_device: BoolArray) -> bool:
    found = False
    for v in range(len(kind)):
        found = found or ((kind[v] == KERNEL or kind[v] == COPY) and on_device[lane[v]])
    return found


@jit
def _latest(
    kind: ByteArray,
    bounds: BoolArray,
    rank_at: IntArray,
    rank: Int32Array,
    step: Int32Array,
    end_ns: IntArray,
    steps: int,
) -> IntArray:
    """Latest end of a bounding node by (rank, step), int64[ranks, steps + 1]; the first column is outside any step."""
    out = np.full((rank_at.max() + 1, steps + 1), NEVER)
    for v in range(len(kind)):
        if bounds[kind[v]] and rank[v] >= 0:
            row, column = rank_at[rank[v]], step[v] + 1
            out[row, column] = max(out[row, column], end_ns[v])
    return out


def _ends(graph: Graph, end_ns: IntArray, kinds: tuple[NodeKind, ...]) -> tuple[IntArray, IntArray]:
    """(ranks, latest ends by rank and step); no rank where no node is of these kinds."""
    bounds = np.zeros(max(NodeKind) + 1, np.bool_)
    bounds[[int(kind) for kind in kinds]] = True
    present = np.bincount(graph.rank[graph.rank >= 0]) > 0 if len(graph) else np.zeros(0, np.bool_)
    ranks = np.flatnonzero(present)
    if not len(ranks):
        return ranks, np.zeros((0, 1), np.int64)
    rank_at = np.cumsum(present) - 1
    table = _latest(graph.kind, bounds, rank_at, graph.rank, graph.step, end_ns, max(0, int(graph.step.max()) + 1))
    worked = (table > NEVER).any(axis=1)
    return ranks[worked], table[worked]


def step_window(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> StepWindow:
    """The counted steps of a timeline or of what was measured; start_ns, end_ns int64[n].

    Without any step each rank's whole window counts as one; a graph without host and device work is bounded by all nodes.
    """
    ranks, table = _ends(graph, end_ns, bounding_kinds(graph))
    if not len(ranks):
        ranks, table = _ends(graph, end_ns, tuple(kind for kind in NodeKind if kind != NodeKind.RENDEZVOUS))
    numbered = bool((table[:, 1:] > NEVER).any())
    table = table[:, 1:] if numbered else table
    table = table[:, (table > NEVER).any(axis=0)]
    done = table > NEVER
    count = done.sum(axis=1)
    several = count > 1 if (count > 1).any() else count > 0
    ranks, table, done, count = ranks[several], table[several], done[several], count[several]
    if not len(ranks):
        none = np.zeros(0, np.int64)
        return StepWindow(none, none, none, none, np.zeros((0, 0), np.int64))
    last = np.where(done, table, NEVER).max(axis=1)
    if (count > 1).any():
        opening = done.argmax(axis=1)
        first = table[np.arange(len(ranks)), opening]
        # a step that only this rank has no mark for was done all the same
        steps = done.shape[1] - 1 - done[:, ::-1].argmax(axis=1) - opening
        same = len(np.unique(count)) == 1 and bool((steps == count - 1).all())
        each = np.diff(table[done].reshape(len(ranks), -1), axis=1) if same else np.zeros((0, 0), np.int64)
        return StepWindow(ranks, first, last, steps, each)
    opens = np.array([_first_start(graph, start_ns, int(rank), numbered) for rank in ranks], np.int64)
    return StepWindow(ranks, opens, last, count, (last - opens)[:, None])


def _first_start(graph: Graph, start_ns: IntArray, rank: int, numbered: bool) -> int:
    """When a rank's only step begins: with its own first node."""
    mine = (graph.rank == rank) & (graph.kind != NodeKind.RENDEZVOUS)
    inside = mine & (graph.step >= 0) if numbered else mine
    return int(start_ns[inside].min())


def step_time_s(graph: Graph, start_ns: IntArray, end_ns: IntArray) -> float:
    """The step time in seconds (StepWindow.mean_ns)."""
    return step_window(graph, start_ns, end_ns).mean_ns * 1e-9
