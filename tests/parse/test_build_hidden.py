"""A collective that one rank's trace lacks is put back where the waits of the others show it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, EdgeSource, NodeKind
from scaletrace.replay.engine import replay
from tests.parse.jobs import Event, kernel, launch, loaded, nccl

LOST = 4


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
    return sorted(events, key=lambda event: event["ts"])


def _built(folder: Path, lose: bool) -> Built:
    return build(loaded(folder, {rank: _rank(rank, 600.0, lose) for rank in range(3)}))


def test_lost_member_is_placed_and_counted(tmp_path: Path) -> None:
    """The others seem to transfer for 650 us: 100 are usual, so rank 2 arrived when its long kernel had ended."""
    built = _built(tmp_path / "lost", True)
    graph = built.graph
    hidden = np.flatnonzero(graph.edge_source == EdgeSource.HIDDEN)

    assert 1 == built.health.guessed["collectives that one rank's trace lacks, placed by the waits of the others"]
    assert ["gemm"] == [graph.name_of(int(graph.pred[edge])) for edge in hidden]
    assert [EdgeKind.EVENT_WAIT] == graph.edge_kind[hidden].tolist()
    assert [2] == graph.rank[graph.edge_dst[hidden]].tolist()


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
