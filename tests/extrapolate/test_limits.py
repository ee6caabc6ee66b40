"""Limits of frontier training: the closed form's checks, exponents, wall, what-ifs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.limits import (
    A100,
    H100,
    Training,
    batch_seconds,
    limits,
    linear_until_flop,
    machine_of,
    utilization,
    wall_flop,
    what_ifs,
)

SINGLE = np.array([[1.0], [1.0], [1.0], [1.0], [1.0]])


def test_one_device_without_latency_runs_at_the_stated_utilization() -> None:
    """Compute-bound on one device: a batch takes 6 N B FLOP at u times the peak."""
    machine, training = replace(H100, latency_s=0.0), Training()
    flop = 1e22

    seconds = float(batch_seconds(machine, training, flop, SINGLE)[0])

    ideal = 6 * training.parameters(flop) * training.batch_tokens(flop) / (0.7 * H100.flop8_s / 2)
    assert seconds == pytest.approx(ideal, rel=1e-9)


def test_arithmetic_intensity_of_h100_balances_near_896() -> None:
    """At 8 bit, 2 M N K FLOP against M N + M K + N K words balance at M = N = K ≈ 896 (299 MAC a byte)."""
    mac_per_byte = H100.flop8_s / 2 / H100.dram_Bps

    assert mac_per_byte == pytest.approx(295, rel=0.02)
    assert 3 * mac_per_byte == pytest.approx(896, rel=0.02)


def test_product_on_a100_takes_about_a_millisecond() -> None:
    """12288 × 6144 × 2048 at 8-bit rate and u = 0.8 is within a factor of 1.6 of 1 ms at 16 bit."""
    seconds = 2 * 12288 * 6144 * 2048 * 2 / (0.8 * A100.flop8_s)

    assert seconds == pytest.approx(1.24e-3, rel=0.01)


def test_the_wall_is_exact_and_goes_as_latency_to_the_minus_two() -> None:
    """(D/B) · L · 4 · α = T: 1.97e31 at 8.5 µs, 3.56e32 at 2 µs."""
    walls = [wall_flop(H100, step_latency_s=alpha) for alpha in (8.5e-6, 2e-6, 4e-6)]

    assert [1.97e31, 3.56e32] == pytest.approx(walls[:2], rel=0.002)
    assert walls[1] / walls[2] == pytest.approx(4, rel=1e-9)
    assert wall_flop(H100) == pytest.approx(walls[0])


def test_the_wall_goes_as_the_square_of_the_run() -> None:
    """Twice the time, four times the FLOP; without latency there is no wall."""
    long = Training(run_s=2 * Training().run_s)

    assert wall_flop(H100, long) / wall_flop(H100) == pytest.approx(4, rel=1e-9)
    assert math.inf == wall_flop(H100, step_latency_s=0.0)


def test_linear_scaling_goes_as_bandwidth_to_the_four_and_a_half() -> None:
    """On a flat network without latency, four times the bandwidth moves the end by 4^4.5."""
    ends = [
        linear_until_flop(replace(H100, inside_Bps=rate, beyond_Bps=rate, domain=0, latency_s=0.0))
        for rate in (50e9, 200e9)
    ]

    assert math.log(ends[1] / ends[0]) / math.log(4) == pytest.approx(4.5, abs=0.2)


def test_public_formulas_on_a_flat_fast_network_have_no_limit_at_2e28() -> None:
    """900 GB/s everywhere without latency stays at the plateau; the second tier makes the limit."""
    flat = replace(H100, domain=0, latency_s=0.0)

    assert utilization(flat, 2e28).utilization == pytest.approx(0.70, abs=0.001)
    assert utilization(H100, 2e28).utilization < 0.66


def test_the_search_respects_its_constraints_and_repeats() -> None:
    """Stages within the blocks and the micro batches, at least one token each, the same answer every time."""
    training = Training()
    for flop in (1e25, 1e28, 1e31):
        point = utilization(H100, flop, training)
        cut = point.degrees

        assert cut.pp <= training.blocks(flop) * 1.001
        assert cut.pp <= cut.micro_batches * 1.001
        assert cut.dp * cut.micro_batches <= training.batch_tokens(flop) * 1.001
        assert point == utilization(H100, flop, training)


def test_powers_of_two_are_powers_of_two_and_never_better() -> None:
    """Rounded degrees can't beat real ones by more than the tolerance on the run's length."""
    real, rounded = (utilization(H100, 1e28, powers_of_two=two) for two in (False, True))

    assert all(math.log2(getattr(rounded.degrees, name)).is_integer() for name in ("pp", "dp", "tp_hidden"))
    assert rounded.utilization <= real.utilization * 1.02


def test_beyond_the_wall_nothing_finishes_in_time() -> None:
    """At 1e33 FLOP latency alone takes longer than the run."""
    assert 0.0 == utilization(H100, 1e33).utilization


def test_what_ifs_move_the_limits_the_way_they_must() -> None:
    """More bandwidth moves the linear end, less latency the wall, a larger domain the linear end only."""
    cases = what_ifs(H100)
    base, fast, near, wide = (
        cases[name] for name in ("as it is", "network × 2 beyond the domain", "latency / 2", "domain of 72")
    )

    assert linear_until_flop(*fast) > 5 * linear_until_flop(*base)
    assert wall_flop(*near) == pytest.approx(4 * wall_flop(*base))
    assert linear_until_flop(*wide) > linear_until_flop(*base)
    assert wall_flop(*wide) == wall_flop(*base)


def test_sparse_models_reach_their_limit_earlier_and_more_experts_hardly_matter() -> None:
    """Tokens travel to their experts; once spread over data ranks, eight or 32 experts cost about the same."""
    dense, few, many = (linear_until_flop(H100, Training(sparsity=s)) for s in (1.0, 8.0, 32.0))

    assert few < dense / 5
    assert many == pytest.approx(few, rel=0.3)
    assert wall_flop(H100, Training(sparsity=8.0)) == wall_flop(H100)


def test_a_cluster_of_the_catalog_gives_a_machine() -> None:
    """DGX H100 is close to the paper's device: two directions of NVLink inside, one NIC's rate beyond."""
    machine = machine_of(Cluster.load("dgx_h100"))

    assert (1979e12, 900e9, 50e9, 8) == (machine.flop8_s, machine.inside_Bps, machine.beyond_Bps, machine.domain)


def test_limits_carry_curve_end_and_wall() -> None:
    """The whole answer at given sizes."""
    found = limits(H100, flops=(1e26, 1e30))

    assert (1e26, 1e30) == tuple(point.flop for point in found.curve)
    assert found.curve[0].utilization > found.curve[1].utilization
    assert 1e28 < found.linear_until_flop < 1e30 < found.wall_flop


def test_impossible_trainings_are_refused() -> None:
    """Utilization, sparsity and FLOP outside their range are named."""
    with pytest.raises(UsageError, match=r"utilization is 1\.5"):
        Training(utilization=1.5)
    with pytest.raises(UsageError, match=r"sparsity is 0\.5"):
        Training(sparsity=0.5)
    with pytest.raises(UsageError, match="training FLOP is -1"):
        utilization(H100, -1)
