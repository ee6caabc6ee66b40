"""Turns a graph into one with its chains as single nodes for the engine, and its timeline back into one of all nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, Int32Array, IntArray
from scaletrace.parse.graph import NO_RELEASE, Graph
from scaletrace.replay.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Compressed:
    """`graph` has one node per chain of `original`; chain int32[n] is each node's chain, lead_ns the lag before it in it."""

    original: Graph
    graph: Graph
    chain: Int32Array
    is_head: BoolArray
    lead_ns: IntArray

    def durations(self, dur_ns: IntArray) -> IntArray:
        """Durations of the chains (their inner lags included) for durations of the nodes."""
        return np.bincount(self.chain, weights=dur_ns + self.lead_ns, minlength=len(self.graph)).astype(np.int64)

    def expand(self, timeline: Timeline, dur_ns: IntArray | None = None) -> Timeline:
        """The timeline of every node from one of the chains, replayed with `dur_ns` (of the nodes)."""
        own = self.original.dur_ns if dur_ns is None else dur_ns
        start, end, binding = _expand(
            self.chain,
            self.is_head,
            self.lead_ns,
            own,
            timeline.start_ns,
            timeline.binding,
            self.original.pred_ptr,
            self.original.pred,
            _last_of(self.chain, len(self.graph)),
        )
        return Timeline(self.original, start, end, binding)


@jit
def _chains(
    pred_ptr: IntArray, pred: Int32Array, lag_ns: IntArray, release_ns: IntArray
) -> tuple[Int32Array, BoolArray, IntArray]:
    """Chain of each node: a node joins its only predecessor's where it is that one's only successor."""
    n = len(release_ns)
    successors = np.zeros(n, np.int32)
    for p in pred:
        successors[p] += 1
    chain, head, lead = np.empty(n, np.int32), np.ones(n, np.bool_), np.zeros(n, np.int64)
    count = 0
    for v in range(n):
        if pred_ptr[v + 1] - pred_ptr[v] == 1 and release_ns[v] == NO_RELEASE:
            e = pred_ptr[v]
            if successors[pred[e]] == 1:
                chain[v], head[v], lead[v] = chain[pred[e]], False, lag_ns[e]
                continue
        chain[v] = count
        count += 1
    return chain, head, lead


@jit
def _last_of(chain: Int32Array, count: int) -> Int32Array:
    last = np.empty(count, np.int32)
    for v in range(len(chain)):
        last[chain[v]] = v
    return last


@jit
def _expand(
    chain: Int32Array,
    is_head: BoolArray,
    lead_ns: IntArray,
    dur_ns: IntArray,
    chain_start: IntArray,
    chain_binding: Int32Array,
    pred_ptr: IntArray,
    pred: Int32Array,
    last: Int32Array,
) -> tuple[IntArray, IntArray, Int32Array]:
    n = len(chain)
    start, end, binding = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int32)
    for v in range(n):
        c = chain[v]
        if is_head[v]:
            start[v] = chain_start[c]
            binding[v] = last[chain_binding[c]] if chain_binding[c] >= 0 else -1
        else:
            p = pred[pred_ptr[v]]
            start[v] = end[p] + lead_ns[v]
            binding[v] = p
        end[v] = start[v] + dur_ns[v]
    return start, end, binding


def compress(graph: Graph) -> Compressed:
    """Merge every chain of nodes with one predecessor and one successor; replaying the result costs less.

    Heads of chains stay in topological order, since a chain takes the place of its first node.
    """
    chain, head, lead = _chains(graph.pred_ptr, graph.pred, graph.lag_ns, graph.release_ns)
    heads = np.flatnonzero(head)
    dur = np.bincount(chain, weights=graph.dur_ns + lead, minlength=len(heads)).astype(np.int64)
    kept = head[graph.edge_dst]
    pred_ptr = np.zeros(len(heads) + 1, np.int64)
    np.cumsum(np.bincount(chain[graph.edge_dst[kept]], minlength=len(heads)), out=pred_ptr[1:])
    optional = {key: getattr(graph, key)[heads] for key in ("blocks", "layer") if len(getattr(graph, key))}
    small = replace(
        graph,
        dur_ns=dur,
        pred_ptr=pred_ptr,
        pred=chain[graph.pred[kept]],
        lag_ns=graph.lag_ns[kept],
        edge_kind=graph.edge_kind[kept],
        edge_source=graph.edge_source[kept],
        **{
            key: getattr(graph, key)[heads]
            for key in ("release_ns", "kind", "rank", "lane", "name", "step", "event", "instance")
        },
        **optional,
    )
    return Compressed(graph, small, chain, head, lead)
