"""How long messages take between stages that are laid anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.calibrate import calibrate
from scaletrace.extrapolate.catalog import load_cluster
from scaletrace.extrapolate.layout import measured_layout
from scaletrace.extrapolate.rewrite.schedules import build as schedule
from scaletrace.extrapolate.rewrite.stages import SHORT, laid
from scaletrace.extrapolate.rewrite.state import Network, State, open_state
from scaletrace.extrapolate.steps import step_times_ns
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay


def opened(path: Path) -> State:
    """The job on its own network, whose messages are as measured."""
    built = build(load(path))
    cluster = load_cluster("gloo_host")
    layout = measured_layout(built.graph, built.job.world_size or 1)
    return open_state(built, layout, Network(cluster, calibrate([], cluster)), None)


def step_ns(state: State) -> float:
    """Median step of the state's own schedule."""
    timeline = replay(state.graph)
    return float(np.median(step_times_ns(state.graph, timeline.start_ns, timeline.end_ns)))


@pytest.mark.parametrize("name", ["pp_1f1b_w4", "pp_gpipe_w2"])
def test_the_measured_schedule_laid_anew_takes_as_long_as_measured(shared_data: Path, name: str) -> None:
    """Where most messages wait for a thread to wake, the quick ones say too little; those count that give the step."""
    state = opened(shared_data / "gloo" / name)
    layout = state.layout
    again = laid(state, schedule(layout.pipeline_schedule, layout.pp, layout.microbatches, layout.chunks))

    assert 1 - SHORT <= step_ns(again) / step_ns(state) <= 1.25
