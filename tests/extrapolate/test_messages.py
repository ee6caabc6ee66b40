"""Messages between stages: when they move on gloo's connections, how long their sends take, and what a capture tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.rewrite.messages import SOCKET_BYTES, MessageTime, Streamed
from scaletrace.extrapolate.rewrite.pp import cut
from scaletrace.extrapolate.rewrite.schedules import build, message_delays
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, message_ns
from scaletrace.parse.graph import NodeKind
from scaletrace.replay.engine import replay
from tests.extrapolate.conftest import Layered, Stateful

Moves = dict[str, tuple[int, int]]


def moves(layered: Layered, schedule: str, time: MessageTime, ranks: int = 2) -> Moves:
    """The time that each side of each message of a small pipeline takes in its replay, by its name."""
    graph, anatomy = layered(4, 4)
    timeline = replay(cut(graph, anatomy, build(schedule, ranks, 4), time).graph)
    made = timeline.graph
    nodes = np.flatnonzero((made.kind == int(NodeKind.TRANSFER)) & (made.instance >= 0)).tolist()
    return {made.name_of(n): (int(timeline.start_ns[n]), int(timeline.end_ns[n])) for n in nodes}


def test_on_one_connection_the_rank_that_comes_later_sends_first(layered: Layered) -> None:
    """Stage 1 comes later to each exchange: what it sends arrives after 50 ns, what it gets another 50 ns later."""
    found = moves(layered, "1F1B", Streamed(lambda *_: 50))

    for back, forth in (("B0", "F1"), ("B1", "F2"), ("B2", "F3")):
        posted = found[f"1SEND_{back}"][0]

        assert (posted, posted + 50) == found[f"0RECV_{back}"]
        assert (posted + 50, posted + 50) == found[f"0SEND_{forth}"]
        assert (posted + 50, posted + 100) == found[f"1RECV_{forth}"]


def test_elsewhere_both_directions_move_at_once(layered: Layered) -> None:
    """Kernels of NCCL exchange both ways together, and hold their sender until the bytes are over."""
    found = moves(layered, "1F1B", lambda *_: 50)

    for back, forth in (("B0", "F1"), ("B1", "F2"), ("B2", "F3")):
        at = found[f"1SEND_{back}"]

        assert 50 == at[1] - at[0]
        assert {at} == {found[f"0RECV_{back}"], found[f"0SEND_{forth}"], found[f"1RECV_{forth}"]}


def test_messages_of_one_direction_wait_for_no_turn(layered: Layered) -> None:
    """GPipe's forward messages all go one way, so each begins as soon as it is posted on both sides."""
    found = moves(layered, "GPipe", Streamed(lambda *_: 5))

    assert all(found[f"0SEND_F{k}"][0] == found[f"1RECV_F{k}"][0] for k in range(4))
    assert all(5 == found[f"1RECV_F{k}"][1] - found[f"1RECV_F{k}"][0] for k in range(4))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_no_two_messages_meet_head_on_out_of_turn(layered: Layered, schedule: str, ranks: int) -> None:
    """A receive that is posted while its rank's own message is under way begins when that has arrived."""
    found = moves(layered, schedule, Streamed(lambda *_: 400), ranks)
    receives = {name: time for name, time in found.items() if "RECV" in name}

    for stage in range(ranks - 1):
        up = [time for name, time in receives.items() if name.startswith(f"{stage}RECV_B")]
        down = [time for name, time in receives.items() if name.startswith(f"{stage + 1}RECV_F")]

        assert 4 == len(up) == len(down)
        assert all(a[1] <= b[0] or b[1] <= a[0] for a in up for b in down)


@pytest.mark.parametrize(
    ("size_bytes", "sent_ns"), [(262_144, 0), (SOCKET_BYTES, 0), (2 * SOCKET_BYTES, 500), (4 * SOCKET_BYTES, 750)]
)
def test_a_send_lasts_until_the_system_holds_the_rest(size_bytes: int, sent_ns: int) -> None:
    """What fits into the socket's buffer is handed over at once; of more, all but that has to go first."""
    assert sent_ns == Streamed(lambda *_: 1000).sent_ns(size_bytes, 0, 1)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("LoopedBFS", 2), ("ZBVZeroBubble", 2),
     ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 3), ("DualPipeV", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
def test_messages_delay_the_step_as_often_as_the_closed_form_says(
    layered: Layered, schedule: str, chunks: int, ranks: int, batches: int
) -> None:
    """The step of equal stages grows by the messages that nothing hides when each is posted and awaited as in PyTorch."""
    graph, anatomy = layered(ranks * chunks, batches, forward_ns=100_000, launch_ns=0, gap_ns=0, optimizer_ns=0)
    layer = np.array([*anatomy.is_layer, False])[anatomy.unit]
    exact_ns = np.where(layer, anatomy.exact_ns, 0.0)
    equal = replace(graph, dur_ns=exact_ns.astype(np.int64), lag_ns=np.zeros_like(graph.lag_ns))
    program = build(schedule, ranks, batches, chunks)

    def step_ns(message_ns: int) -> int:
        made = cut(equal, replace(anatomy, exact_ns=exact_ns), program, lambda *_: message_ns)
        return replay(made.graph).makespan_ns

    assert message_delays(schedule, ranks, chunks, batches) * 100 == step_ns(100) - step_ns(0)


def recorded(state: State, dur_ns: list[int], backend: str) -> State:
    """A pipeline on a backend whose messages took these times in turn."""
    network = Network(replace(Cluster.load("dgx_h100"), backend=backend))
    graph = state.graph
    nodes = np.flatnonzero((graph.kind == int(NodeKind.TRANSFER)) & (graph.instance >= 0))
    exact = graph.dur_ns.copy()
    exact[nodes] = np.resize(dur_ns, len(graph.collectives))[graph.instance[nodes]]
    return replace(state, network=network, graph=replace(graph, dur_ns=exact))


def test_messages_that_stood_behind_others_do_not_count_as_long_ones(stateful: Stateful) -> None:
    """Half of gloo's messages took twice as long as one takes alone; of NCCL's the middle one counts."""
    state = pipeline(stateful(4, 4), 2)
    times = [10_000, 20_000, 10_000, 50_000]

    assert 10_000 == message_ns(recorded(state, times, "gloo"))(1024, 0, 1)
    assert 15_000 == message_ns(recorded(state, times, "nccl"))(1024, 0, 1)
