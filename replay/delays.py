"""Turns the wish to take a delay out of a rank into shorter durations, in a fixed order, and says how much was found.

A delay is taken, step by step, from where it can hide, in this order:
  host     host time beyond the rank's pace, the longest excess first: a sleep, a slow loader, a stretch between operators
  stall    starts and returns that no rule explains, the longest first
  kernels  device time (operators of a rank without a device) beyond the pace, the longest excess first
The pace of a node is what its counterparts take: the median over the other ranks, with a single rank the median over its
other steps. Host time between operators that has no counterpart at all can be taken whole. The rest of a rank's time is
work, and stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import BETWEEN, Graph, NodeKind
from scaletrace.replay.align import pair, sequences, tokens
from scaletrace.replay.stragglers import counterpart_pace

SOURCES = ("host", "stall", "kernels")
MOST_DONORS = 8
_HOST = (NodeKind.HOST, NodeKind.LAUNCH)
_DEVICE = (NodeKind.KERNEL, NodeKind.COPY)


@dataclass(frozen=True, slots=True)
class Removal:
    """What a rule asked to take out, over all its ranks and steps, and what was found, by source; in nanoseconds."""

    asked_ns: int
    taken_ns: dict[str, int] = field(default_factory=dict)
    times: int = 1

    @property
    def total_ns(self) -> int:
        return sum(self.taken_ns.values())

    def describe(self, rule: str) -> str:
        """One sentence a person can act on; times are a step of a rank."""
        each = {key: value / self.times / 1e6 for key, value in self.taken_ns.items() if value}
        found = ", ".join(f"{value:.2f} from {_WORDS[key]}" for key, value in each.items()) or "there is no such delay"
        return (
            f"{rule}: {self.total_ns / self.times / 1e6:.2f} of {self.asked_ns / self.times / 1e6:.2f} ms a step "
            f"could be taken out ({found})"
        )


_WORDS = {"host": "host time beyond its pace", "stall": "stalls", "kernels": "device work beyond its pace"}


def remove_delay(graph: Graph, dur_ns: IntArray, ranks: list[int], time_ns: int) -> tuple[IntArray, BoolArray, Removal]:
    """Durations with up to `time_ns` a step less on each of `ranks`, which nodes changed, and what was found where."""
    pace = _pace(graph, ranks)
    out = dur_ns.copy()
    taken = dict.fromkeys(SOURCES, 0)
    excess = np.maximum(dur_ns - np.minimum(pace, dur_ns), 0)
    pools = _pools(graph)
    stepped = bool((graph.step[graph.lane >= 0] >= 0).any())
    times = 0
    for rank in ranks:
        mine = (graph.rank == rank) & (graph.lane >= 0)
        steps = np.unique(graph.step[mine & (graph.step >= 0)]).tolist() if stepped else [None]
        for step in steps:
            inside = mine if step is None else mine & (graph.step == step)
            left = time_ns
            times += 1
            for source, pool in zip(SOURCES, pools, strict=True):
                at = np.flatnonzero(inside & pool & (excess > 0))
                cut = _largest_first(excess[at], left)
                out[at] -= cut
                taken[source] += int(cut.sum())
                left -= int(cut.sum())
    return out, out != dur_ns, Removal(time_ns * max(times, 1), taken, max(times, 1))


def _largest_first(excess: IntArray, budget: int) -> IntArray:
    """How much to take of each so that the largest go first and the sum does not exceed the budget."""
    order = np.argsort(-excess, kind="stable")
    before = np.concatenate(([0], np.cumsum(excess[order])[:-1])) if len(order) else np.zeros(0, np.int64)
    out = np.zeros(len(excess), np.int64)
    out[order] = np.clip(budget - before, 0, excess[order])
    return out


def _pools(graph: Graph) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Which nodes belong to which source: host time, stalls, and device work or what stands for it."""
    host, device = graph.nodes(*_HOST), graph.nodes(*_DEVICE)
    with_device = sorted({lane.rank for lane in graph.lanes if lane.is_device})
    between = np.array([name.startswith(BETWEEN) for name in graph.names] + [False], np.bool_)[graph.name]
    operator = host & ~between & ~np.isin(graph.rank, with_device)
    return host & ~operator, graph.nodes(NodeKind.STALL), device | operator


def _pace(graph: Graph, ranks: list[int]) -> IntArray:
    """What each node of these ranks takes elsewhere, int64[n]; its own duration where nothing corresponds to it."""
    pace, known = counterpart_pace(graph)
    everyone = np.unique(graph.rank[graph.lane >= 0])
    if len(everyone) < 2:
        pace, known = _other_steps(graph)
    between = np.array([name.startswith(BETWEEN) for name in graph.names] + [False], np.bool_)[graph.name]
    pace = np.where(known, pace, graph.dur_ns)
    pace[~known & between & (graph.kind == NodeKind.HOST) & np.isin(graph.rank, ranks)] = 0
    pace[graph.kind == NodeKind.STALL] = 0
    return pace


def _other_steps(graph: Graph) -> tuple[IntArray, BoolArray]:
    """Median over the nearest other steps of the same rank and lane, and which nodes have a counterpart there."""
    mark, parts = tokens(graph), sequences(graph)
    pace, known = graph.dur_ns.copy(), np.zeros(len(graph), np.bool_)
    by_place: dict[tuple[int, int], dict[int, Int32Array]] = {}
    for (rank, step, lane), nodes in parts.items():
        if step >= 0:
            by_place.setdefault((rank, lane), {})[step] = nodes
    for here in by_place.values():
        for step, nodes in here.items():
            donors = sorted((n for n in here if n != step), key=lambda n: (abs(n - step), n))[:MOST_DONORS]
            if not donors:
                continue
            table = np.full((len(donors), len(nodes)), np.nan)
            for row, donor in enumerate(donors):
                at = pair(mark[nodes], mark[here[donor]])
                table[row, at >= 0] = graph.dur_ns[here[donor][at[at >= 0]]]
            has = np.isfinite(table).any(axis=0)
            pace[nodes[has]] = np.nanmedian(table[:, has], axis=0).astype(np.int64)
            known[nodes[has]] = True
    return pace, known
