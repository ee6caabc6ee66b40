"""Our .pftrace files as Perfetto itself reads them."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphLane, Measured, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.replay.result import replay_job
from scaletrace.view.perfetto import PerfettoSink, write_timeline
from scaletrace.view.sink import Argument, Flow, Slices
from scaletrace.view.sql import VIEWS
from tests.view.conftest import Ask
from tests.view.graphs import Node, make_graph, make_longer, two_ranks

Oracle = Callable[[Path], Ask]
EPOCH_NS = 1_700_000_000_000_000_123


def test_counts_in_sql_are_the_counts_that_were_written(tmp_path: Path, oracle: Oracle) -> None:
    """Slices, arrows, processes and counter steps of the report are those that Perfetto finds."""
    timeline = replay(two_ranks())
    measured = Measured(timeline.start_ns, timeline.end_ns, np.ones(len(timeline.graph), np.bool_))
    path = critical_path(timeline)
    report = write_timeline(tmp_path / "t.pftrace", timeline, measured=measured, critical_path=path)
    ask = oracle(report.path)

    expected = (report.slices, report.flows, report.processes, report.counter_steps)
    assert expected == tuple(
        ask(sql)[0][0]
        for sql in (
            "select count(*) from slice",
            "select count(*) from flow",
            "select count(*) from process where pid > 0",
            "select count(*) from counter",
        )
    )
    assert report.size_bytes == report.path.stat().st_size


def test_the_path_may_belong_to_the_projected_timeline(tmp_path: Path, oracle: Oracle) -> None:
    """After a what-if the path is that of the changed run, and its arrows lead to the projected lanes."""
    before, after = replay(two_ranks()), replay(make_longer(two_ranks(), 500))
    report = write_timeline(tmp_path / "t.pftrace", before, projected=after, critical_path=critical_path(after))
    ask = oracle(report.path)
    both = "from flow join slice {0} on slice_out = {0}.id join slice {1} on slice_in = {1}.id"
    targets = {
        lane
        for ends in (("p", "s"), ("s", "p"))
        for (lane,) in ask(
            f"select t.name {both.format(*ends)} join track t on s.track_id = t.id where p.category = 'critical path'"
        )
    }

    assert targets == {"main (projected)", "stream 7 (projected)", "stream 20 (projected)"}
    assert ask("select sum(dur) from slice where category = 'critical path' and name like 'rank%'") == [(635,)]


def test_times_are_exact_to_the_nanosecond_since_the_epoch(tmp_path: Path, oracle: Oracle) -> None:
    """Timestamps are written from a base to stay short, and Perfetto puts the base back."""
    nodes = [
        Node(NodeKind.HOST, 0, "a", 7, release_ns=EPOCH_NS),
        Node(NodeKind.HOST, 0, "b", 2**40, release_ns=EPOCH_NS + 9),
    ]
    timeline = replay(make_graph([GraphLane(0, "main", False)], nodes, []))
    report = write_timeline(tmp_path / "t.pftrace", timeline)

    expected = [("a", EPOCH_NS, 7), ("b", EPOCH_NS + 9, 2**40)]
    assert expected == oracle(report.path)("select name, ts, dur from slice where category = 'host' order by ts")


def test_arguments_of_communication_can_be_asked_for(tmp_path: Path, oracle: Oracle) -> None:
    """Bytes, group, axis, wait and transfer of a member are debug arguments."""
    report = write_timeline(tmp_path / "t.pftrace", replay(two_ranks()))
    keys = ("bytes", "group", "axis", "ranks", "wait_ns", "transfer_ns", "collective")
    columns = ", ".join(f"extract_arg(arg_set_id, 'debug.{key}')" for key in keys)

    expected = [
        (3000, "data parallel", "dp", 2, 50, 30, "all_reduce"),
        (3000, "data parallel", "dp", 2, 0, 30, "all_reduce"),
    ]
    assert expected == oracle(report.path)(f"select {columns} from slice where category = 'comm' order by ts")


def test_arrows_lead_from_launch_to_kernel_to_collective(tmp_path: Path, oracle: Oracle) -> None:
    """Each arrow joins the two slices whose edge it draws."""
    report = write_timeline(tmp_path / "t.pftrace", replay(two_ranks()))
    sql = (
        "select o.name, i.name from flow join slice o on slice_out = o.id join slice i on slice_in = i.id order by 1, 2"
    )

    expected = [
        ("cudaLaunchKernel", "gemm"),
        ("cudaLaunchKernel", "gemm"),
        ("gemm", "ncclAllReduce"),
        ("gemm", "ncclAllReduce"),
        ("ncclAllReduce", "ncclAllReduce"),
    ]
    assert expected == oracle(report.path)(sql)


def test_ranks_and_lanes_keep_their_order(tmp_path: Path, oracle: Oracle) -> None:
    """Twelve ranks are listed by number although their slice counts differ, and stream 7 stands before stream 20."""
    lanes = [GraphLane(rank, name, name != "main") for rank in range(12) for name in ("stream 20", "main", "stream 7")]
    nodes = [
        Node(NodeKind.KERNEL if lane % 3 != 1 else NodeKind.HOST, lane, "x", 5, release_ns=10 * k)
        for lane in range(36)
        for k in range(1 + (lane * 7) % 5)
    ]
    report = write_timeline(tmp_path / "t.pftrace", replay(make_graph(lanes, nodes, [])), counters=False)
    ask = oracle(report.path)
    ordered = "include perfetto module viz.summary.track_event; select name from _track_event_tracks_ordered_groups"
    roots = ask(f"{ordered} where parent_id is null and name like 'rank%' order by order_id")
    first = ask(f"{ordered} where parent_id = (select id from track where name = 'rank 03') order by order_id")

    assert roots == [(f"rank {rank:02d}",) for rank in range(12)]
    assert first == [("main",), ("stream 7",), ("stream 20",)]


def test_hostile_names_arrive_harmless_and_whole(tmp_path: Path, oracle: Oracle) -> None:
    """HTML, quotes, control characters, NUL, a lone surrogate and 10,000 letters are names like any other."""
    names = [
        "<script>alert('1')</script>",
        'say "hi"; drop table slice',
        "a\0b\n\x1b[31m",
        "\ud800",
        "k" * 10_000,
        "é 火",
    ]
    nodes = [Node(NodeKind.HOST, 0, name, 5, release_ns=10 * i) for i, name in enumerate(names)]
    report = write_timeline(tmp_path / "t.pftrace", replay(make_graph([GraphLane(0, names[0], False)], nodes, [])))

    expected = [
        ("<script>alert('1')</script>",),
        ('say "hi"; drop table slice',),
        (r"a\x00b\n\x1b[31m",),
        (r"\ud800",),
        ("k" * 4096 + "… (10,000 characters)",),
        ("é 火",),
    ]
    assert expected == oracle(report.path)("select name from slice where category = 'host' order by ts")


def test_an_empty_timeline_is_a_valid_trace(tmp_path: Path, oracle: Oracle) -> None:
    """A graph without nodes gives a file that opens."""
    report = write_timeline(tmp_path / "t.pftrace", replay(make_graph([], [], [])))

    assert report.slices == 0
    assert oracle(report.path)("select count(*) from slice") == [(0,)]


def test_a_name_in_gz_is_compressed(tmp_path: Path, oracle: Oracle) -> None:
    """Perfetto opens the compressed file as it is."""
    plain = write_timeline(tmp_path / "t.pftrace", replay(two_ranks()))
    packed = write_timeline(tmp_path / "t.pftrace.gz", replay(two_ranks()))

    assert plain.path.read_bytes() == gzip.decompress(packed.path.read_bytes())
    assert oracle(packed.path)("select count(*) from slice") == [(packed.slices,)]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """When drawing fails half-way, the file of an earlier run stays as it was and no temporary file is left."""
    target = tmp_path / "t.pftrace"
    write_timeline(target, replay(two_ranks()))
    before = target.read_bytes()
    broken = replay(two_ranks())
    broken.graph.name[:] = 99
    with pytest.raises(IndexError):
        write_timeline(target, broken)

    assert before == target.read_bytes()
    assert [target] == list(tmp_path.iterdir())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**62),
            st.integers(0, 2**40),
            st.text(max_size=5),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
        ),
        max_size=8,
    )
)
def test_the_official_protobuf_reads_back_what_was_written(rows: list[tuple[int, int, str, int, float]]) -> None:
    """Any times, names and argument values survive, as Google's own parser reads them."""
    rows.sort(key=lambda row: (row[0], -row[1]))
    out = io.BytesIO()
    sink = PerfettoSink(out, 0)
    track = sink.track("t")
    n = len(rows)
    index = np.arange(n, dtype=np.int64)
    sink.slices(
        Slices(
            np.full(n, track, np.int64),
            np.array([row[0] for row in rows], np.int64),
            np.array([row[0] + row[1] for row in rows], np.int64),
            index,
            np.full(n, n, np.int64),
            [*("n" + row[2] for row in rows), "cat"],
            [
                Argument("i", index, np.array([row[3] for row in rows], np.int64)),
                Argument("f", index, np.array([row[4] for row in rows], np.float64)),
            ],
            Flow(index, index + 2**62),
        )
    )
    trace = Trace.FromString(out.getvalue())
    begins = [p for p in trace.packet if p.track_event.type == 1]
    ends = [p for p in trace.packet if p.track_event.type == 2]
    written = [
        (
            b.timestamp,
            e.timestamp - b.timestamp,
            b.track_event.debug_annotations[0].int_value,
            b.track_event.debug_annotations[1].double_value,
        )
        for b, e in zip(begins, ends, strict=True)
    ]

    assert written == [(row[0], row[1], row[3], row[4]) for row in rows]
    assert [list(b.track_event.flow_ids) for b in begins] == [[i + 2**62] for i in range(n)]


def test_counters_agree_with_the_breakdown_to_the_nanosecond(tmp_path: Path, samples: Path, oracle: Oracle) -> None:
    """Exposed and overlapped communication, summed in SQL, are the parts that the replay reports."""
    result = replay_job(build(load(samples / "ddp_straggler_w4")))
    report = write_timeline(tmp_path / "t.pftrace", result.timeline)
    ask = oracle(report.path)
    ask(VIEWS)
    sql = (
        "select rank, cast(sum(iif(name = 'overlap', 0, dur * value)) as int), "
        "cast(sum(iif(name = 'overlap', dur * value, 0)) as int) from st_counter "
        "where name in ('exposed communication', 'overlap') group by rank order by rank"
    )

    expected = [(part.rank, part.exposed_comm_ns, part.overlapped_comm_ns) for part in result.breakdown]
    assert expected == ask(sql)
