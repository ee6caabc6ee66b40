"""Activation checkpointing: found in a trace, put in, taken out, and both ways back."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import Role
from scaletrace.extrapolate.recompute import find_again
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.checkpointing import checkpoint, checkpointed
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from tests.extrapolate.test_rewrite_layout import BIG, kernel_ns, kinds, same

ROOT = Path(__file__).resolve().parents[2]
Stateful = Callable[..., State]


def again_ns(state: State) -> int:
    """Time of what is run again, on all lanes."""
    mine = (state.anatomy.phase == int(Phase.RECOMPUTE)) & state.work.computes
    return int(state.graph.dur_ns[mine].sum())


def makespan(state: State) -> int:
    """The replay's length."""
    return replay(state.graph).makespan_ns


@pytest.mark.parametrize("how", ["full", "selective"])
def test_put_in_and_taken_out_gives_the_same_step(stateful: Stateful, how: str) -> None:
    """Off → on → off → on: the same nodes and times as at first, each time."""
    state = stateful(4, 2, 2, reduce_ns=1000, **BIG)
    on = checkpointed(state, how)
    off = checkpointed(on, "off")
    again = checkpointed(off, how)

    assert makespan(state) == makespan(off) < makespan(on) == makespan(again)
    assert len(state.graph) == len(off.graph) < len(on.graph) == len(again.graph)
    assert sorted(on.graph.dur_ns.tolist()) == sorted(again.graph.dur_ns.tolist())


def test_selective_leaves_the_rest_of_the_graph_alone(stateful: Stateful) -> None:
    """Attention's forward once more before its backward, and the old graph bit for bit when it is taken out."""
    state = stateful(4, 2, **BIG)
    on = checkpointed(state, "selective")

    assert 2 * 10_000_000 == again_ns(on) == makespan(on) - makespan(state)
    assert same(state.graph, checkpointed(on, "none").graph)


def test_full_runs_every_layer_once_more_and_says_which_nodes_that_are(stateful: Stateful) -> None:
    """Four layers, two micro batches, and not embedding and head."""
    on = checkpoint(stateful(4, 2, **BIG))

    assert 2 * 4 * 10_000_000 == again_ns(on)
    with pytest.raises(UsageError, match="recomputes its activations already"):
        checkpoint(on)
    with pytest.raises(UsageError, match="no attention"):
        checkpointed(stateful(1, 1), "selective")


def test_from_one_kind_to_the_other(stateful: Stateful) -> None:
    """Full → selective and selective → full are what they are from nothing."""
    state = stateful(4, 2, **BIG)
    full, some = checkpointed(state, "full"), checkpointed(state, "selective")

    assert makespan(some) == makespan(checkpointed(full, "selective"))
    assert makespan(full) == makespan(checkpointed(some, "full"))


@pytest.mark.parametrize("how", ["full", "selective"])
def test_other_axes_reach_what_is_run_again(stateful: Stateful, how: str) -> None:
    """Longer samples and tensor ranks change work that is run again as they change the first run."""
    state = stateful(4, 1, **BIG)
    on = checkpointed(state, how)

    for change in (lambda s: resize_sequence(s, 4096), lambda s: tensor(s, 4)):
        one, other = change(on), checkpointed(change(state), how)
        assert again_ns(one) == pytest.approx(again_ns(other), rel=1e-6)
        assert kernel_ns(one, Role.HEADS) == pytest.approx(kernel_ns(other, Role.HEADS), rel=1e-6)


def test_collectives_of_a_layer_are_run_again_with_it(stateful: Stateful) -> None:
    """With tensor parallelism the forward's all-reduce is issued twice; gone again when nothing is recomputed."""
    state = tensor(stateful(4, 3, **BIG), 2)
    on = checkpoint(state)

    assert {"all_reduce": 2 * 3} == kinds(state, "tp")
    assert {"all_reduce": 3 * 3} == kinds(on, "tp")
    assert {"all_reduce": 2 * 3} == kinds(checkpointed(on, "off"), "tp")


def test_a_pipeline_keeps_recomputing_as_measured(stateful: Stateful) -> None:
    """A checkpointed job cut into stages recomputes there; "off" in a layout takes it away, leaving it out does not."""
    on = checkpoint(stateful(4, 4, **BIG))
    cut = relayout(on, Layout(pp=4))

    assert again_ns(on) == again_ns(cut) and "full" == cut.layout.recompute
    assert 0 == again_ns(relayout(on, Layout(pp=4, recompute="off")))
    assert again_ns(on) == again_ns(relayout(cut, Layout(pp=2, microbatches=4)))


def op(name: str, ts: float, dur: float, number: int | None, **args: object) -> dict[str, object]:
    """One operator of a trace in microseconds."""
    numbered = {} if number is None else {"Sequence number": number, "Fwd thread id": 0}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": {"External id": int(ts), **numbered, **args}}  # fmt: skip


NODE = "autograd::engine::evaluate_function: "


def small_trace(folder: Path) -> Job:
    """Two products forward; backward runs the first one again inside the second one's node, and calls an exchange."""
    dims = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 1000},
        op("aten::mm", 100, 90, 1, **dims),
        op("aten::mm", 200, 90, 2, **dims),
        op(f"{NODE}MmBackward0", 400, 300, 2),
        op("aten::mm", 410, 90, 7, **dims),
        op("aten::view", 420, 10, 7),
        op("MmBackward0", 520, 170, 2),
        op("aten::mm", 530, 80, None, **dims),
        op(f"{NODE}MmBackward0", 710, 100, 1),
        op("MmBackward0", 715, 90, 1),
        op("aten::mm", 720, 80, None, **dims),
        op(f"{NODE}_ExchangeBackward", 820, 50, 0),
        op("_Exchange", 825, 30, 8),
    ]
    path = folder / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}}))
    return load(folder)


def test_work_run_again_is_told_by_its_own_sequence_numbers(tmp_path: Path) -> None:
    """An operator inside an autograd node is run again if it has a number of its own; what it holds goes with it."""
    events = small_trace(tmp_path).ranks[0].events
    found = find_again(events)

    assert [("aten::mm", 90_000)] == [
        (events.name_of(int(row)), int(end - start))
        for row, start, end in zip(found.row, found.start_ns, found.end_ns, strict=True)
    ]


def test_the_host_is_cut_where_work_was_run_again(tmp_path: Path) -> None:
    """The autograd node of 300 µs becomes the product run again (90 µs) and what is left of it; the others stay."""
    built = build(small_trace(tmp_path))
    state = open_state(built, Layout(mbs=1, seq=64), Network(Cluster.load("gloo_10g")))
    again = np.flatnonzero(state.anatomy.phase == int(Phase.RECOMPUTE))
    left = [n for n in range(len(state.graph)) if state.graph.name_of(n).startswith(NODE)]

    assert [("aten::mm", 90_000)] == [(state.graph.name_of(n), int(state.graph.dur_ns[n])) for n in again.tolist()]
    assert [210_000, 100_000, 50_000] == state.graph.dur_ns[left].tolist()
    assert replay(built.graph).makespan_ns == makespan(state)
    assert state.work.shape[int(again[0])] == state.work.shape[left[0]] is not None


def test_a_job_without_any_is_left_as_it_is(shared_data: Path) -> None:
    """No operator of an ordinary job counts as run again, so its graph is the very one that was built."""
    built: Built = build(load(shared_data / "gloo/fsdp2_w2"))
    state = open_state(built, Layout(fsdp=2, mbs=1, seq=8), Network(Cluster.load("gloo_10g")))

    assert state.graph is built.graph
    assert "none" == state.layout.recompute


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("full", "full"), ("reentrant", "full"), ("attention", "selective")])
def test_recorded_checkpointing_is_found_and_taken_out(tmp_path: Path, how: str, kind: str) -> None:
    """Real jobs under torch.utils.checkpoint: what is run again is every forward operator of the layers, with its shape."""
    states = {}
    for each in (how, "none"):
        command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(tmp_path / each), "--start-step",
                   "4", "--steps", "2", "--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1",
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                   str(ROOT / "tests/extrapolate/jobs/checkpointed.py"), str(ROOT / "traces/jobs"), each, "3", "plain"]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        layout = Layout(mbs=4, seq=64)
        states[each] = open_state(build(load(tmp_path / each)), layout, Network(Cluster.load("gloo_10g")))
    on, off = states[how], states["none"]
    again = on.anatomy.phase == int(Phase.RECOMPUTE)
    without = relayout(on, Layout(recompute="off"))
    products = [int((on.graph.name[again] == on.graph.names.index("aten::linear")).sum())]

    assert (kind, "none") == (on.layout.recompute, off.layout.recompute)
    assert [2 * 3 * (4 if kind == "full" else 2)] == products
    assert all(on.work.shape[node] is not None for node in np.flatnonzero(again & on.work.computes).tolist()
               if on.graph.name_of(node) in ("aten::linear", "aten::scaled_dot_product_attention"))  # fmt: skip
    host = int(on.graph.dur_ns[again & (on.graph.kind == int(NodeKind.HOST))].sum())
    assert makespan(on) - makespan(without) == pytest.approx(host, rel=0.01)
    assert 0 == again_ns(without)
    if how == "full":
        assert makespan(relayout(without, Layout(recompute="full"))) == pytest.approx(makespan(on), rel=0.5)
    assert replace(on.layout, recompute="off") == without.layout


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_schedule_that_splits_backward_runs_forward_again_once_and_whole(stateful: Stateful, schedule: str) -> None:
    """What is run again belongs to the input part; splitting backward does not split it."""
    on = checkpoint(stateful(4, 8, **BIG))
    chunks = 1 if schedule == "1F1B" else 2
    cut = relayout(on, Layout(pp=2, chunks=chunks, schedule=schedule))

    assert again_ns(on) == again_ns(cut)
