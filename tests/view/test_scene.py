"""The event stream of small graphs, exactly as it is drawn."""

from __future__ import annotations

import io
import textwrap

import numpy as np

from scaletrace.parse.graph import NO_RELEASE, EdgeKind, GraphLane, Measured, NodeKind
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.view.path import Path, path_of
from scaletrace.view.perfetto import variants_of
from scaletrace.view.scene import Scene
from scaletrace.view.text import TextSink
from tests.view.graphs import Node, make_graph, two_ranks


def stream(*args: object, path: Path | None = None, ranks: list[int] | None = None, counters: bool = True) -> str:
    out = io.StringIO()
    Scene(TextSink(out), counters).draw(list(args), path, ranks)  # type: ignore[arg-type]
    return out.getvalue()


def test_two_ranks_meet_in_an_all_reduce() -> None:
    """A group a rank, lanes in order, counters, launch and wait arrows, one arrow between the members that meet."""
    expected = textwrap.dedent("""\
        track 1 #0 Job
        track 2 #2 Job/Steps
        slice 2 1000..1135 step 0 (step)
        process 1 rank 0
        track 3 #0 rank 00
        track 4 #0 rank 00/main
        track 5 #1 rank 00/stream 7
        track 6 #2 rank 00/stream 20
        track 7 #3 rank 00/exposed communication [0 or 1]
        counter 7 1015:0 1055:1 1135:0
        track 8 #4 rank 00/overlap [0 or 1]
        counter 8 1015:0
        track 9 #5 rank 00/queue depth [kernels]
        counter 9 1015:0
        track 10 #6 rank 00/link throughput [GB/s]
        counter 10 1105:100 1135:0
        process 2 rank 1
        track 11 #0 rank 01
        track 12 #0 rank 01/main
        track 13 #1 rank 01/stream 7
        track 14 #2 rank 01/stream 20
        track 15 #3 rank 01/exposed communication [0 or 1]
        counter 15 1015:0 1105:1 1135:0
        track 16 #4 rank 01/overlap [0 or 1]
        counter 16 1015:0
        track 17 #5 rank 01/queue depth [kernels]
        counter 17 1015:0
        track 18 #6 rank 01/link throughput [GB/s]
        counter 18 1105:100 1135:0
        slice 4 1000..1010 aten::mm (host) node=0 step=0
        slice 4 1010..1015 cudaLaunchKernel (launch) ~1 node=1 step=0
        slice 5 1015..1055 gemm (kernel) ~2 ~1 node=2 step=0
        slice 6 1055..1135 ncclAllReduce (comm) ~2 ~5 node=8 step=0 collective=all_reduce instance=0 bytes=3000 group=data parallel axis=dp ranks=2 wait_ns=50 transfer_ns=30
        slice 12 1000..1010 aten::mm (host) node=4 step=0
        slice 12 1010..1015 cudaLaunchKernel (launch) ~3 node=5 step=0
        slice 13 1015..1105 gemm (kernel) ~4 ~3 node=6 step=0
        slice 14 1105..1135 ncclAllReduce (comm) ~4 ~5 node=9 step=0 collective=all_reduce instance=0 bytes=3000 group=data parallel axis=dp ranks=2 wait_ns=0 transfer_ns=30
        """)
    timeline = replay(two_ranks())

    assert expected == stream(*variants_of(timeline, None, None))


def test_the_critical_path_points_at_the_slices_it_stands_for() -> None:
    """Each piece says what it is and what it waited for, and has an arrow to its slice; the second track joins the kinds."""
    timeline = replay(two_ranks())
    lines = stream(
        *variants_of(timeline, None, None), path=path_of(critical_path(timeline)), counters=False
    ).splitlines()

    expected = [
        "slice 1 1000..1010 rank 1: aten::mm (critical path) ~1 what=host why=after start of the window node=4 rank=1 lane=rank 1 main",
        "slice 1 1010..1015 rank 1: cudaLaunchKernel (critical path) ~2 what=host why=after program order node=5 rank=1 lane=rank 1 main",
        "slice 1 1015..1105 rank 1: gemm (critical path) ~3 what=compute why=after launch latency node=6 rank=1 lane=rank 1 stream 7",
        "slice 1 1105..1135 rank 0: ncclAllReduce (critical path) ~4 what=communication why=after rendezvous node=8 rank=0 lane=rank 0 stream 20",
    ]
    assert expected == [line for line in lines if line.startswith("slice 1 ")]
    assert [line.split(" (")[0] for line in lines if line.startswith("slice 2 ")] == [
        "slice 2 1000..1015 host",
        "slice 2 1015..1105 compute",
        "slice 2 1105..1135 communication",
    ]
    for flow, node in ((3, 6), (4, 8)):
        assert any(f"~{flow} node={node}" in line for line in lines), f"no arrow to node {node}"


def test_gaps_of_the_critical_path_are_pieces_with_a_reason() -> None:
    """A lag between two nodes is drawn where it lies, named by its edge; it stands for no slice and has no arrow."""
    graph = make_graph(
        [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)],
        [Node(NodeKind.LAUNCH, 0, "launch", 5, release_ns=0), Node(NodeKind.KERNEL, 1, "gemm", 20)],
        [(0, 1, EdgeKind.LAUNCH)],
    )
    graph.lag_ns[0] = 7
    timeline = replay(graph)
    lines = stream(
        *variants_of(timeline, None, None), path=path_of(critical_path(timeline)), counters=False
    ).splitlines()

    expected = "slice 1 5..12 gap: launch latency (critical path) what=gap: launch latency why=after launch latency"
    assert expected == next(line for line in lines if "5..12" in line)


def test_pieces_of_the_path_never_overlap() -> None:
    """Where a node starts before its predecessor ends, the pieces still lie end to end over the whole length."""
    graph = make_graph(
        [GraphLane(0, "stream 7", True)],
        [Node(NodeKind.KERNEL, 0, name, 20, release_ns=100 if name == "a" else NO_RELEASE) for name in "abc"],
        [(0, 1, EdgeKind.STREAM), (1, 2, EdgeKind.STREAM)],
    )
    graph.lag_ns[:] = (-5, 3)
    path = path_of(critical_path(replay(graph)))

    expected = [(100, 115), (115, 135), (135, 138), (138, 158)]
    assert expected == list(zip(path.start_ns.tolist(), path.end_ns.tolist(), strict=True))


def test_measured_lanes_stand_beside_the_replayed_ones() -> None:
    """Each measured lane follows the replayed lane of the same name, and unmeasured nodes are not drawn."""
    timeline = replay(two_ranks())
    known = np.ones(len(timeline.graph), np.bool_)
    known[[1, 5]] = False
    measured = Measured(timeline.start_ns + 3, timeline.end_ns + 3, known)
    lines = stream(*variants_of(timeline, measured, None), counters=False).splitlines()

    expected = ["main", "main (measured)", "stream 7", "stream 7 (measured)", "stream 20", "stream 20 (measured)"]
    assert expected == [line.split("rank 00/")[1] for line in lines if "rank 00/" in line]
    assert sum("cudaLaunchKernel" in line for line in lines) == 2


def test_a_projected_timeline_begins_where_the_replayed_one_does() -> None:
    """Another graph's timeline is moved to the same origin, so that the two can be compared by eye."""
    timeline = replay(two_ranks())
    later = replay(make_graph([GraphLane(0, "main", False)], [Node(NodeKind.HOST, 0, "a", 7, release_ns=5000)], []))
    lines = stream(*variants_of(timeline, None, later), counters=False).splitlines()

    expected = ["1000..1007"]
    assert expected == [line.split()[2] for line in lines if " a (host)" in line]


def test_a_rank_selection_drops_the_others_and_their_arrows() -> None:
    """With one rank selected there is one process, and no arrow leads to a rank that is not drawn."""
    text = stream(*variants_of(replay(two_ranks()), None, None), ranks=[1], counters=False)

    assert "rank 00" not in text
    assert text.count("~") == 4, "launch and event wait inside rank 1, two ends each"


def test_crossing_slices_go_to_extra_tracks_and_nested_ones_stay() -> None:
    """On a thread a slice inside another nests; on a stream every overlap gets a track of its own."""
    lanes = [GraphLane(0, "main", False), GraphLane(0, "stream 7", True)]
    nodes = [
        Node(NodeKind.HOST, 0, "outer", 100, release_ns=0),
        Node(NodeKind.HOST, 0, "inner", 50, release_ns=10),
        Node(NodeKind.HOST, 0, "crossing", 80, release_ns=40),
        Node(NodeKind.KERNEL, 1, "first", 100, release_ns=0),
        Node(NodeKind.KERNEL, 1, "inside", 50, release_ns=10),
        Node(NodeKind.KERNEL, 1, "after", 50, release_ns=100),
    ]
    lines = stream(*variants_of(replay(make_graph(lanes, nodes, [])), None, None), counters=False).splitlines()
    track_of = {
        line.split()[3]: line.split()[1] for line in lines if line.startswith("slice") and "step" not in line[:30]
    }
    names = {line.split()[1]: line.split("/", 1)[1] for line in lines if line.startswith("track") and "/" in line}

    expected = {
        "outer": "main",
        "inner": "main",
        "crossing": "main (2)",
        "first": "stream 7",
        "inside": "stream 7 (2)",
        "after": "stream 7",
    }
    assert expected == {name: names[track] for name, track in track_of.items() if name in expected}


def test_an_arrow_that_would_point_back_in_time_is_left_out_and_counted() -> None:
    """A measured kernel that "starts" before its launch gets no arrow, and the report says so."""
    timeline = replay(two_ranks())
    start, end = timeline.start_ns.copy(), timeline.end_ns.copy()
    start[2] -= 30
    variants = variants_of(timeline, Measured(start, end, np.ones(len(start), np.bool_)), None)
    drawn = Scene(TextSink(io.StringIO()), counters=False).draw(variants[1:], None, None)

    assert drawn.flows_backward == 1
    assert drawn.flows == 4


def test_names_cannot_forge_lines() -> None:
    """Line breaks, escapes and markup in names stay inside their line."""
    hostile = 'x\nslice 9 0..9 forged (host)\x1b[2J\x00"<script>alert(1)</script>'
    graph = make_graph([GraphLane(0, hostile, False)], [Node(NodeKind.HOST, 0, hostile, 5, release_ns=0)], [])
    text = stream(*variants_of(replay(graph), None, None), counters=False)

    assert len(text.splitlines()) == 7
    assert "\x1b" not in text and "\x00" not in text
