"""Compressed chains give the same times as the whole graph, and expand to the same timeline."""

from __future__ import annotations

from hypothesis import given, settings

from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.compress import compress
from scaletrace.replay.engine import replay
from tests.replay.graphs import graph_of, two_ranks
from tests.replay.test_engine import graphs


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_expanded_timeline_is_the_timeline(graph: Graph) -> None:
    """Start and end of every node, for the graph's durations and for others."""
    small = compress(graph)
    doubled = graph.dur_ns * 2

    for dur in (graph.dur_ns, doubled):
        found = small.expand(replay(small.graph, small.durations(dur)), dur)
        assert replay(graph, dur).start_ns.tolist() == found.start_ns.tolist()
        assert replay(graph, dur).end_ns.tolist() == found.end_ns.tolist()


def test_chain_becomes_one_node() -> None:
    """Three nodes in a row with lags of 2 take the sum; a fork ends the chain."""
    nodes = [("a", NodeKind.HOST, 0, 0, 5), ("b", NodeKind.HOST, 0, 0, 6), ("c", NodeKind.HOST, 0, 0, 7)]
    nodes += [("x", NodeKind.KERNEL, 0, 1, 8), ("y", NodeKind.KERNEL, 0, 1, 9)]
    edges = [
        (0, 1, 2, EdgeKind.PROGRAM),
        (1, 2, 2, EdgeKind.PROGRAM),
        (2, 3, 0, EdgeKind.LAUNCH),
        (2, 4, 0, EdgeKind.LAUNCH),
    ]

    small = compress(graph_of(nodes, edges, release={0: 0}))

    assert [22, 8, 9] == small.graph.dur_ns.tolist()
    assert [0, 0, 0, 1, 2] == small.chain.tolist()


def test_compressed_graph_is_topological() -> None:
    """A chain takes the place of its first node, so edges still lead forward."""
    assert compress(two_ranks()).graph.is_topological()
