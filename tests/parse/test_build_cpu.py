"""The graph of ranks without a device: issue, workers, rendezvous, release and waits of gloo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, NodeKind
from scaletrace.replay.accuracy import without_stalls
from scaletrace.replay.engine import replay
from tests.parse.traces import Event, edges, job_of, named, op

INFO = {"backend": "gloo", "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]}


def _rank(compute_us: float, until_us: float, worker: int = 300) -> list[Event]:
    """Compute, issue an all-reduce, wait for it (both ranks until `until_us`), compute 100 us more."""
    issue = 10 + compute_us
    return [
        op("aten::mm", 10, compute_us),
        op("c10d::allreduce_", issue, 20, **{"Input Dims": [[[100]]]}),
        op("gloo:all_reduce", issue + 30, until_us - issue - 30, tid=worker, cat="user_annotation"),
        op("aten::add", until_us + 10, 100),
    ]


@pytest.fixture
def pair(tmp_path: Path) -> Built:
    """Rank 1 computes 800 us longer; the all-reduce ends 200 us after it has arrived."""
    return build(job_of(tmp_path, _rank(200, 1240), _rank(1000, 1240)))


def test_both_ranks_meet(pair: Built) -> None:
    """The transfer starts when the late rank arrives, on both, and takes 200 us."""
    graph, timeline = pair.graph, replay(pair.graph)
    transfer = np.flatnonzero(graph.nodes(NodeKind.TRANSFER))

    assert [200_000, 200_000] == graph.dur_ns[transfer].tolist()
    assert [1_030_000, 1_030_000] == (timeline.start_ns[transfer] - timeline.origin_ns).tolist()
    assert 2 == int((graph.edge_kind == EdgeKind.RENDEZVOUS).sum())


def test_caller_is_released_by_the_worker(pair: Built) -> None:
    """What follows the wait starts after the transfer, not after the time that the wait took."""
    assert {("gloo:all_reduce", "wait for communication"), ("wait for communication", "aten::add")} & edges(pair)
    late = named(pair, "aten::mm")[np.argmax(pair.graph.dur_ns[named(pair, "aten::mm")])]
    faster = pair.graph.dur_ns.copy()
    faster[late] -= 500_000

    assert replay(pair.graph).makespan_ns - 500_000 == replay(pair.graph, faster).makespan_ns


def test_measured_times_come_back(pair: Built) -> None:
    """Identity, and here also in strict mode: nothing is left unexplained."""
    timeline = replay(pair.graph, without_stalls(pair.graph))

    assert pair.measured.end_ns.max() == timeline.end_ns.max()
    assert {0: 0, 1: 0} == pair.quality.unexplained_stall_ns


def test_a_late_rank_delays_the_other(pair: Built) -> None:
    """A delay on rank 1 reaches rank 0's last operator through the rendezvous."""
    graph = pair.graph
    slower = graph.dur_ns.copy()
    slower[[n for n in named(pair, "aten::mm") if graph.rank[n] == 1]] += 300_000
    last = [n for n in named(pair, "aten::add") if graph.rank[n] == 0]

    assert (replay(graph).start_ns[last] + 300_000).tolist() == replay(graph, slower).start_ns[last].tolist()


def test_early_release_keeps_a_negative_lag(tmp_path: Path) -> None:
    """Where the caller goes on before the recorded end of the span, it does so in the replay too, and it is counted."""
    early = _rank(1000, 2240)
    early[3] = op("aten::add", 1740, 900)
    built = build(job_of(tmp_path, early, _rank(1000, 2240)))

    assert 1 == built.health.guessed["waits released before the recorded end of their span"]
    assert built.measured.end_ns.max() == replay(built.graph).end_ns.max()


@pytest.mark.parametrize("off_us", [3000, -9800])
def test_after_a_long_wait_a_busy_host_may_be_milliseconds_off(tmp_path: Path, off_us: float) -> None:
    """60 ms of waiting that end 3 ms after the span or 9.8 ms before its end: a longer transfer still delays the caller."""
    until = 61_000
    rank = _rank(1000, until)
    rank[3] = op("aten::add", until + off_us, 100)
    built = build(job_of(tmp_path, rank, _rank(1000, until)))

    graph = built.graph
    longer = graph.dur_ns.copy()
    longer[graph.nodes(NodeKind.TRANSFER)] += 10_000_000
    last = [n for n in named(built, "aten::add") if graph.rank[n] == 0]
    assert (replay(graph).start_ns[last] + 10_000_000).tolist() == replay(graph, longer).start_ns[last].tolist()


def test_workers_take_works_in_order(tmp_path: Path) -> None:
    """The second work of a busy worker starts when the first has ended."""
    events = [
        op("c10d::allreduce_", 10, 5, **{"Input Dims": [[[100]]]}),
        op("c10d::allreduce_", 20, 5, **{"Input Dims": [[[100]]]}),
        op("gloo:all_reduce", 15, 300, tid=300, cat="user_annotation"),
        op("gloo:all_reduce", 316, 200, tid=300, cat="user_annotation"),
        op("aten::add", 530, 10),
    ]
    built = build(job_of(tmp_path, events))
    first, second = np.flatnonzero(built.graph.nodes(NodeKind.TRANSFER))
    faster = built.graph.dur_ns.copy()
    faster[first] -= 100_000

    assert replay(built.graph).start_ns[second] - 100_000 == replay(built.graph, faster).start_ns[second]


def test_a_rank_alone_is_a_chain_of_operators(tmp_path: Path) -> None:
    """Operators and the time between them, named, from the first to the last."""
    built = build(job_of(tmp_path, [op("aten::mm", 0, 10), op("aten::add", 15, 5)]))
    host = [built.graph.name_of(int(n)) for n in np.flatnonzero(built.graph.nodes(NodeKind.HOST))]

    assert ["aten::mm", "between operators", "aten::add"] == host
    assert 20_000 == replay(built.graph).makespan_ns


def test_an_empty_trace_has_an_empty_graph(tmp_path: Path) -> None:
    """Nothing to replay is said, not hidden."""
    built = build(job_of(tmp_path, [op("note", 0, 1, cat="Trace")]))

    assert 0 == len(built.graph)
    assert any("nothing to replay" in note for note in built.health.notes)


def test_hidden_send_takes_no_time_of_its_own(tmp_path: Path) -> None:
    """A send that the caller looked at long after it was done doesn't last until then: with a fast host the rest shrinks."""
    sender = [
        op("aten::mm", 10, 100),
        op("c10d::send", 120, 10, **{"Concrete Inputs": ["", "", "1", "0"]}),
        op("gloo:send", 125, 780, cat="user_annotation"),
        op("aten::mm", 140, 760),
        op("aten::add", 910, 10),
    ]
    receiver = [
        op("aten::mm", 10, 20),
        op("c10d::recv_", 40, 10, **{"Concrete Inputs": ["", "", "0", "0"]}),
        op("gloo:recv", 45, 155, cat="user_annotation"),
        op("aten::add", 210, 10),
    ]
    built = build(job_of(tmp_path, sender, receiver))
    graph = built.graph
    (send,) = (n for n in named(built, "gloo:send") if graph.kind[n] == NodeKind.TRANSFER)
    host = graph.nodes(NodeKind.HOST)
    faster = np.where(host, graph.dur_ns // 10, graph.dur_ns)

    assert graph.dur_ns[send] <= 80_000
    assert replay(graph, faster).makespan_ns < 250_000
    assert built.measured.end_ns.max() == replay(graph).end_ns.max()


def test_a_hidden_receive_takes_as_long_as_those_that_were_waited_for(tmp_path: Path) -> None:
    """How soon a send was handed to the system doesn't say when a receive had its bytes that was looked at late."""
    to, back = ({"Concrete Inputs": ["", "", peer, "0"]} for peer in ("1", "0"))
    first = [
        op("c10d::send", 20, 5, **to),
        op("gloo:send", 22, 30, cat="user_annotation"),
        op("c10d::recv_", 60, 5, **to),
        op("gloo:recv", 62, 838, cat="user_annotation"),
        op("aten::mm", 70, 825),
        op("aten::add", 905, 10),
    ]
    second = [
        op("c10d::recv_", 10, 2, **back),
        op("gloo:recv", 12, 88, cat="user_annotation"),
        op("c10d::send", 110, 2, **back),
        op("gloo:send", 112, 3, cat="user_annotation"),
        op("aten::add", 120, 10),
    ]
    built = build(job_of(tmp_path, first, second))
    graph = built.graph
    took = {
        int(graph.rank[n]): int(graph.dur_ns[n])
        for n in named(built, "gloo:recv")
        if graph.kind[n] == NodeKind.TRANSFER
    }

    assert {0: 78_000, 1: 78_000} == took


@pytest.mark.parametrize("own", ["Summed", "autograd::engine::evaluate_function: CopiedBackward"])
def test_a_function_of_the_users_own_may_wait_for_what_it_issued(tmp_path: Path, own: str) -> None:
    """A tensor-parallel function that calls a blocking collective waits in it: its time follows the late rank's."""
    ranks = []
    for compute_us in (200, 1000):
        events = _rank(compute_us, 1240)
        ranks.append([*events[:1], op(own, 10 + compute_us, 1232 - compute_us), *events[1:]])
    built = build(job_of(tmp_path, *ranks))
    late = named(built, "aten::mm")[np.argmax(built.graph.dur_ns[named(built, "aten::mm")])]
    faster = built.graph.dur_ns.copy()
    faster[late] -= 500_000

    assert replay(built.graph).makespan_ns - 500_000 == replay(built.graph, faster).makespan_ns


@pytest.mark.parametrize("thread", [100, 300])
def test_a_moment_alone_has_a_graph(tmp_path: Path, thread: int) -> None:
    """One span of no length is all there is: two nodes of the work and where it comes from, and no endless search."""
    built = build(job_of(tmp_path, [op("gloo:all_reduce", 5, 0, tid=thread, cat="user_annotation")]))

    assert 0 == replay(built.graph).makespan_ns
    assert 1 == int(built.graph.nodes(NodeKind.TRANSFER).sum())
