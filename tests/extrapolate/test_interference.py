"""What overlap costs: one definition for described jobs, stretched traces and searches."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.catalog import load_device, names
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.described.constants import costs_on, device, device_of
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.interference import OVERLAP_LOSS, kernel_slowdown, loss_of, overlap_loss, prior
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.load import load
from scaletrace.traces.synth import SynthJob, plan, write_capture


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


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama2-1b", "fsdp={},mbs=2"), ("llama2-7b", "fsdp={},mbs=1"), ("llama2-7b", "fsdp={},mbs=4")],
)
def test_a_sharded_job_stretched_a_hundredfold_is_the_described_one(tmp_path: Path, model: str, layout: str) -> None:
    """Kernels beside gathers and gathers beside kernels, from 8 to 64 and 1,024 GPUs, with as much of either there."""
    on = device("h100")

    def described(gpus: int) -> SynthJob:
        of = Described(load_model(model), Layout.parse(layout.format(gpus)), on, costs_on(on))
        return calibrated(of, [0], 2, None, Interference(), {})[1]

    write_capture(described(8), tmp_path)
    curve = extrapolate(load(tmp_path, workers=1), sizes=[8, 64, 1024], noise=Noise(0.0, 0.0, "normal", 4.0))
    truth = [plan(described(gpus)).step_ns(1) / 1e9 for gpus in (8, 64, 1024)]

    assert truth == [pytest.approx(point.p50_s, rel=0.02) for point in curve.points]
    assert all(point.ideal_overlap_s < point.p50_s for point in curve.points[1:])
