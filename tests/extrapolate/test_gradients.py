"""Gradients that a job without data ranks does not share, inserted where it gets some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cautions import has_data_axis
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.gradients import LANE, reduces_gradients, with_gradients
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

Stateful = Callable[..., State]
JOBS = [("pp_1f1b_w4", "pp=4", "pp=4,dp=16"), ("pp_1f1b_w4", "pp=4", "pp=2,dp=8"), ("tp_w1", "dp=1", "tp=2,dp=32")]


def opened(folder: Path, measured: str) -> State:
    return open_state(build(load(folder)), Layout.parse(measured), Network(Cluster.load("gloo_10g")))


@pytest.mark.parametrize(("job", "measured", "there"), JOBS)
def test_new_data_ranks_reduce_every_weight(shared_data: Path, job: str, measured: str, there: str) -> None:
    """Each step moves the weights of each rank once, over the asked data ranks, and the optimizer waits for them."""
    state = opened(shared_data / "gloo" / job, measured)
    target = Layout.parse(there)
    found = relayout(state, target)
    graph = found.graph
    lanes = np.array([lane.name == LANE for lane in graph.lanes] + [False])[graph.lane]
    moves = np.flatnonzero(lanes & (graph.kind == int(NodeKind.TRANSFER)))
    items = [graph.collectives[at] for at in graph.instance[moves].tolist()]
    ranks = np.unique(graph.rank[moves])
    steps = len(np.unique(graph.step[moves]))
    columns = len(ranks) / target.pp

    assert {target.dp} == {graph.groups[item.group].size for item in items}
    weights = found.anatomy.parameters.sum() * 4
    assert weights * steps * columns == pytest.approx(sum(item.bytes_in for item in items), rel=0.01)
    timeline = replay(graph)
    optimizer = (found.anatomy.phase == int(Phase.OPTIMIZER)) & (graph.kind == int(NodeKind.HOST))
    for rank in ranks.tolist():
        done = timeline.end_ns[moves[graph.rank[moves] == rank]].max()
        assert done <= timeline.start_ns[optimizer & (graph.rank == rank)].min()
    assert any("Gradients are reduced over data ranks" in note for note in found.health.notes)


@pytest.mark.parametrize(("job", "measured", "there"), [JOBS[0], ("tp_w1", "dp=1", "dp=32")])
def test_taken_away_again_nothing_is_left(shared_data: Path, job: str, measured: str, there: str) -> None:
    """More data ranks and back replays as measured, with the collectives that were there."""
    state = opened(shared_data / "gloo" / job, measured)
    back = relayout(relayout(state, Layout.parse(there)), state.layout)

    assert state.graph.collectives == back.graph.collectives
    assert replay(state.graph).makespan_ns == replay(back.graph).makespan_ns


def test_over_one_rank_they_change_nothing(shared_data: Path) -> None:
    """The insertion alone replays to the nanosecond."""
    state = opened(shared_data / "gloo" / "pp_1f1b_w4", "pp=4")
    found = with_gradients(state)

    assert not reduces_gradients(state.graph, state.layout) and reduces_gradients(found.graph, found.layout)
    assert replay(state.graph).makespan_ns == replay(found.graph).makespan_ns


def test_a_job_with_gradients_keeps_its_own(shared_data: Path) -> None:
    """Data-parallel jobs reduce what they recorded, and nothing is added."""
    state = opened(shared_data / "gloo" / "ddp_w2", "dp=2,mbs=1,seq=8")

    assert with_gradients(state) is state


def test_unknown_weights_are_refused(shared_data: Path) -> None:
    """Without shapes nobody can say what to reduce, and the remedy is named."""
    state = opened(shared_data / "gloo" / "tp_w1", "dp=1")
    blind = replace(state, anatomy=replace(state.anatomy, parameters=0 * state.anatomy.parameters))

    with pytest.raises(UsageError, match=r"weights are not known.*two data-parallel ranks"):
        relayout(blind, Layout(dp=8))


def test_shards_are_not_made_of_whole_parameters(shared_data: Path) -> None:
    """A job that gathers no parameters can't be rewritten for FSDP."""
    with pytest.raises(UsageError, match="shows no sharded parameters"):
        relayout(opened(shared_data / "gloo" / "tp_w1", "dp=1"), Layout(fsdp=8))


def test_more_ranks_of_a_job_without_a_data_axis_cost_something(shared_data: Path) -> None:
    """A curve grows its data axis by inserted reductions, and the measured size stays as measured."""
    curve = extrapolate(load(shared_data / "gloo" / "tp_w1"), sizes=[1, 64])
    one, many = curve.points

    assert one.p50_s == pytest.approx(curve.base.fit.replayed_s)
    assert many.p50_s > 1.05 * one.p50_s and many.exposed_by_axis["dp"] > 0


def test_a_loss_averaged_over_all_ranks_is_no_data_axis() -> None:
    """A scalar over the world of a pipeline reduces no gradients; a bucket does."""
    draft = Draft(groups=[GraphGroup("world", 4, 1)])
    draft.collective("all_reduce", 0, 4, [(0, []), (1, [])])
    scalar = draft.graph()
    draft.collective("all_reduce", 0, 4000, [(0, []), (1, [])])

    assert not has_data_axis(scalar) and has_data_axis(draft.graph())
