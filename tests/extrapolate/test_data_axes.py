"""Stretching dp, fsdp and HSDP: groups, strides, padding and classes change, nothing else does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.data import resize, sharded_elements
from scaletrace.extrapolate.rewrite.select import keep_ranks, real_ranks
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind

SHAPES = [(10, 3), (7,), (16, 4)]


def _graph(groups: list[GraphGroup], items: list[GraphCollective], ranks: int = 2) -> Graph:
    draft = Draft(groups=groups)
    before: list[list[int]] = [[] for _ in range(ranks)]
    for item in items:
        work = [[draft.node(NodeKind.KERNEL, 1000, rank=rank, after=before[rank])] for rank in range(ranks)]
        members = draft.collective(item.kind, item.group, 0, list(enumerate(work)), 500)
        draft.collectives[-1] = item
        before = [[node] for node in members]
    return draft.graph()


def _job(dp: int, fsdp: int) -> tuple[Graph, Layout]:
    layout = Layout(dp=dp, fsdp=fsdp)
    whole = 4 * sharded_elements(SHAPES, fsdp)
    groups = [GraphGroup("fsdp", fsdp, 1), GraphGroup("dp", dp, fsdp), GraphGroup("world", dp * fsdp, 1)]
    items = [
        GraphCollective("all_gather", 0, whole // fsdp, whole, "Float"),
        GraphCollective("reduce_scatter", 0, whole, whole // fsdp, "Float"),
        GraphCollective("all_reduce", 1, whole // fsdp, whole // fsdp, "Float"),
        GraphCollective("all_reduce", 2, 4, 4, "Float"),
    ]
    return _graph(groups, items), layout


def test_fsdp_pads_every_parameter_to_the_group() -> None:
    """FSDP2 gathers sum N · ceil(dim0 / N) · rest: 8 ranks pad 10 to 16, 7 to 8, and 16 not."""
    assert 16 * 3 + 8 + 16 * 4 == sharded_elements(SHAPES, 8)


def test_a_gather_that_fits_its_unit_gets_the_units_padding() -> None:
    """From 2 to 8 ranks the gather grows from 102 to 120 elements, the shard is an eighth, all-reduces follow."""
    graph, old = _job(1, 2)
    new = resize(graph, old, Layout(fsdp=8), [SHAPES])

    assert [GraphGroup("fsdp", 8, 1), GraphGroup("dp", 1, 8), GraphGroup("world", 8, 1)] == list(new.groups)
    assert [(60, 480), (480, 60)] == [(c.bytes_in, c.bytes_out) for c in new.collectives[:2]]


def test_without_shapes_the_whole_vector_keeps_its_bytes() -> None:
    """What was padded can't be known, so nothing is invented; the shard is rounded up."""
    graph, old = _job(1, 2)
    new = resize(graph, old, Layout(fsdp=16))

    whole = graph.collectives[0].bytes_out
    assert (-(-whole // 16), whole) == (new.collectives[0].bytes_in, new.collectives[0].bytes_out)


def test_hsdp_replicas_grow_and_shard_groups_stay() -> None:
    """From 2 x 4 to 16 x 4: gathers as before, the all-reduce over 16 ranks that stand 4 apart."""
    graph, old = _job(2, 4)
    new = resize(graph, old, Layout(dp=16, fsdp=4), [SHAPES])

    assert graph.collectives[:3] == new.collectives[:3]
    assert [(4, 1), (16, 4), (64, 1)] == [(group.size, group.stride) for group in new.groups]


def test_replicas_sum_what_a_shard_holds_at_its_new_size() -> None:
    """Over 4 instead of 2 ranks a shard has half the bytes (and padding), and so has its sum over replicas, not the loss."""
    graph, layout = _job(2, 2)
    new = resize(graph, layout, Layout(dp=2, fsdp=4), [SHAPES])
    scatter, across, loss = (new.collectives[at] for at in (1, 2, 3))

    assert 4 * sharded_elements(SHAPES, 4) // 4 == scatter.bytes_out == across.bytes_in == across.bytes_out
    assert (4, 4) == (loss.bytes_in, loss.bytes_out)
    assert graph.collectives == resize(new, Layout(dp=2, fsdp=4), layout, [SHAPES]).collectives


def test_strides_of_replicas_follow_growing_shards() -> None:
    """From 2 x 4 to 2 x 32 the two replicas of a shard stand 32 apart."""
    graph, old = _job(2, 4)
    new = resize(graph, old, Layout(dp=2, fsdp=32), [SHAPES])

    assert [(32, 1), (2, 32), (64, 1)] == [(group.size, group.stride) for group in new.groups]


def test_classes_stand_for_all_ranks() -> None:
    """Two measured ranks become classes of 3 and 2 where the new size is odd, and the sum is right."""
    graph, old = _job(1, 2)

    assert [3, 2] == sorted(resize(graph, old, Layout(fsdp=5)).multiplicity.tolist(), reverse=True)


def test_other_axes_are_refused() -> None:
    """Tensor parallel ranks do other work: this rewrite can't make them."""
    graph, old = _job(1, 2)
    with pytest.raises(UsageError, match=r"only dp and fsdp.*tp"):
        resize(graph, old, Layout(fsdp=2, tp=2))


def test_the_identity_rewrite_is_the_same_graph() -> None:
    """The same layout gives back the very object, so a replay has the same bits."""
    graph, old = _job(2, 4)
    assert resize(graph, old, replace(old)) is graph


degrees = st.sampled_from([(dp, fsdp) for dp in (1, 2, 3, 8) for fsdp in (1, 2, 4, 6)])


@settings(deadline=None)
@given(old=degrees, grow=st.tuples(st.integers(1, 64), st.integers(1, 64)), known=st.booleans())
def test_there_and_back_gives_the_same_bytes_groups_and_edges(
    old: tuple[int, int], grow: tuple[int, int], known: bool
) -> None:
    """N → N' → N returns the same graph, with or without knowing the shapes of parameters."""
    graph, layout = _job(*old)
    other = Layout(dp=layout.dp * grow[0], fsdp=layout.fsdp * grow[1])
    units = [SHAPES] if known else []
    there = resize(graph, layout, other, units)
    back = resize(there, other, layout, units)

    assert graph.groups == back.groups
    assert graph.collectives == back.collectives
    assert np.array_equal(graph.pred, back.pred) and np.array_equal(graph.dur_ns, back.dur_ns)


@settings(deadline=None)
@given(old=degrees, grow=st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_collectives_are_conserved(old: tuple[int, int], grow: tuple[int, int]) -> None:
    """As many collectives of each kind, every one in a group of the new size, bytes in and out in proportion."""
    graph, layout = _job(*old)
    new = resize(graph, layout, Layout(dp=layout.dp * grow[0], fsdp=layout.fsdp * grow[1]), [SHAPES])

    assert [item.kind for item in graph.collectives] == [item.kind for item in new.collectives]
    gather = new.collectives[0]
    assert new.groups[gather.group].size * gather.bytes_in == gather.bytes_out
    assert 4 * sharded_elements(SHAPES, new.groups[0].size) == gather.bytes_out


def test_keeping_ranks_keeps_their_nodes_and_edges() -> None:
    """The graph of one rank has its nodes, in order, and no edge from elsewhere."""
    graph, _ = _job(1, 2)
    one = keep_ranks(graph, [1])

    assert [1] == real_ranks(one)
    assert one.is_topological() and len(one) == int((graph.rank == 1).sum())
