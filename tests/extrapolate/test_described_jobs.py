"""Described jobs: calibration, weak scaling, strategies that cross, structural facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.constants import FLASH_H100, device
from scaletrace.extrapolate.described.jobs import Layout, owned_job, pipeline_job, sharded_job
from scaletrace.extrapolate.described.models import Model, load_model

H100, A100 = device("h100"), device("a100")
SMALL = Model("small", "llama", 8, 1024, 16, ffn=2816, vocab=32000, seq=2048, tied=False)


def test_the_calibrated_number_gives_back_the_measured_step() -> None:
    """Each kind of job, calibrated on a step time, predicts that step time."""
    jobs = [
        pipeline_job(load_model("gpt3-175b"), Layout(dp=4, tp=4, pp=8, chunks=3, micro_batches=16), H100),
        sharded_job(load_model("llama2-7b"), Layout(dp=128, micro_batch=2), H100),
        owned_job(load_model("llama2-7b"), Layout(dp=16, micro_batches=4), A100, 16, inside_node=False),
    ]

    for job in jobs:
        assert job.step_s(job.unit_for(5.0)) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("sharded", [True, False])
def test_weak_scaling_never_gains(sharded: bool) -> None:
    """On a fixed topology a step at the same work a GPU does not become shorter with more GPUs."""
    steps = []
    for dp in (8, 16, 64, 256, 1024):
        layout = Layout(dp=dp, micro_batch=2, sharded_optimizer=True)
        job = sharded_job(SMALL, layout, H100) if sharded else pipeline_job(SMALL, layout, H100)
        steps.append(job.step_s(0.1 if sharded else 0.005))

    assert steps == sorted(steps)


def test_fully_sharded_steps_become_bound_by_ring_latency() -> None:
    """At 2,048 ranks a step lasts at least 96 ring latencies of 9.7 ms, whatever the compute."""
    job = sharded_job(load_model("llama2-7b"), Layout(dp=2048, micro_batch=2), H100)

    assert job.step_s(0.0) > 96 * 9.6e-3
    assert job.step_s(0.01) < 1.2 * job.step_s(0.0)


def test_fewer_channels_cost_less_compute() -> None:
    """A communicator capped at 8 of 24 channels takes a third of the loss of overlap."""
    layout = Layout(dp=64, tp=4, pp=8, chunks=12, micro_batches=16)
    steps = [
        pipeline_job(load_model("gpt3-175b"), replace(layout, channels=channels), H100).step_s(0.002)
        for channels in (8, 24)
    ]

    assert steps[0] < steps[1]
    losses = [H100.kernel_slowdown(c) * 1.19 / (1 + H100.kernel_slowdown(c)) for c in (8, 24)]
    assert losses[1] == pytest.approx(3 * losses[0])
    assert losses[1] == pytest.approx(H100.overlap_loss)


def test_one_nic_a_node_collapses_fully_sharded_training() -> None:
    """The same job on one NIC is bound by the network, and a cap above what it needs changes nothing."""
    model = load_model("gpt3-175b")
    free = sharded_job(model, Layout(dp=768, micro_batch=2), A100).step_s(30.0)
    one = sharded_job(model, Layout(dp=768, micro_batch=2, nic_cap_Bps=24e9), A100).step_s(30.0)
    wide = sharded_job(model, Layout(dp=768, micro_batch=2, nic_cap_Bps=1e12), A100).step_s(30.0)

    assert free == wide
    assert one > 1.4 * free


def test_owners_of_whole_tensors_cost_one_latency_each() -> None:
    """With the optimizer dealt out over all ranks, exposed broadcasts grow with ranks squared; in the node they do not."""
    model = load_model("llama2-7b")

    def grown(inside: bool) -> float:
        steps = [
            owned_job(model, Layout(dp=dp, micro_batches=4), A100, 8 if inside else dp, inside).step_s(4.0)
            for dp in (64, 256)
        ]
        return steps[1] - steps[0]

    assert grown(False) > 0.2 > grown(True)


def test_tensors_gathered_one_by_one_pay_their_latency_each() -> None:
    """Per-tensor collectives cost latency × tensors; fused buffers one."""
    layout = Layout(dp=128, overlapped=False)
    fused = pipeline_job(SMALL, layout, H100).step_s(0.005)
    apart = pipeline_job(SMALL, replace(layout, tensors_apart=6), H100).step_s(0.005)

    assert apart - fused == pytest.approx(2 * (6 * 8 - 1) * 0.6e-3, rel=0.05)


def test_costs_make_a_step_without_calibration() -> None:
    """With kernel costs the weights are seconds: twice the micro batches, about twice the step."""
    steps = [
        pipeline_job(load_model("llama2-7b"), Layout(tp=2, pp=4, micro_batches=m), H100, FLASH_H100).step_s(1.0)
        for m in (32, 64)
    ]

    assert steps[1] / steps[0] == pytest.approx((64 + 3) / (32 + 3), rel=0.02)


def test_recomputation_costs_another_forward() -> None:
    """Full recomputation lengthens a layer's step by a third, selective by less."""
    steps = {
        how: pipeline_job(SMALL, Layout(micro_batch=8, recompute=how), H100, FLASH_H100).step_s(1.0)
        for how in ("none", "selective", "full")
    }

    assert steps["none"] < steps["selective"] < steps["full"]


def test_impossible_layouts_are_refused() -> None:
    """A degree below one and an unknown recomputation are named."""
    with pytest.raises(UsageError, match="tp is 0"):
        Layout(tp=0)
    with pytest.raises(UsageError, match="recompute is 'some'"):
        Layout(recompute="some")
    with pytest.raises(UsageError, match="communication alone takes"):
        sharded_job(load_model("llama2-7b"), Layout(dp=2048, micro_batch=2), H100).unit_for(0.5)
