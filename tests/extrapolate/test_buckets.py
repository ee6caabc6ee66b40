"""Other bucket sizes: merged and split all-reduces, when they are ready, and what waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.rewrite.buckets import rebucket
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

WORK_NS, RATE = 100, 10.0


def cost_ns(item: GraphCollective) -> float:
    """20 ns and a nanosecond for each 10 bytes."""
    return 20 + item.bytes_in / RATE


def _job(buckets: int, size: int = 1000, kernels: int = 4) -> Graph:
    """Two ranks: `kernels` of 25 ns before each bucket of 1,000 bytes (120 ns), and an optimizer that awaits them all."""
    draft = Draft(groups=[GraphGroup("dp", 2, 1)])
    computed: list[list[int]] = [[], []]
    moved: list[list[int]] = [[], []]
    for _ in range(buckets):
        for rank in (0, 1):
            for _ in range(kernels):
                computed[rank] = [draft.node(NodeKind.KERNEL, WORK_NS // kernels, rank=rank, after=computed[rank])]
        arrivals = [(rank, [*computed[rank], *moved[rank][-1:]]) for rank in (0, 1)]
        nodes = draft.collective("all_reduce", 0, size, arrivals, 120)
        for rank, node in enumerate(nodes):
            moved[rank].append(node)
    for rank in (0, 1):
        draft.node(NodeKind.KERNEL, 10, rank=rank, after=[*computed[rank], *moved[rank]], name="sgd")
    return draft.graph()


def test_the_measured_size_changes_nothing() -> None:
    """A cap that every bucket fits alone, and no two together, gives back the same graph."""
    graph = _job(4)
    assert rebucket(graph, 1500, cost_ns) is graph


def test_merged_buckets_are_ready_with_their_last_part() -> None:
    """Four of 1,000 bytes become two of 2,000 (220 ns each), ready at 200 and 400; the second starts at 420."""
    graph = _job(4)
    merged = rebucket(graph, 2000, cost_ns)

    assert merged.is_topological()
    assert [2000, 2000] == [merged.collectives[i].bytes_in for i in sorted(set(merged.instance.tolist()) - {-1})]
    assert (100 + 4 * 120 + 10, 200 + 2 * 220 + 10) == (replay(graph).makespan_ns, replay(merged).makespan_ns)


def test_split_buckets_are_ready_with_their_share_of_the_work() -> None:
    """One of 1,000 in four of 250 (45 ns each): ready at 25, 50, 75 and 100, so that the last ends at 205."""
    graph = _job(1)
    split = rebucket(graph, 250, cost_ns)
    timeline = replay(split)
    arrivals = (split.kind == NodeKind.ARRIVE) & (split.rank == 0)

    assert [250] * 4 == [split.collectives[i].bytes_in for i in sorted(set(split.instance.tolist()) - {-1})]
    assert [25, 70, 115, 160] == timeline.start_ns[arrivals].tolist()
    assert 205 + 10 == timeline.makespan_ns


def test_bytes_are_conserved() -> None:
    """Whatever the cap, the new buckets carry what the old ones did."""
    graph = _job(5, size=1001)
    for cap in (1, 300, 1000, 1001, 2500, 10**6):
        new = rebucket(graph, cap, cost_ns) if cap > 1 else rebucket(graph, 7, cost_ns)
        carried = sum(new.collectives[i].bytes_in for i in set(new.instance.tolist()) - {-1})
        assert 5 * 1001 == carried


def test_a_bucket_of_nothing_is_refused() -> None:
    """Zero bytes hold no gradient."""
    with pytest.raises(UsageError, match="at least one byte"):
        rebucket(_job(1), 0, cost_ns)


def test_a_capture_can_be_stretched_with_other_buckets(samples: Path) -> None:
    """One bucket instead of two costs the overlap of the first; the collectives of a step are counted anew."""
    built = build(load(samples / "ddp_w4"))
    few, many = (extrapolate(built, sizes=[64], bucket_bytes=size).base.graph for size in (10**9, 200_000))

    assert 3 == len(set(few.instance.tolist()) - {-1})
    assert len(set(many.instance.tolist()) - {-1}) > 3 * 10
