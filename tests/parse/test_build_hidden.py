"""A collective that one rank's trace lacks is put back where the waits of the others show it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from scaletrace.replay.whatif import whatif
from tests.parse.jobs import Event, host, kernel, launch, loaded, nccl

LOST = 4


def stream_wait(ts: float) -> Event:
    """The call with which a stream waits for a collective."""
    return host("cudaStreamWaitEvent", ts, 1, cat="cuda_runtime")


def _rank(rank: int, late_us: float, lose: bool) -> list[Event]:
    """Eight all-reduces of 100 us, one every ms; before the fifth rank 2 computes `late_us`, and may lose its record."""
    events: list[Event] = []
    for turn in range(8):
        at = 1000.0 * turn
        busy = late_us if rank == 2 and turn == LOST else 50.0
        events += [launch(at, 100 + turn), kernel("gemm", at + 10, busy, 100 + turn, 7)]
        start = at + 10 + busy + 2
        end = at + 10 + (late_us if turn == LOST else 50.0) + 2 + 100
        found = nccl("AllReduce", at + 5, start, end, 200 + turn, Seq=turn, **{"Group size": 3})
        for event in found:
            if event["name"] == "record_param_comms":
                event["args"]["Process Group Ranks"] = "[0, 1, 2]"
        if not (lose and rank == 2 and turn == LOST):
            events += found
        events += [host("record_param_comms", at + 12, 3), stream_wait(at + 13)]
        events += [launch(at + 16, 300 + turn), kernel("add", end + 1, 20, 300 + turn, 7)]
    return sorted(events, key=lambda event: event["ts"])


def _built(folder: Path, lose: bool) -> Built:
    return build(loaded(folder, {rank: _rank(rank, 600.0, lose) for rank in range(3)}))


def test_lost_member_is_placed_and_counted(tmp_path: Path) -> None:
    """The others seem to transfer for 650 us: 100 are usual, so rank 2 arrived when its long kernel had ended."""
    built = _built(tmp_path / "lost", True)
    graph = built.graph
    hidden = np.flatnonzero(graph.edge_source == EdgeSource.HIDDEN)

    assert 1 == built.health.guessed["collectives that one rank's trace lacks, placed by the waits of the others"]
    lost = "collective without a record (inferred)"
    assert {("gemm", lost), (lost, "add")} == {
        (graph.name_of(int(graph.pred[edge])), graph.name_of(int(graph.edge_dst[edge]))) for edge in hidden
    }
    assert [EdgeKind.EVENT_WAIT] * 2 == graph.edge_kind[hidden].tolist()
    assert [2, 2] == graph.rank[graph.edge_dst[hidden]].tolist()


def test_what_awaited_the_lost_member_follows_it(tmp_path: Path) -> None:
    """Rank 2's next kernel started when the others ended: with another rank late it is late too, and nothing stalls."""
    built = _built(tmp_path / "lost", True)
    graph = built.graph
    early = [
        n for n in np.flatnonzero(graph.nodes(NodeKind.KERNEL)) if graph.rank[n] == 0 and graph.name_of(n) == "gemm"
    ]
    slower = graph.dur_ns.copy()
    slower[early[LOST]] += 1_000_000
    add = [n for n in np.flatnonzero(graph.nodes(NodeKind.KERNEL)) if graph.rank[n] == 2 and graph.name_of(n) == "add"]
    moved = replay(graph, slower).start_ns[add] - replay(graph).start_ns[add]

    assert moved[LOST] > 300_000
    assert 0 == built.quality.unexplained_stall_ns[2]


def test_waiting_for_the_lost_member_is_no_transfer(tmp_path: Path) -> None:
    """Durations and the answer to a what-if are those of the complete trace, within the gap that the record hid."""
    whole, lost = (_built(tmp_path / name, name == "lost") for name in ("whole", "lost"))
    moved = [int(b.graph.dur_ns[b.graph.nodes(NodeKind.TRANSFER)].max()) for b in (whole, lost)]
    faster = []
    for built in (whole, lost):
        graph = built.graph
        late = (graph.kind == NodeKind.KERNEL) & (graph.dur_ns > 500_000)
        end = replay(graph, np.where(late, 50_000, graph.dur_ns)).end_ns
        last = graph.nodes(NodeKind.TRANSFER) & (graph.rank == 0)
        faster.append(int(replay(graph).end_ns[last][LOST] - end[last][LOST]))

    assert moved[0] == 100_000
    assert abs(moved[1] - moved[0]) <= 5_000
    assert abs(faster[1] - faster[0]) <= 5_000


def test_complete_jobs_have_nothing_hidden(tmp_path: Path) -> None:
    """No edge of that source, and no count."""
    built = _built(tmp_path / "whole", False)

    assert not (built.graph.edge_source == EdgeSource.HIDDEN).any()
    assert not [what for what in built.health.guessed if "lacks" in what]


def _without_record(source: Path, target: Path, rank: int, correlation: int) -> Path:
    """The files of a job, of which one lacks the kernel of one launch."""
    target.mkdir()
    for trace in load(source).ranks:
        path = source / Path(trace.source).name
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        if trace.rank == rank:
            document["traceEvents"] = [
                event
                for event in document["traceEvents"]
                if event.get("cat") not in ("kernel", "Kernel") or event["args"].get("correlation") != correlation
            ]
        (target / path.name.removesuffix(".gz")).write_text(json.dumps(document))
    return target


def test_real_job_without_one_record_answers_like_the_whole_one(tmp_path: Path, shared_data: Path) -> None:
    """The all-to-all of torchrec2_v100 for which the other rank waited longest: slower links cost what they cost with it."""
    source = shared_data / "traces" / "torchrec2_v100"
    job = load(source)
    table = job.collectives
    waited = int(np.where(table.matched, table.wait_ns, -1).argmax())
    last = int(np.flatnonzero((table.instance == table.instance[waited]) & (table.rank != table.rank[waited]))[0])
    rank, events = int(table.rank[last]), job.rank(int(table.rank[last])).events
    lost = load(_without_record(source, tmp_path / "lost", rank, int(events.correlation[table.event[last]])))
    built = build(lost)
    whole, placed, bare = (
        whatif(graph, ["comm=3"], arbitrate=False).after.makespan_ns
        for graph in (build(job).graph, built.graph, built.graph.without(sources=[EdgeSource.HIDDEN]))
    )

    assert 1 == sum(n for what, n in built.health.guessed.items() if "lacks" in what)
    assert abs(placed - whole) < 50_000
    assert len(lost.collectives) == len(table) - 1
    assert bare <= placed
