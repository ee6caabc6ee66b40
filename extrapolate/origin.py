"""Turns what a trace says of its devices into the cluster that it ran on, and a graph into the same job on another one.

Compute follows the ratio of the devices' ceilings (rewrite/device.py) where both are GPUs of the catalog. Host times of
a CPU job are no measure for kernels, so they stay as they are and that is said. Transfers keep the measured level
relative to the model of the network they were measured on, and take the model's level on the other one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.extrapolate.catalog import load_device
from scaletrace.extrapolate.cluster import Cluster, Device
from scaletrace.extrapolate.costs import FAMILY, Calibration, collective_seconds
from scaletrace.extrapolate.transfers import whole_bytes
from scaletrace.parse.cats import DEVICE_CATS
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, GraphCollective, NodeKind
from scaletrace.parse.job import Job

CPU = "cpu"
DEFAULT_GPU, DEFAULT_CPU = "dgx_h100", "gloo_10g"
DEVICE_ERROR = 0.1
"""Relative error (1 sigma) of compute moved to another GPU: the share of peak that large products reach spreads from 78
to 87 % over A100, H100 and B200, and what is bound by neither ceiling moves less than either."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a device is called in traces and in the catalog, and which cluster of it the catalog knows."""

    pattern: str
    family: str
    device: str
    cluster: str


KINDS = (
    _Kind(r"GB200", "GB200", "GB200", "gb200_nvl72"),
    _Kind(r"B300", "B300", "B300 SXM", "dgx_b200"),
    _Kind(r"B200", "B200", "B200 SXM", "dgx_b200"),
    _Kind(r"H200", "H200", "H200 SXM", "dgx_h200"),
    _Kind(r"H100 (NVL|PCIe)", "H100", "H100 PCIe", "dgx_h100"),
    _Kind(r"H100", "H100", "H100 SXM", "dgx_h100"),
    _Kind(r"A100[- ]PCIe", "A100", "A100 PCIe 80GB", "dgx_a100"),
    _Kind(r"A100.*80 ?GB", "A100", "A100 SXM 80GB", "dgx_a100"),
    _Kind(r"A100", "A100", "A100 SXM 40GB", "dgx_a100"),
    _Kind(r"V100", "V100", "V100 SXM2", "dgx_v100"),
    _Kind(r"MI355", "MI355", "MI355X", "mi300x"),
    _Kind(r"MI325", "MI325", "MI325X", "mi300x"),
    _Kind(r"MI300", "MI300", "MI300X", "mi300x"),
    _Kind(r"MI250", "MI250", "MI250X", "mi300x"),
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trace was recorded: the cluster that it looks like, and what it calls its device.

    family  "cpu", a family of KINDS, or "" for a GPU that the catalog does not know (or that the trace does not name)
    """

    cluster: Cluster
    family: str
    name: str

    def compute_moves(self, target: Cluster) -> bool:
        """Whether kernels have to be re-timed for the device of `target`."""
        there = family_of(target.device)
        return bool(self.family and there) and CPU not in (self.family, there) and self.family != there

    def network_moves(self, target: Cluster) -> bool:
        """Whether transfers were measured on another kind of machine than `target`."""
        there = family_of(target.device)
        return bool(self.family and there) and self.family != there

    def said(self, target: Cluster) -> str:
        """The sentence that a user must read before the numbers, "" where the trace ran on such a cluster."""
        here, there = self.name or self.cluster.device.name, target.device.name
        if self.compute_moves(target):
            return (
                f"MOVED: recorded on {here}, predicted for {there}: kernels follow the ratio of the two devices' "
                f"ceilings, transfers are the model's on {target.name}; host times stay."
            )
        if not self.network_moves(target):
            unknown = not self.family and family_of(target.device) not in ("", CPU)
            if unknown and self.name:
                return f"{here} is not in the catalog: its kernels keep their times, as if {there} were as fast."
            return ""
        if self.family == CPU:
            return (
                f"COMPUTE STAYS THE CPU'S: recorded on CPUs and predicted for {target.name}: only the network is that "
                f"of {there}; nothing of how fast {there} computes is in these numbers. Record the job on a GPU for that."
            )
        return (
            f"COMPUTE STAYS THE GPU'S: recorded on {here}, predicted for {target.name}, whose ranks are CPUs: only the "
            f"network is that of {target.name}."
        )


def family_of(device: Device) -> str:
    """Family of a cluster's device; "" for one of the user's own."""
    if device.generation == "cpu":
        return CPU
    return next((kind.family for kind in KINDS if re.search(kind.pattern, device.name)), "")


def origin_of(job: Job) -> Origin:
    """What the trace says of its devices; the catalog's cluster of them, with the device and the NCCL it names."""
    names = [
        str(device.get("name", ""))
        for rank in job.ranks
        for device in (rank.header.get("deviceProperties") or [])
        if isinstance(device, Mapping)
    ]
    on_device = any(bool(rank.events.in_cats(*DEVICE_CATS).any()) for rank in job.ranks)
    for kind in KINDS:
        name = next((name for name in names if re.search(kind.pattern, name)), "")
        if name:
            cluster = _with_version(replace(Cluster.load(kind.cluster), device=load_device(kind.device)), job)
            return Origin(cluster, kind.family if on_device else "", name)
    cpu = job.backend in ("gloo", "mpi", "") and not names and not on_device
    if cpu and job.ranks:
        return Origin(Cluster.load(DEFAULT_CPU), CPU, "")
    return Origin(_with_version(Cluster.load(DEFAULT_CPU if cpu else DEFAULT_GPU), job), "", next(iter(names), ""))


def _with_version(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with the NCCL that the trace names."""
    for rank in job.ranks:
        info = rank.header.get("distributedInfo")
        version = info.get("nccl_version") if isinstance(info, Mapping) else None
        if isinstance(version, str) and re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
            return replace(cluster, nccl_version=version)
    return cluster


def on_network(
    graph: Graph, dur_ns: IntArray, here: Cluster, fitted: Calibration, there: Cluster, kept: Calibration | None = None
) -> IntArray:
    """Durations with every transfer carried from one network to another by the ratio of their models; int64[n].

    fitted  what the trace's transfers say of the network `here`; a collective without a model keeps its time
    kept    what of that holds `there` (recorded.carried)
    """
    factor = np.array([_ratio(item, graph, here, fitted, there, kept) for item in graph.collectives] + [1.0])
    nodes = np.flatnonzero((graph.kind == NodeKind.TRANSFER) & (graph.instance >= 0))
    out = dur_ns.copy()
    out[nodes] = np.round(dur_ns[nodes] * factor[graph.instance[nodes]]).astype(np.int64)
    return out


def _ratio(
    item: GraphCollective,
    graph: Graph,
    here: Cluster,
    fitted: Calibration,
    there: Cluster,
    kept: Calibration | None,
) -> float:
    if item.group < 0 or item.kind not in FAMILY:
        return 1.0
    group = graph.groups[item.group]
    size, stride = max(1, whole_bytes(item, group.size)), max(1, group.stride)
    before = collective_seconds(item.kind, size, group.size, here, stride=stride, calibration=fitted).seconds
    after = collective_seconds(item.kind, size, group.size, there, stride=stride, calibration=kept).seconds
    return after / before if before > 0 else 1.0
