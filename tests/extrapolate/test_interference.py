"""What overlap costs: one definition for described jobs, stretched traces and searches."""

from __future__ import annotations

import pytest

from scaletrace.extrapolate.catalog import load_device, names
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.constants import device, device_of
from scaletrace.extrapolate.interference import OVERLAP_LOSS, kernel_slowdown, loss_of, overlap_loss, prior


@pytest.mark.parametrize("loss", [0.0, 0.217, 0.603, 1.0])
def test_the_cost_of_a_hidden_collective_and_the_slowdown_of_kernels_are_one_thing(loss: float) -> None:
    """κ from λ and λ from κ."""
    assert loss == pytest.approx(loss_of(kernel_slowdown(loss)))


def test_every_gpu_of_the_catalog_takes_its_generations_slowdown_with_its_source() -> None:
    """No device has a number of its own; what stands in says so."""
    for name in names("devices"):
        found = load_device(name)
        if found.generation == "cpu":
            continue
        assert prior(found.generation) == (found.overlap_slowdown, found.sources["overlap_slowdown"])
        assert ("nothing published" in found.sources["overlap_slowdown"]) == (found.generation not in OVERLAP_LOSS)


def test_described_devices_and_the_catalog_agree() -> None:
    """A described H100 or A100 slows kernels by what a trace of it is assumed to."""
    for short, cluster in (("h100", "dgx_h100"), ("a100", "dgx_a100")):
        described = device(short)

        assert overlap_loss(described.generation) == described.overlap_loss
        assert described.kernel_slowdown() == pytest.approx(Cluster.load(cluster).device.overlap_slowdown)
        assert device_of(Cluster.load(cluster)).kernel_slowdown() == described.kernel_slowdown()
