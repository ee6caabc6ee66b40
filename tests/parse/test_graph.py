"""The graph as a type: topological by construction, with doors to networkx and GraphML."""

from __future__ import annotations

from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.parse.build_draft import Draft, finish, group_by, topological_keys
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from tests.replay.graphs import two_ranks


def test_networkx_has_the_same_nodes_and_edges() -> None:
    """Names, kinds, lags and sources are attributes."""
    graph = two_ranks()
    net = graph.to_networkx()

    assert (10, 10) == (net.number_of_nodes(), net.number_of_edges())
    assert {"name": "gemm", "kind": "kernel", "rank": 0, "lane": "stream 7", "dur_ns": 100, "step": 1} == net.nodes[2]
    assert {"lag_ns": 5, "kind": "launch", "source": "order"} == net.edges[0, 2]


def test_graphml_can_be_read_back(tmp_path: Path) -> None:
    """Other tools read the export."""
    two_ranks().to_graphml(tmp_path / "graph.graphml")

    assert 10 == networkx.read_graphml(tmp_path / "graph.graphml").number_of_nodes()


def test_edges_can_be_left_out() -> None:
    """Without rendezvous two edges are gone and the nodes stay."""
    graph = two_ranks().without(kinds=[EdgeKind.RENDEZVOUS])

    assert (10, 8) == (len(graph), graph.edge_count)
    assert EdgeKind.RENDEZVOUS not in graph.edge_kind


def test_axis_of_a_collective() -> None:
    """A transfer knows its axis; a kernel has none."""
    assert ["dp", ""] == [two_ranks().axis_of(node) for node in (6, 2)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.lists(st.integers(0, 50), min_size=10, max_size=10),
)
@settings(max_examples=80, deadline=None)
def test_any_edges_make_a_dag(pairs: list[tuple[int, int]], start: list[int]) -> None:
    """Cycles lose the edges that lead back in time, and only edges inside a cycle are lost."""
    src, dst = (np.array([p[i] for p in pairs], np.int32) for i in (0, 1))

    keys, keep = topological_keys(np.array(start, np.int64), src, dst)

    assert bool(np.all(keys[src[keep]] < keys[dst[keep]]))
    net = networkx.DiGraph([(int(a), int(b)) for a, b in zip(src, dst, strict=True)])
    cyclic = {n for part in networkx.strongly_connected_components(net) for n in part if len(part) > 1}
    assert all(
        a == b or {int(a), int(b)} & (cyclic | _after(net, cyclic)) for a, b in zip(src[~keep], dst[~keep], strict=True)
    )


def _after(net: networkx.DiGraph, nodes: set[int]) -> set[int]:
    return {d for n in nodes for d in networkx.descendants(net, n)}


def test_draft_becomes_a_graph_in_order() -> None:
    """Nodes are sorted so that edges lead forward, whatever order they were added in."""
    draft = Draft()
    late = draft.add_nodes(1, dur_ns=5, kind=int(NodeKind.KERNEL), name=draft.name("late"), start_ns=20, end_ns=25)
    early = draft.add_nodes(1, dur_ns=7, kind=int(NodeKind.HOST), name=draft.name("early"), start_ns=0, end_ns=7)
    draft.add_edges(early, late, 3, EdgeKind.LAUNCH, EdgeSource.RECORDED)

    graph, measured, dropped = finish(draft, draft.nodes(), draft.edges())

    assert ["early", "late"] == [graph.name_of(node) for node in range(2)]
    assert ([0, 20], 0) == (measured.start_ns.tolist(), dropped)
    assert ([0], [3]) == (graph.pred.tolist(), graph.lag_ns.tolist())


def test_unknown_columns_are_refused() -> None:
    """A misspelt column is a mistake, not a silent loss."""
    with pytest.raises(TypeError, match="durr"):
        Draft().add_nodes(1, durr=3)


def test_counting_sort_is_stable() -> None:
    """Positions of equal keys keep their order."""
    ptr, order = group_by(np.array([1, 0, 1, 2], np.int32), 3)

    assert ([0, 1, 3, 4], [1, 0, 2, 3]) == (ptr.tolist(), order.tolist())
