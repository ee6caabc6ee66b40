"""Turns FSDP's copies around its gathers into what another number of shards makes of them.

What a rank copies into a gather is its own shard, 1/N of the unit; what it copies out of one, and into a scatter, is the
whole unit with its padding. The kernels have no names of their own, so they are told by the operator that launched them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.rewrite.data import Shape
from scaletrace.extrapolate.segments import causes
from scaletrace.parse.build import Built
from scaletrace.parse.events import BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.graph import Graph
from scaletrace.parse.job import Job

SCATTERED = "fsdp::chunk_cat"
"""The operator that lays a unit's gradients out for their scatter; its first operand is the list of all of them."""
INTO = ("fsdp::all_gather_copy_in", "FSDP::all_gather_copy_in")
WHOLE = ("fsdp::split_with_sizes_copy", "FSDP::all_gather_copy_out", "fsdp::chunk_cat")


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """n nodes: into bool[n] copy a shard into a gather; whole bool[n] copy a unit out of one, or into a scatter."""

    into: BoolArray
    whole: BoolArray

    def moved(self, origin: Int32Array) -> ShardCopies:
        """The same for a graph whose node v was node origin[v] (-1: new)."""
        here = origin >= 0
        return ShardCopies(here & self.into[origin], here & self.whole[origin])

    def by_row(self, graph: Graph) -> Callable[[Graph], ShardCopies]:
        """Finds the same work in a graph that was woven from `graph`, by rank and row of the recorded event.

        Where ranks were renumbered (another pipeline) a row may mean something else, so only equal names count.
        """
        width = int(graph.event.max(initial=0)) + 2

        def keys(of: Graph, mask: BoolArray) -> IntArray:
            nodes = np.flatnonzero(mask & (of.event >= 0))
            return np.unique(of.rank[nodes].astype(np.int64) * width + of.event[nodes])

        into, whole = keys(graph, self.into), keys(graph, self.whole)

        def find(other: Graph) -> ShardCopies:
            key = other.rank.astype(np.int64) * width + np.clip(other.event, -1, width - 1)
            known = other.event >= 0
            return ShardCopies(known & np.isin(key, into), known & np.isin(key, whole))

        return find


def shard_copies(built: Built) -> ShardCopies:
    """The copies of a measured job: kernels (operators of a job without a device) whose call lies in such an operator."""
    graph = built.graph
    into, whole = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    for trace in built.job.ranks:
        events = trace.events
        mine = np.flatnonzero((graph.rank == trace.rank) & (graph.event >= 0))
        for mask, names in ((into, INTO), (whole, WHOLE)):
            mask[mine] = _inside(events, graph.event[mine].astype(np.int64), names)
    if not (into.any() or whole.any()):
        return ShardCopies(into, whole)
    compute, cause = compute_nodes(graph), causes(graph)
    return ShardCopies(compute & into[cause], compute & whole[cause])


def units_of(job: Job) -> tuple[tuple[Shape, ...], ...]:
    """Shapes of the parameters of each FSDP2 unit, unsharded, as the scatter of their gradients shows them.

    Padding to a multiple of the ranks goes by parameter, so it can't be told from the bytes of a gather. Empty where
    the trace has no shapes (record_shapes=True) or no such operator.
    """
    found: dict[tuple[Shape, ...], None] = {}
    for trace in job.ranks:
        events = trace.events
        wanted = [code for code, text in enumerate(events.strings) if text == SCATTERED]
        dims = events.texts("Input Dims")[np.isin(events.name, wanted)]
        for code in np.unique(dims[dims >= 0]).tolist():
            shapes = _first_list(events.strings[code])
            if shapes:
                found.setdefault(shapes)
    return tuple(found)


def _first_list(text: str) -> tuple[Shape, ...]:
    """The first operand of "Input Dims" where that is a list of tensors, () where it is anything else."""
    try:
        entries = json.loads(text)
    except ValueError:
        return ()
    first = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(first, list) or not all(isinstance(each, list) and each for each in first):
        return ()
    if not all(isinstance(size, int) for each in first for size in each):
        return ()
    return tuple(tuple(each) for each in first)


def _inside(events: Events, rows: IntArray, names: tuple[str, ...]) -> BoolArray:
    """Whether each of `rows` starts within an event of one of these names on its own lane."""
    wanted = [code for code, text in enumerate(events.strings) if text.startswith(names)]
    spans = np.flatnonzero(np.isin(events.name, wanted))
    out = np.zeros(len(rows), np.bool_)
    for lane in np.unique(events.lane[spans]):
        own = spans[events.lane[spans] == lane]
        own = own[np.argsort(events.ts_ns[own], kind="stable")]
        at = np.flatnonzero(events.lane[rows] == lane)
        start = events.ts_ns[rows[at]]
        before = np.searchsorted(events.ts_ns[own], start, side="right") - 1
        out[at] = (before >= 0) & (start < events.end_ns[own[np.maximum(before, 0)]])
    return out
