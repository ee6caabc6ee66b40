"""From FSDP to HSDP: all-reduces over replicas behind every reduce-scatter, which cost nothing until there are replicas."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.rewrite.replicas import replicate
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay


def _job() -> Graph:
    """Two ranks that compute 100, scatter 50 behind it, and then step the optimizer for 10; twice."""
    draft = Draft(groups=[GraphGroup("fsdp", 2, 1)])
    before: list[list[int]] = [[], []]
    scattered: list[int | None] = [None, None]
    for _ in range(2):
        work = [draft.node(NodeKind.KERNEL, 100, rank=rank, after=before[rank]) for rank in (0, 1)]
        waits = [[w, *([s] if s is not None else [])] for w, s in zip(work, scattered, strict=True)]
        members = draft.collective("reduce_scatter", 0, 0, list(enumerate(waits)), 50)
        draft.collectives[-1] = GraphCollective("reduce_scatter", 0, 800, 400, "Float")
        scattered = list(members)
        before = [[w] for w in work]
    for rank in (0, 1):
        draft.node(NodeKind.KERNEL, 10, rank=rank, after=[before[rank][0], scattered[rank] or 0], name="adam")
    return draft.graph()


def test_one_replica_changes_no_time() -> None:
    """The all-reduces of one replica take nothing, so every old node keeps start and end."""
    graph = _job()
    new = replicate(graph)
    old, now = replay(graph), replay(new)
    kept = np.flatnonzero(new.instance < len(graph.collectives))

    assert new.is_topological()
    assert np.array_equal(old.start_ns, now.start_ns[kept]) and np.array_equal(old.end_ns, now.end_ns[kept])


def test_each_scatter_gets_an_all_reduce_of_its_shard() -> None:
    """Two scatters on two ranks: four all-reduces of 400 bytes, in a group of one that becomes the replicas."""
    new = replicate(_job())
    stretched = resize(new, Layout(fsdp=2), Layout(dp=16, fsdp=2))

    assert 4 * [GraphCollective("all_reduce", 1, 400, 400, "Float")] == list(new.collectives[2:])
    assert [GraphGroup("fsdp", 2, 1), GraphGroup("dp", 16, 2)] == list(stretched.groups)


def test_the_optimizer_waits_for_the_last_all_reduce() -> None:
    """With 30 ns an all-reduce, on a stream of its own: 100 + 100 + 50 + 30 before the optimizer's 10."""
    new = replicate(_job())
    added = (new.kind == NodeKind.TRANSFER) & (new.instance >= 2)

    assert 290 == replay(new, np.where(added, 30, new.dur_ns)).makespan_ns


def test_an_fsdp_capture_can_be_stretched_as_hsdp(samples: Path) -> None:
    """FSDP2 of 4 ranks at 4 x 16: dp communication appears, the shard groups stay, and what was added is counted."""
    curve = extrapolate(build(load(samples / "fsdp2_w4")), sizes=[4, 64], layout=Layout(fsdp=4))
    first, last = curve.points

    assert (Layout(fsdp=4), Layout(dp=16, fsdp=4)) == (first.layout, last.layout)
    assert 0.0 == first.exposed_by_axis["dp"] < last.exposed_by_axis["dp"]
    assert curve.health.guessed["all-reduces over replicas inserted behind reduce-scatters"] > 0


def test_the_optimizer_shrinks_with_the_shard(samples: Path) -> None:
    """Four times the shards leave a quarter of the optimizer's work and of copies into gathers; nothing else shrinks."""
    curve = extrapolate(build(load(samples / "fsdp2_w4")), sizes=[16])
    base = curve.base
    after = curve.timeline(16)
    was, now = base.spread_ns, after.end_ns - after.start_ns
    work = base.optimizer & (base.graph.kind == NodeKind.HOST)

    assert work.any() and now[work].sum() < was[work].sum()
    others = ~base.optimizer & ~base.copies.into & (base.graph.kind == NodeKind.HOST)
    assert np.array_equal(was[others], now[others])
