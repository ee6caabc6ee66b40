"""Pipelines taken back: what a job was cut from returns bit for bit, and with it all that was changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches
from scaletrace.extrapolate.rewrite.select import keep_nodes
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.rewrite.uncut import uncut
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.load import load
from tests.extrapolate.conftest import build_state

COLUMNS = (
    "dur_ns", "release_ns", "kind", "rank", "lane", "name", "step", "event", "instance", "blocks", "layer", "pred_ptr",
    "pred", "lag_ns", "edge_kind", "edge_source", "multiplicity",
)  # fmt: skip
TABLES = ("names", "lanes", "groups", "collectives", "layers")
RECORDED = {
    "DDP": ("ddp_w2", "dp=2,mbs=1,seq=8"),
    "FSDP2": ("fsdp2_w2", "fsdp=2,mbs=1,seq=8"),
    "HSDP": ("hsdp_w4", "dp=2,fsdp=2,mbs=1,seq=8"),
    "FSDP2 with TP": ("tp_dp_w4", "fsdp=2,tp=2,mbs=1,seq=8"),
    "no data axis": ("pp_1f1b_w1", "mbs=1,seq=2"),
    "a recorded pipeline": ("pp_1f1b_w2", "pp=2,mbs=1,seq=2"),
}
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 1}
CHANGES = [{}, {"dp": 8}, {"mbs": 3}, {"seq": 64}, {"grads": "bf16"}, {"dp": 8, "mbs": 2}]


def differs(one: Graph, other: Graph) -> list[str]:
    """Columns and tables of two graphs that are not the same, bit for bit."""
    columns = [name for name in COLUMNS if not np.array_equal(getattr(one, name), getattr(other, name))]
    return columns + [name for name in TABLES if getattr(one, name) != getattr(other, name)]


@cache
def recorded(folder: Path, kind: str) -> State:
    """The state of a job recorded over gloo."""
    job, layout = RECORDED[kind]
    return open_state(build(load(folder / "gloo" / job)), Layout.parse(layout), Network(Cluster.load("gloo_10g")))


def synthetic(kind: str, micro_batches: int) -> State:
    """Four layers on two ranks whose gradients are reduced, scattered, or scattered behind every micro batch."""
    state = build_state(4, micro_batches, 2, reduce_ns=1000, steps=2)
    if kind == "DDP":
        return state
    items = [replace(item, kind="reduce_scatter", bytes_out=item.bytes_in // 2) for item in state.graph.collectives]
    groups = [replace(group, axis="dp" if kind == "ZeRO-1" else "fsdp") for group in state.graph.groups]
    graph = replace(state.graph, collectives=tuple(items), groups=tuple(groups))
    layout = replace(state.layout, dp=2, zero=1) if kind == "ZeRO-1" else replace(state.layout, dp=1, fsdp=2)
    return replace(state, graph=graph, layout=layout)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["DDP", "ZeRO-1", "FSDP"]),
    micro_batches=st.sampled_from([1, 2, 4, 8]),
    stages=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
)
def test_one_to_k_to_one_gives_every_bit_back(kind: str, micro_batches: int, stages: int, schedule: str) -> None:
    """Whatever the data axis, the micro batches and the schedule."""
    chunks = SCHEDULES[schedule] if stages == 2 else 1
    schedule = schedule if chunks == SCHEDULES[schedule] else "GPipe"
    state = synthetic(kind, micro_batches)
    there = pipeline(state, stages, schedule, chunks)

    assert [] == differs(state.graph, pipeline(there, 1).graph)
    assert stages == 1 or "pred" in differs(state.graph, there.graph)


@pytest.mark.parametrize("kind", list(RECORDED))
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    micro_batches=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["GPipe", "1F1B"]),
    change=st.sampled_from(CHANGES),
)
def test_a_recorded_job_returns_with_what_was_changed(
    shared_data: Path, kind: str, micro_batches: int, schedule: str, change: dict[str, object]
) -> None:
    """Cut, changed and put together again is changed without the cut; and changed back it is what it was."""
    state = repeat_micro_batches(recorded(shared_data, kind), micro_batches)
    stages = 4 if state.layout.pp == 2 else 2
    cut = relayout(state, replace(state.layout, pp=stages, schedule=schedule))
    both = relayout(cut, replace(cut.layout, **change))  # type: ignore[arg-type]
    back = relayout(both, replace(both.layout, pp=state.layout.pp, schedule="1F1B"))

    assert [] == differs(relayout(state, replace(state.layout, **change)).graph, back.graph)  # type: ignore[arg-type]
    if "grads" not in change and kind != "no data axis":
        assert [] == differs(state.graph, relayout(both, replace(state.layout, schedule="1F1B")).graph)


def test_another_pipeline_starts_from_the_source(shared_data: Path) -> None:
    """From one stage to two and on to another schedule is the same as there at once: nothing is lost on the way."""
    state = recorded(shared_data, "FSDP2")
    target = replace(state.layout, pp=2, microbatches=4, schedule="GPipe")
    via = relayout(relayout(state, replace(state.layout, pp=2, microbatches=2, schedule="1F1B")), target)

    assert [] == differs(relayout(state, target).graph, via.graph)


def test_what_lost_nodes_since_is_laid_as_it_is(stateful: Callable[..., State]) -> None:
    """A node that was taken out of the laid graph does not come back with the source."""
    state = stateful(4, 2, 2, reduce_ns=1000)
    cut = pipeline(state, 2)
    keep = cut.graph.instance < 0
    keep |= cut.anatomy.is_message
    origin = np.flatnonzero(keep).astype(np.int32)
    graph = keep_nodes(cut.graph, keep)
    less = replace(cut, graph=graph, anatomy=cut.anatomy.moved(origin), work=cut.work.moved(origin))

    assert uncut(less) is less
    assert 0 == int((pipeline(less, 1).graph.kind == int(NodeKind.TRANSFER)).sum())
