"""Pipelines: order of operations, bubble, messages, parameter traffic."""

from __future__ import annotations

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.pipeline import Pipeline, order, pipeline_program
from scaletrace.extrapolate.described.stages import layers_by_chunk, layers_by_cost


def step(pipeline: Pipeline, kernel_slowdown: float = 0.0) -> float:
    """Seconds of one step with unit compute."""
    return pipeline_program(pipeline).freeze().run(1.0, kernel_slowdown, 0.0).makespan_s


def test_one_forward_one_backward_order_of_the_first_and_last_of_two_stages() -> None:
    """The first stage warms up with one forward, the last alternates at once."""
    assert ([(True, 0, 0), (True, 0, 1), (False, 0, 0), (True, 0, 2), (False, 0, 1), (False, 0, 2)], 1) == order(
        2, 1, 3, 0
    )
    assert ([(True, 0, 0), (False, 0, 0), (True, 0, 1), (False, 0, 1)], 0) == order(2, 1, 2, 1)


def test_interleaved_order_takes_chunks_in_groups_of_stages() -> None:
    """With two chunks, two micro batches pass chunk 0 before chunk 1, and backward starts with the last chunk."""
    operations, warm_up = order(2, 2, 4, 0)

    assert 4 == warm_up
    assert [(True, 0, 0), (True, 0, 1), (True, 1, 0), (True, 1, 1)] == operations[:4]
    assert (False, 1, 0) == operations[5]
    assert sorted(operations) == sorted(
        (forward, chunk, mb) for forward in (True, False) for chunk in (0, 1) for mb in range(4)
    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 5), (4, 8), (8, 8)])
def test_the_bubble_of_one_forward_one_backward_is_stages_minus_one_slots(stages: int, micro_batches: int) -> None:
    """Without messages a step lasts (m + p - 1) forwards and backwards."""
    pipeline = Pipeline(stages, 1, micro_batches, ((1.0,),) * stages, ((2.0,),) * stages)

    assert step(pipeline) == pytest.approx(3.0 * (micro_batches + stages - 1))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    """With v chunks a step lasts m + (p - 1) / v slots."""
    pipeline = Pipeline(4, 4, 8, ((0.25,) * 4,) * 4, ((0.5,) * 4,) * 4)

    assert step(pipeline) == pytest.approx(3.0 * (8 + 3 / 4))


def test_parameter_gathers_hold_back_the_first_forward_and_reductions_the_end() -> None:
    """A chunk's first forward waits for its gather; the last reduction ends after the last backward."""
    base = Pipeline(2, 1, 4, ((1.0,),) * 2, ((2.0,),) * 2)
    gathered = Pipeline(2, 1, 4, ((1.0,),) * 2, ((2.0,),) * 2, gather_s=0.5)
    reduced = Pipeline(2, 1, 4, ((1.0,),) * 2, ((2.0,),) * 2, reduce_s=0.7)

    assert step(gathered) == pytest.approx(step(base) + 0.5)
    assert step(reduced) == pytest.approx(step(base) + 0.7)


def test_traffic_that_does_not_overlap_adds_to_the_step_whole() -> None:
    """Without overlap gather and reduction stand before and after all compute, chunk by chunk in a row."""
    base = Pipeline(1, 2, 2, ((1.0, 1.0),), ((2.0, 2.0),))
    exposed = Pipeline(1, 2, 2, ((1.0, 1.0),), ((2.0, 2.0),), gather_s=0.5, reduce_s=0.25, overlapped=False)

    assert step(exposed) == pytest.approx(step(base) + 2 * 0.75)


def test_overlapped_traffic_slows_the_compute_beside_it() -> None:
    """What overlap costs grows with the kernel slowdown; without it hidden traffic is free."""
    pipeline = Pipeline(1, 4, 4, ((1.0,) * 4,), ((2.0,) * 4,), gather_s=0.2, reduce_s=0.2)

    assert step(pipeline, 1.0) > step(pipeline, 0.2) > step(pipeline, 0.0)


def test_a_blocking_send_costs_the_warm_up_and_the_flush() -> None:
    """Messages lengthen a step by more than their latency, since in warm-up they occupy the sender."""
    quiet = Pipeline(4, 1, 8, ((1.0,),) * 4, ((2.0,),) * 4)
    chatty = Pipeline(4, 1, 8, ((1.0,),) * 4, ((2.0,),) * 4, send_s=0.01)

    hops = (step(chatty) - step(quiet)) / 0.01

    assert 2 * 3 < hops < 2 * (3 + 8)


def test_an_interleaved_schedule_needs_a_multiple_of_the_stages() -> None:
    """Six micro batches on four stages can't interleave."""
    with pytest.raises(UsageError, match="6 micro batches on 4 stages"):
        Pipeline(4, 2, 6, ((1.0, 1.0),) * 4, ((2.0, 2.0),) * 4)


def test_uneven_layers_leave_the_first_and_last_chunk_short() -> None:
    """126 layers in 64 chunks of two: the first and last hold one."""
    counts = layers_by_chunk(126, 64)

    assert (1, 2, 2) == counts[:3]
    assert 1 == counts[-1]
    assert 126 == sum(counts)


def test_layers_by_cost_give_the_heads_stage_fewer() -> None:
    """A head worth four layers leaves the last of two stages four layers fewer."""
    assert (10, 6) == layers_by_cost(16, 2, 4.0)
    assert (16,) == layers_by_cost(16, 1, 4.0)
