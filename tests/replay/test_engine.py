"""The engine gives the times of the ten-line reference, in one column or many, and the same ones every time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.engine import replay, replay_columns
from scaletrace.replay.reference import reference
from tests.replay.graphs import graph_of, two_ranks


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any small DAG with lags of both signs and releases."""
    n = draw(st.integers(1, 12))
    nodes = [("n", NodeKind.KERNEL, 0, 0, draw(st.integers(0, 50))) for _ in range(n)]
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.integers(-20, 20))
    drawn = draw(st.lists(pairs, max_size=20))
    edges = [(min(a, b), max(a, b), lag, EdgeKind.STREAM) for a, b, lag in drawn if a != b]
    release = {at: draw(st.integers(0, 100)) for at in draw(st.lists(st.integers(0, n - 1), max_size=3))}
    return graph_of(nodes, edges, release=release)


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_sweep_equals_reference(graph: Graph) -> None:
    """Start, end and binding predecessor are those of the plain loop."""
    found = replay(graph)

    assert reference(graph) == (found.start_ns.tolist(), found.end_ns.tolist(), found.binding.tolist())


@given(graphs(), st.lists(st.integers(0, 3), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_columns_equal_single_replays(graph: Graph, factors: list[int]) -> None:
    """K columns in one sweep are K single sweeps."""
    columns = np.stack([graph.dur_ns * factor for factor in factors], axis=1)

    together = replay_columns(graph, columns)

    for at, factor in enumerate(factors):
        assert replay(graph, graph.dur_ns * factor).end_ns.tolist() == together[:, at].tolist()


@given(graphs(), st.integers(0, 11), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_makespan_grows_with_every_duration(graph: Graph, node: int, more: int) -> None:
    """No node ends earlier when one takes longer."""
    longer = graph.dur_ns.copy()
    longer[node % len(graph)] += more

    assert bool(np.all(replay(graph, longer).end_ns >= replay(graph).end_ns))


def test_rendezvous_waits_for_the_late_rank() -> None:
    """A transfer starts when the last member has arrived, on all members."""
    found = replay(two_ranks(late_ns=50))

    assert [166, 166] == found.start_ns[[6, 7]].tolist()
    assert [116, 166] == found.end_ns[[4, 5]].tolist()
    assert 237 == found.makespan_ns


def test_node_without_predecessor_starts_at_the_origin() -> None:
    """A node that nothing precedes starts with the earliest release, not at zero."""
    graph = graph_of([("a", NodeKind.HOST, 0, 0, 5), ("b", NodeKind.HOST, 0, 0, 7)], [], release={0: 1000})

    assert [1000, 1000] == replay(graph).start_ns.tolist()


def test_ready_kernel_waits_for_a_full_device() -> None:
    """With arbitration a kernel of another stream starts when the kernel that fills the device ends."""
    nodes = [
        ("host", NodeKind.HOST, 0, 0, 10),
        ("big", NodeKind.KERNEL, 0, 1, 100),
        ("host", NodeKind.HOST, 0, 0, 10),
        ("small", NodeKind.KERNEL, 0, 2, 20),
    ]
    edges = [(0, 1, 0, EdgeKind.LAUNCH), (0, 2, 0, EdgeKind.PROGRAM), (2, 3, 0, EdgeKind.LAUNCH)]
    graph = dataclasses.replace(graph_of(nodes, edges, release={0: 0}), blocks=np.array([0, 500, 0, 1], np.int32))

    assert 20 == replay(graph).start_ns[3]
    assert 110 == replay(graph, arbitrate=True).start_ns[3]


def test_durations_must_fit() -> None:
    """Durations of another graph are refused by name of their shape."""
    with pytest.raises(UsageError, match=r"\(3,\).*10 nodes"):
        replay(two_ranks(), np.zeros(3, np.int64))
    with pytest.raises(UsageError, match=r"\(n, K\)"):
        replay_columns(two_ranks(), np.zeros(10, np.int64))
