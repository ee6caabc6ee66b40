"""Pipelines: bubbles in closed form, cutting a measured graph, and getting it back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.pipeline_log import measured_program, predict, read_pipeline_log, stage_times
from scaletrace.extrapolate.rewrite.pp import cut, pipeline_graph, split_units, template
from scaletrace.extrapolate.rewrite.schedules import Action, Op, bubble_units, build
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.parse.graph import EdgeKind, Graph, NodeKind
from scaletrace.replay.engine import replay

Layered = Callable[..., tuple[Graph, Anatomy]]


def free(size_bytes: int, src: int, dst: int) -> int:
    """A message that takes no time."""
    return 0


def equal_stages(action: Action) -> int:
    """Forward 100, backward 200, in two halves where it is split."""
    return {Op.FORWARD: 100, Op.BACKWARD: 200}.get(action.op, 100)


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [
        *((name, p, m, 1) for name in ("GPipe", "1F1B") for p in (1, 2, 4, 8) for m in (1, 3, 8, 16)),
        *((name, p, m, v) for name in ("Interleaved1F1B", "LoopedBFS") for p, m in ((2, 4), (4, 8), (8, 16))
          for v in (2, 4)),
        *((name, p, m, 2) for name in ("ZBVZeroBubble", "DualPipeV") for p, m in ((2, 4), (4, 8), (8, 24))),
        *(("InterleavedZeroBubble", p, m, v) for p, m in ((2, 4), (4, 8), (8, 16)) for v in (1, 2, 4)),
    ],
)  # fmt: skip
def test_the_bubble_of_equal_stages_is_the_closed_form(schedule: str, p: int, m: int, v: int) -> None:
    """(p - 1) forwards and backwards of one chunk are idle, or forwards alone where weight gradients fill the rest."""
    makespan = replay(pipeline_graph(build(schedule, p, m, v), equal_stages, free)).makespan_ns

    assert round((m * v + bubble_units(schedule, p)) * 300) == makespan


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_zbv_leaves_no_gap_inside_a_ranks_step(p: int, m: int) -> None:
    """With F = I = W every rank of ZBV works from its first to its last action without a pause."""
    timeline = replay(pipeline_graph(build("ZBVZeroBubble", p, m, 2), equal_stages, free))
    for rank in range(p):
        mine = timeline.graph.rank == rank
        span = int(timeline.end_ns[mine].max() - timeline.start_ns[mine].min())

        assert int(timeline.graph.dur_ns[mine].sum()) == span


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 50), min_size=4, max_size=4))
@settings(max_examples=40, deadline=None)
def test_a_pipeline_is_never_faster_than_its_busiest_rank_nor_than_one_micro_batch(
    p: int, m: int, times: list[int]
) -> None:
    """Two lower bounds hold for any stage times."""
    graph = pipeline_graph(build("1F1B", p, m), lambda a: times[a.stage] * (1 if a.op is Op.FORWARD else 2), free)
    makespan = replay(graph).makespan_ns

    assert makespan >= max(times[:p]) * 3 * m
    assert makespan >= 3 * sum(times[:p])


def test_messages_delay_every_hop_once_when_nothing_hides_them() -> None:
    """One micro batch through p stages pays 2 (p - 1) messages."""
    graph = pipeline_graph(build("1F1B", 4, 1), equal_stages, lambda size, src, dst: 7)

    assert 4 * 300 + 6 * 7 == replay(graph).makespan_ns


def comparable(graph: Graph, origin: np.ndarray) -> tuple[dict[int, tuple[object, ...]], list[tuple[int, ...]]]:
    """Nodes and edges under the numbers of the first graph."""
    lanes = [lane.name for lane in graph.lanes]
    nodes = {
        int(o): (
            int(graph.dur_ns[v]), int(graph.kind[v]), graph.name_of(v), int(graph.rank[v]), lanes[graph.lane[v]],
            int(graph.step[v]), int(graph.event[v]), int(graph.release_ns[v]),
        )
        for v, o in enumerate(origin)
    }  # fmt: skip
    edges = zip(graph.pred, graph.edge_dst, graph.lag_ns, graph.edge_kind, strict=True)
    return nodes, sorted((int(origin[u]), int(origin[w]), int(lag), int(kind)) for u, w, lag, kind in edges)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_cutting_into_k_stages_and_back_gives_the_same_graph(layered: Layered, k: int, schedule: str) -> None:
    """1 → k → 1 returns every node with every duration, and every edge with every lag."""
    graph, anatomy = layered(4, 3, steps=2)
    there = cut(graph, anatomy, build(schedule, k, 3), lambda size, src, dst: 50)
    back = cut(there.graph, there.anatomy, build("1F1B", 1, 3), free, columns=[list(range(k))])
    expected = comparable(graph, np.arange(len(graph)))

    assert expected == comparable(back.graph, there.origin[back.origin])
    assert replay(graph).makespan_ns == replay(back.graph).makespan_ns


def test_a_cut_graph_replays_to_its_schedule(layered: Layered) -> None:
    """Free host and messages: the step is (m + p - 1) of the slowest stage plus the optimizer's share."""
    graph, anatomy = layered(4, 8, launch_ns=0, gap_ns=0, optimizer_ns=1000)
    made = cut(graph, anatomy, build("1F1B", 2, 8), free)
    slow = 2 * 100 + 10
    # launches cost nothing; each stage has two layers and one end (a tenth of a layer), and half of the parameters
    expected = (8 + 1) * 3 * slow + 500

    assert expected == pytest.approx(replay(made.graph).makespan_ns, abs=2)


def test_stages_exchange_one_message_a_micro_batch_and_direction(layered: Layered) -> None:
    """Sends are counted by the schedule, with the measured bytes and the pipeline's group."""
    graph, anatomy = layered(4, 8)
    made = cut(graph, anatomy, build("1F1B", 4, 8), free)
    sends = [item for item in made.graph.collectives if item.kind == "send"]

    assert 2 * 3 * 8 == len(sends)
    assert {1024} == {item.bytes_in for item in sends}
    assert {("pp", 4, 1)} == {(g.axis, g.size, g.stride) for g in (made.graph.groups[i.group] for i in sends)}


def test_1f1b_pays_every_message_of_its_steady_state(layered: Layered) -> None:
    """A receive is posted when it is needed, batched with a send, and both are waited for: nothing hides a message."""
    graph, anatomy = layered(2, 4, launch_ns=0, gap_ns=0, optimizer_ns=0)
    made = cut(graph, anatomy, build("1F1B", 2, 4), lambda size, src, dst: 10)
    forward, backward, message = 110, 220, 10
    # fill, four rounds on the last rank with a message between them, drain
    expected = forward + message + 4 * (forward + backward) + 3 * message + message + backward

    assert expected == pytest.approx(replay(made.graph).makespan_ns, abs=1)


def test_gpipe_pays_every_message_on_its_receiver(layered: Layered) -> None:
    """A receive is posted only when it is needed, so each pass waits for its own message, though no send is waited for."""
    graph, anatomy = layered(2, 3, launch_ns=0, gap_ns=0, optimizer_ns=0)
    made = cut(graph, anatomy, build("GPipe", 2, 3), lambda size, src, dst: 10)
    forward, backward, message = 110, 220, 10
    expected = forward + 3 * (message + forward) + backward + 3 * (message + backward)

    assert expected == pytest.approx(replay(made.graph).makespan_ns, abs=1)


def test_looped_bfs_on_one_chunk_costs_what_gpipe_does(layered: Layered) -> None:
    """PyTorch's lowering posts a receive when its sender has run in lock step, which is no earlier than GPipe does."""
    graph, anatomy = layered(2, 3, launch_ns=0, gap_ns=0, optimizer_ns=0)
    steps = [
        replay(cut(graph, anatomy, build(name, 2, 3), lambda size, src, dst: 10).graph).makespan_ns
        for name in ("GPipe", "LoopedBFS")
    ]

    assert steps[0] == steps[1]


def test_interleaved_chunks_send_around_the_ring(layered: Layered) -> None:
    """With two chunks a rank the last rank sends to the first, so 2 (p v - 1) messages a micro batch."""
    graph, anatomy = layered(4, 4)
    made = cut(graph, anatomy, build("Interleaved1F1B", 2, 4, 2), free)

    assert 2 * 3 * 4 == sum(item.kind == "send" for item in made.graph.collectives)


def test_data_parallel_columns_keep_their_collectives_within_a_stage(layered: Layered) -> None:
    """DDP over two ranks cut into two stages: each layer's all-reduce joins the two ranks of its stage and no other."""
    graph, anatomy = layered(4, 2, ranks=2, reduce_ns=30)
    made = cut(graph, anatomy, build("1F1B", 2, 2), free)
    arrive = np.flatnonzero((made.graph.kind == int(NodeKind.ARRIVE)) & ~made.anatomy.is_message)
    members: dict[int, list[int]] = {}
    for node in arrive.tolist():
        members.setdefault(int(made.graph.instance[node]), []).append(int(made.graph.rank[node]))

    assert [[0, 1], [0, 1], [2, 3], [2, 3]] == sorted(sorted(ranks) for ranks in members.values())
    assert 4 == sum(item.kind == "all_reduce" for item in made.graph.collectives)
    rendezvous = made.graph.edge_kind == int(EdgeKind.RENDEZVOUS)
    # each of the four reductions joins two ranks, each of the eight messages both of its sides
    assert 4 * 2 + 2 * (2 * 2 * 2) == int(rendezvous.sum())


def test_an_interrupted_piece_stays_in_order(layered: Layered) -> None:
    """Work of the first micro batch that ran between the second's (a shared slice's gradient) is laid in one stretch,
    and no thread or stream falls apart."""
    graph, anatomy = layered(2, 2)
    late = np.flatnonzero((anatomy.phase == int(Phase.BACKWARD)) & (anatomy.micro_batch == 1) & (anatomy.unit == 2))
    micro = anatomy.micro_batch.copy()
    micro[late], unit = 0, anatomy.unit.copy()
    unit[late] = 0
    made = cut(graph, replace(anatomy, micro_batch=micro, unit=unit), build("1F1B", 1, 2), free)
    loose = [int((np.diff(g.pred_ptr) == 0).sum()) for g in (graph, made.graph)]

    assert loose[0] == loose[1] == 1
    assert int(graph.dur_ns.sum()) == int(made.graph.dur_ns.sum())


def test_zero_bubble_splits_backward_without_losing_time(layered: Layered) -> None:
    """Input and weight parts add up to the measured backward pass, and the guess is counted."""
    graph, anatomy = layered(4, 4)
    whole = int(graph.dur_ns[(anatomy.phase == int(Phase.BACKWARD)) & (graph.kind == int(NodeKind.KERNEL))].sum())
    made = cut(graph, anatomy, build("InterleavedZeroBubble", 2, 4), free)
    kernels = made.graph.kind == int(NodeKind.KERNEL)
    parts = int(made.graph.dur_ns[kernels & (made.anatomy.phase == int(Phase.BACKWARD))].sum())
    parts += int(made.graph.dur_ns[kernels & (made.origin < 0)].sum())

    assert whole == parts
    assert {"backward passes split evenly into input and weight parts": 8} == dict(made.health.guessed)


@pytest.mark.parametrize(
    ("new", "measured", "expected"),
    [
        (4, 4, [0, 1, 2, 3]),
        (8, 4, [0, 1, 2, 1, 2, 1, 2, 3]),
        (2, 4, [0, 3]),
        (4, 1, [0, 0, 0, 0]),
        (4, 2, [0, 0, 0, 1]),
    ],
)
def test_further_micro_batches_repeat_the_middle(new: int, measured: int, expected: list[int]) -> None:
    """First and last keep their place, since only they warm up and synchronise gradients."""
    assert expected == [template(i, new, measured) for i in range(new)]


def test_layers_that_do_not_divide_leave_the_ends_short(layered: Layered) -> None:
    """Four layers on three stages: embedding and head make up for a layer; fewer layers than stages are refused."""
    _, anatomy = layered(4, 1)
    expected = ((0, 1), (2, 3), (4, 5))

    assert expected == split_units(anatomy, 3).units
    with pytest.raises(UsageError, match="4 layers can't be cut into 5 stages; take at most 4"):
        split_units(anatomy, 5)


def test_layers_of_each_stage_may_be_given(layered: Layered) -> None:
    """Counts that don't add up are refused."""
    _, anatomy = layered(4, 1)
    expected = ((0, 1), (2,), (3, 4, 5))

    assert expected == split_units(anatomy, 3, [1, 1, 2]).units
    with pytest.raises(UsageError, match="don't add up to 4 layers"):
        split_units(anatomy, 3, [1, 1, 1])


def test_uneven_stages_are_told(stateful: Callable[..., State]) -> None:
    """Five layers on two stages are two and three, the longer one sets the pace, and the report says so."""
    state = stateful(5, 8, 1, launch_ns=0, gap_ns=0, optimizer_ns=0)
    made = pipeline(state, 2)
    slow = 3 * 100 + 10
    steady = 8 * 3 * slow

    assert "The stages hold 2, 3 layers: 5 don't divide." in made.health.notes
    assert (
        steady
        <= replay(replace(made.graph, dur_ns=np.where(made.anatomy.is_message, 0, made.graph.dur_ns))).makespan_ns
    )
    assert [] == [note for note in pipeline(made, 1).health.notes if "divide" in note]


def write_log(folder: Path, ranks: int, m: int, forward: float, backward: float, head: float) -> list[Path]:
    """Logs of an ideal 1F1B pipeline, in ms, for three steps."""
    program = build("1F1B", ranks, m)
    extra = {Op.FORWARD: head, Op.BACKWARD: 2 * head}

    def time(action: Action) -> int:
        base = forward if action.op is Op.FORWARD else backward
        return round(1e6 * (base + (extra[action.op] if action.stage == ranks - 1 else 0)))

    timeline = replay(pipeline_graph(program, time, free))
    paths = []
    for rank in range(ranks):
        step: dict[str, object] = {}
        for key, op in (("fwd", Op.FORWARD), ("bwd", Op.BACKWARD)):
            nodes = [v for v in range(len(timeline.graph)) if timeline.graph.name_of(v).startswith(f"{rank}{op.value}")]
            step[f"{key}_start"] = [float(timeline.start_ns[v]) / 1e6 for v in nodes]
            step[f"{key}_end"] = [float(timeline.end_ns[v]) / 1e6 for v in nodes]
        step["total"] = float(timeline.end_ns[timeline.graph.rank == rank].max()) / 1e6
        paths.append(folder / f"rank{rank}.json")
        paths[-1].write_text(json.dumps({str(number): step for number in range(1, 4)}))
    return paths


def test_a_log_tells_head_and_layers_apart(tmp_path: Path) -> None:
    """What the last stage takes beyond the others is the head, and the log's own program replays to its step."""
    log = read_pipeline_log(write_log(tmp_path, 4, 8, 10.0, 20.0, 3.0))
    times = stage_times(log)

    assert (3e6, 6e6) == pytest.approx((times.head_forward_ns, times.head_backward_ns))
    assert float(log.step_ns[0]) == pytest.approx(replay(predict(log, measured_program(log))).makespan_ns, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "not a pipeline log"),
        ("{", "not a readable JSON file"),
        ('{"1": {}}', "fewer than 3 steps"),
        ('{"1": {}, "2": {}, "3": {"fwd_start": ["a"]}}', "'fwd_start' is missing or differs"),
        ('{"1": {}, "2": {}, "3": {"total": 1}}', "not finite|missing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """What is not such a log is named with the reason."""
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_pipeline_log([path])


def test_primus_pp8_predicts_its_interleaved_run(shared_data: Path) -> None:
    """From PP8 alone, PP8 with two chunks a rank within 5 %, and PP8 itself within 1 % (8 × MI300X, 64 layers)."""
    folder = shared_data / "traces" / "primus_pp8"
    log = read_pipeline_log([folder / f"pp_rank_{rank}.json" for rank in range(8)])
    other = read_pipeline_log([folder / f"pp8_vpp2__pp_rank_{rank}.json" for rank in range(8)])
    end = stage_times(log).end_ns
    same = replay(predict(log, measured_program(log))).makespan_ns + end
    interleaved = replay(predict(log, build("Interleaved1F1B", 8, 16, 2))).makespan_ns + end

    assert float(np.median(log.step_ns)) == pytest.approx(same, rel=0.01)
    assert float(np.median(other.step_ns)) == pytest.approx(interleaved, rel=0.05)
