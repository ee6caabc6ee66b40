"""Where a trace was recorded, and what of it moves to another device or network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.catalog import load_device, names
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.costs import Calibration, collective_seconds
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.origin import CPU, KINDS, family_of, on_network, origin_of
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.load import load


def _job(name: str, on_device: bool = True, backend: str = "nccl") -> Any:
    events = SimpleNamespace(in_cats=lambda *_: np.array([on_device]))
    header = {"deviceProperties": [{"name": name}] if name else []}
    return SimpleNamespace(ranks=(SimpleNamespace(header=header, events=events),), backend=backend)


@pytest.mark.parametrize(
    ("name", "device", "family"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", "H100"),
        ("NVIDIA H100 NVL", "H100 PCIe", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", "A100"),
        ("NVIDIA A100-PG509-200", "A100 SXM 40GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2", "V100"),
        ("NVIDIA H200", "H200 SXM", "H200"),
        ("NVIDIA GB200", "GB200", "GB200"),
        ("NVIDIA B200", "B200 SXM", "B200"),
        ("AMD Instinct MI300X", "MI300X", "MI300"),
    ],
)
def test_devices_are_known_by_the_names_in_traces(name: str, device: str, family: str) -> None:
    """The catalog's entry, in a cluster of its kind."""
    found = origin_of(_job(name))

    assert (device, family, name) == (found.cluster.device.name, found.family, found.name)
    assert found.cluster.backend == "nccl" and not found.said(found.cluster)


def test_every_kind_is_in_the_catalog_and_recognised_again() -> None:
    """Each entry's device and cluster exist, and the device's own name leads back to its family."""
    for kind in KINDS:
        assert Cluster.load(kind.cluster).backend == "nccl"
        assert kind.family == family_of(load_device(kind.device))
    assert {CPU} == {family_of(load_device(name)) for name in names("devices") if "CPU" in name}


def test_compute_of_a_cpu_is_said_to_stay() -> None:
    """Loudly, first, and only where a GPU cluster was asked for."""
    found = origin_of(_job("", on_device=False, backend="gloo"))
    h100 = Cluster.load("dgx_h100")

    assert (CPU, "gloo_10g") == (found.family, found.cluster.name)
    assert found.said(h100).startswith("COMPUTE STAYS THE CPU'S") and not found.compute_moves(h100)
    assert found.network_moves(h100)
    assert not found.said(Cluster.load("gloo_25g")) and not found.network_moves(Cluster.load("gloo_25g"))


def test_another_gpu_moves_and_an_unknown_one_does_not() -> None:
    """A100 to H100 is re-timed; a card that the catalog lacks keeps its times, and that is said."""
    h100 = Cluster.load("dgx_h100")
    known, unknown = origin_of(_job("NVIDIA A100-SXM4-40GB")), origin_of(_job("NVIDIA GeForce RTX 2080 Ti"))

    assert known.compute_moves(h100) and known.said(h100).startswith("MOVED: recorded on NVIDIA A100")
    assert not unknown.compute_moves(h100) and "RTX 2080 Ti is not in the catalog" in unknown.said(h100)


def test_transfers_keep_their_level_relative_to_the_model() -> None:
    """Measured twice as slow as the model here, it is twice as slow as the model there; one without a model stays."""
    draft = Draft(groups=[GraphGroup("dp", 8, 1)])
    here, there = Cluster.load("dgx_v100"), Cluster.load("dgx_h100")
    size = 64 << 20
    model = [collective_seconds("all_reduce", size, 8, cluster).seconds for cluster in (here, there)]
    draft.collective("all_reduce", 0, size, [(0, [])], round(2e9 * model[0]))
    draft.collective("custom", 0, size, [(0, [])], 777)
    draft.collectives[-1] = GraphCollective("custom", 0, size, size)
    graph = draft.graph()
    moved = on_network(graph, graph.dur_ns, here, Calibration(), there)

    assert [2e9 * model[1], 777] == pytest.approx(moved[graph.kind == NodeKind.TRANSFER].tolist(), rel=1e-6)


def test_a_cpu_job_on_a_gpu_cluster_shows_no_efficiency_of_the_gpu(samples: Path) -> None:
    """The note comes first; MFU, power and money are not known; the answer names whose compute it is."""
    curve = extrapolate(load(samples / "ddp_w2"), cluster=Cluster.load("dgx_h100"), sizes=[8, 64])
    parts, point = curve.to_json_parts(), curve.points[0]

    assert curve.health.notes[0].startswith("COMPUTE STAYS THE CPU'S")
    assert ("H100 SXM", "CPU host") == (parts["device"], parts["compute_is_of"])
    assert (None, None, None) == (point.mfu, point.power_W_per_gpu, point.money_per_million_tokens)
    assert "CPU host" in point.unknown["mfu"] and "measured on another device" == point.provenance["compute"]
    assert "prior" == point.provenance["communication"]


def test_a_gpu_job_moves_to_another_gpu(shared_data: Path) -> None:
    """A100s to H100s: kernels take less time by no more than the ratio of the ceilings, and the band is wider."""
    built = build(load(shared_data / "traces" / "resnet50_ddp_ws2_a100"))
    here, there = prepare(built), prepare(built, Cluster.load("dgx_h100"))
    work = (here.graph.kind == NodeKind.KERNEL) & (here.dur_ns > 20_000)
    ratio = here.dur_ns[work].sum() / there.dur_ns[work].sum()

    assert there.compute_moved and not here.compute_moved
    assert 1.2 < ratio < 989 / 312 * 1.1
    assert there.model_error >= 0.1 > here.model_error
    assert "device" == there.rebuilt and there.health.notes[0].startswith("MOVED")
