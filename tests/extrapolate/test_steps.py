"""The point at the measured size is the measured step, and shares of time add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.point import Options, evaluate
from scaletrace.extrapolate.steps import shares
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphGroup, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay
from scaletrace.replay.steps import step_time_s


@pytest.mark.parametrize("name", ["ddp_w2", "ddp_w4", "ddp_straggler_w4", "fsdp2_w1", "fsdp2_w2", "fsdp2_w4"])
def test_the_point_at_the_measured_size_is_the_measured_step(samples: Path, name: str) -> None:
    """What replay calls the step, within the error that the answer states, which is below 1 %."""
    built = build(load(samples / name))
    measured = built.measured
    base = prepare(built)
    point = evaluate(base, base.ranks, Options())

    assert base.fit.measured_s == step_time_s(built.graph, measured.start_ns, measured.end_ns)
    assert point.p50_s == pytest.approx(base.fit.measured_s * (1 + base.fit.error))
    assert abs(base.fit.error) < 0.01


def test_shares_say_how_long_a_collective_is_resident_and_waits() -> None:
    """Rank 0 computes 100 and waits 200 for rank 1, which computes 300; then both move for 100 and end at 400.

    Rank 0 computes 1/4, is exposed for 3/4 and waits for 1/2; rank 1 computes 3/4 and is exposed for 1/4.
    """
    draft = Draft(groups=[GraphGroup("pp", 2, 1)])
    work = [draft.node(NodeKind.KERNEL, dur, rank=rank, lane="stream 7") for rank, dur in ((0, 100), (1, 300))]
    draft.collective("all_reduce", 0, 64, [(0, [work[0]]), (1, [work[1]])], 100)
    graph = draft.graph()
    done = replay(graph)
    found = shares(graph, done.start_ns, done.end_ns)

    assert (0.5, 0.5, 0.5) == (found.compute, found.exposed, found.resident)
    assert {"pp": 0.25} == found.waiting_by_axis


def test_shares_tell_what_compute_loses_to_what_runs_beside_it() -> None:
    """A kernel of 200 that lost a quarter to the transfer beside it, of 100 and hidden: an eighth of the step of 400."""
    draft = Draft(groups=[GraphGroup("dp", 1, 1)])
    draft.collective("all_reduce", 0, 64, [(0, [])], 100)
    first = draft.node(NodeKind.KERNEL, 200, lane="stream 7")
    draft.node(NodeKind.KERNEL, 200, lane="stream 7", after=[first])
    graph = draft.graph()
    done = replay(graph)
    lost = np.where((graph.kind == NodeKind.KERNEL) & (done.start_ns == 0), 0.25, 0.0)
    found = shares(graph, done.start_ns, done.end_ns, lost=lost)

    assert (1.0, 0.125, {"dp": 0.25}) == (found.compute, found.slowed, dict(found.hidden_by_axis))
