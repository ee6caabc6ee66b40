"""Lanes: dependencies, interference in both directions, and agreement with the replay engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.fsdp import ShardedStep, sharded_program
from scaletrace.extrapolate.described.graph import program_graph
from scaletrace.extrapolate.described.lanes import LaneProgram, solve_increasing
from scaletrace.extrapolate.described.pipeline import Pipeline, pipeline_program
from scaletrace.replay.engine import replay


def test_an_operation_waits_for_its_lane_and_for_what_it_depends_on_with_the_lag() -> None:
    """Program order on a lane, and the end of a dependency plus its lag, decide a start."""
    program = LaneProgram(2)
    first = program.compute(0, 1.0)
    program.compute(0, 2.0)
    program.compute(1, 1.0, [(first, 0.5)])
    frozen = program.freeze()

    times = frozen.run(1.0, 0.0, 0.0)

    assert [0.0, 1.0, 1.5] == times.start_s.tolist()
    assert [1.0, 3.0, 2.5] == times.end_s.tolist()


def test_a_hidden_collective_costs_compute_its_loss_and_no_more() -> None:
    """A collective of M seconds beside long compute prolongs the step by M κ (1 + μ) / (1 + κ)."""
    program = LaneProgram(1)
    program.compute(0, 10.0)
    program.collective(0, 2.0)

    makespan = program.freeze().run(1.0, 1.0, 0.2).makespan_s

    assert makespan == pytest.approx(10.0 + 2.0 * 1.0 * 1.2 / 2.0)


def test_a_collective_that_cannot_hide_is_prolonged_by_the_compute_beside_it() -> None:
    """A collective longer than the compute C beside it takes C μ (1 + κ) / (1 + μ) longer."""
    program = LaneProgram(1)
    program.compute(0, 2.0)
    program.collective(0, 10.0)

    makespan = program.freeze().run(1.0, 1.0, 0.25).makespan_s

    assert makespan == pytest.approx(10.0 + 2.0 * 0.25 * 2.0 / 1.25)


def test_fixed_work_neither_slows_nor_is_slowed() -> None:
    """The optimizer and blocking sends do not contend with a resident collective."""
    program = LaneProgram(1)
    program.fixed(0, 3.0)
    program.collective(0, 3.0)

    assert 3.0 == program.freeze().run(1.0, 5.0, 5.0).makespan_s


def test_a_program_that_waits_for_itself_is_refused() -> None:
    """A dependency on later work of the same lane is named instead of looping for ever."""
    program = LaneProgram(1)
    program.compute(0, 1.0, [(1, 0.0)], "early")
    program.compute(0, 1.0, (), "late")

    with pytest.raises(UsageError, match="waits for itself at 'early'"):
        program.freeze().run(1.0, 0.0, 0.0)


def test_without_interference_the_replay_engine_gives_the_same_step() -> None:
    """The lane simulation and the engine's sweep of the same program agree to the nanosecond."""
    pipeline = Pipeline(4, 2, 8, ((1.0, 2.0),) * 4, ((2.0, 4.0),) * 4, 0.01, 0.5, 0.4, 0.3)
    programs = [
        pipeline_program(pipeline).freeze(),
        sharded_program(ShardedStep(6, 0.3, 0.4, 0.1, 0.2, 0.05, accumulation=2, blocking_s=0.01)).freeze(),
    ]

    for program in programs:
        graph = program_graph(program, 1.0)

        assert graph.is_topological()
        assert replay(graph).makespan_ns == pytest.approx(1e9 * program.run(1.0, 0.0, 0.0).makespan_s, abs=1)


@settings(max_examples=30, deadline=None)
@given(
    units=st.integers(1, 5),
    gather=st.floats(0, 2),
    reduce=st.floats(0, 2),
    unit=st.floats(0.1, 5),
    more=st.floats(0, 1),
)
def test_a_step_is_monotone_in_every_duration(
    units: int, gather: float, reduce: float, unit: float, more: float
) -> None:
    """Longer compute or collectives never make a step shorter."""

    def step(gather_s: float, reduce_s: float, unit_s: float) -> float:
        return sharded_program(ShardedStep(units, gather_s, reduce_s)).freeze().run(unit_s, 0.7, 0.2).makespan_s

    base = step(gather, reduce, unit)

    assert step(gather + more, reduce, unit) >= base - 1e-9
    assert step(gather, reduce + more, unit) >= base - 1e-9
    assert step(gather, reduce, unit + more) >= base - 1e-9


def test_solving_finds_the_argument_and_names_an_unreachable_target() -> None:
    """The one calibrated number reproduces its measurement; a step shorter than its messages is refused."""
    assert solve_increasing(lambda x: max(1.0, 3 * x + 0.5), 7.5, guess=0.1) == pytest.approx(7 / 3)

    with pytest.raises(UsageError, match="communication alone takes 2 s"):
        solve_increasing(lambda x: 2.0 + x, 1.0, guess=1.0)


def test_frozen_programs_keep_labels_and_lanes_together() -> None:
    """Sorting by lane keeps each operation's label, weight and dependencies."""
    program = LaneProgram(1)
    gather = program.collective(0, 1.0, (), "gather")
    program.compute(0, 2.0, [(gather, 0.0)], "forward")
    frozen = program.freeze()

    assert ("forward", "gather") == frozen.labels
    assert [0, 1, 2] == frozen.lane_ptr.tolist()
    assert [1.0, 0.0] == frozen.run(1.0, 0.0, 0.0).start_s.tolist()
    assert np.array_equal([1], frozen.dep)
