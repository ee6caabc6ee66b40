"""Which slices are drawn where: lanes, extra tracks, waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.parse.graph import GraphLane, NodeKind
from scaletrace.replay.engine import replay
from scaletrace.view.layout import arrival_of, lane_key, lay_out, split_crossing
from scaletrace.view.perfetto import variants_of, write_timeline
from tests.view.conftest import Ask
from tests.view.graphs import Node, ints, make_graph, two_ranks

Interval = tuple[int, int]


def fits(tracks: dict[int, list[Interval]], nests: bool) -> bool:
    """Whether on each track any two slices are apart or (where lanes nest) one holds the other."""
    for slices in tracks.values():
        for i, (a, b) in enumerate(slices):
            for c, d in slices[i + 1 :]:
                apart = c >= b or d <= a
                inside = nests and ((a <= c and d <= b) or (c <= a and b <= d))
                if not (apart or inside):
                    return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=14), st.booleans())
def test_slices_of_one_track_never_cross(spans: list[tuple[int, int]], nests: bool) -> None:
    """Whatever overlaps, each track is properly nested, or free of overlap on lanes that don't nest."""
    rows = sorted(((start, start + dur) for start, dur in spans), key=lambda row: (row[0], -row[1]))
    start, end = ints(*(row[0] for row in rows)), ints(*(row[1] for row in rows))
    level = split_crossing(np.zeros(len(rows), np.int64), start, end, np.array([nests]))
    tracks: dict[int, list[Interval]] = {}
    for row, track in zip(rows, level.tolist(), strict=True):
        tracks.setdefault(track, []).append(row)

    assert fits(tracks, nests)
    assert sorted(tracks) == list(range(len(tracks)))


def test_no_more_extra_tracks_than_slices_overlap() -> None:
    """Three slices at once on a stream need three tracks, and a fourth that comes later takes the first again."""
    level = split_crossing(ints(0, 0, 0, 0), ints(0, 1, 2, 10), ints(10, 11, 12, 12), np.array([False]))

    assert level.tolist() == [0, 1, 2, 0]


def test_more_than_sixty_four_slices_at_once_are_split_too() -> None:
    """The number of extra tracks is not bounded by a table's size."""
    n = 200
    level = split_crossing(np.zeros(n, np.int64), np.arange(n), np.arange(n) + n, np.array([False]))

    assert level.tolist() == list(range(n))


def test_members_know_when_they_arrived() -> None:
    """A transfer's slice begins at its own member's arrival, found by instance and rank."""
    graph = two_ranks()

    expected = {8: 3, 9: 7}
    assert expected == {node: int(at) for node, at in enumerate(arrival_of(graph)) if at >= 0}


def test_threads_come_before_streams_and_numbers_count_as_numbers() -> None:
    """Lanes sort alike on every rank: thread 2, thread 10, stream 7, stream 20."""
    lanes = [GraphLane(0, name, name[0] == "s") for name in ("stream 20", "thread 10", "stream 7", "thread 2")]

    expected = ["thread 2", "thread 10", "stream 7", "stream 20"]
    assert expected == [lane.name for lane in sorted(lanes, key=lane_key)]


@pytest.mark.parametrize("name", ["", "٣", "1" * 40, "a1b2c", "²"])
def test_odd_lane_names_have_a_place(name: str) -> None:
    """Digits of other scripts, endless numbers and empty names compare with all others."""
    odd, plain = lane_key(GraphLane(0, name, False)), lane_key(GraphLane(0, "thread 1", False))

    assert (odd < plain) != (plain < odd)


def test_only_known_nodes_are_drawn() -> None:
    """A node without a measured time has no slice, and edges to it find no row."""
    timeline = replay(two_ranks())
    variant = variants_of(timeline, None, None)[0]
    variant.known[2] = False
    rows = lay_out(variant)

    assert int(rows.row_of[2]) == -1
    assert len(rows) == 7


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_slices_come_back_from_perfetto_as_they_went_in(
    tmp_path: Path, oracle: Callable[[Path], Ask], seed: int
) -> None:
    """Crossing, nested, touching and empty slices keep their start and length, whatever track they are put on."""
    rng = np.random.default_rng(seed)
    lanes = [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)]
    nodes = [
        Node(NodeKind.HOST if lane == 0 else NodeKind.KERNEL, lane, f"n{i}", int(dur), release_ns=int(start))
        for i, (lane, start, dur) in enumerate(
            zip(rng.integers(0, 2, 300), rng.integers(0, 200, 300), rng.integers(0, 40, 300), strict=True)
        )
    ]
    timeline = replay(make_graph(lanes, nodes, []))
    report = write_timeline(tmp_path / "t.pftrace", timeline, counters=False)
    got = oracle(report.path)("select name, ts, dur from slice where category in ('host', 'kernel')")

    expected = sorted((node.name, node.release_ns, node.dur_ns) for node in nodes)
    assert expected == sorted(got)
