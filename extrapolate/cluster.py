"""Turns the description of a machine into numbers that the cost models read: a device and its network, tier by tier.

A tier is what joins ranks that the tier below can't: NVLink inside a node, rails or leaf switches between nodes,
a spine above them, a long haul between sites. A group of ranks is never a list here: `place` turns its size and
stride into how many of its members share a domain of each tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from scaletrace.errors import UsageError


class Link(Enum):
    """What a tier is made of; it selects the latency constants."""

    NVLINK = "nvlink"
    PCI = "pci"
    NETWORK = "network"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Rates are dense peaks a second; None = not known. `sources` says where each number is from.

    overlap_slowdown is the prior for how much slower kernels run while a collective is resident (κ of interference.py;
    0.5 = 1.5 times as long); it is used only where a trace can't tell.
    """

    name: str
    generation: str
    bf16_flops: float
    memory_bytes: float
    memory_Bps: float
    link_Bps: float
    power_W: float | None = None
    fp32_flops: float | None = None
    tf32_flops: float | None = None
    fp8_flops: float | None = None
    measured_bf16_flops: float | None = None
    measured_fp8_flops: float | None = None
    sms: int | None = None
    memory_efficiency: float = 0.85
    overlap_slowdown: float = 0.19
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the network. Bandwidth is a rank's share in one direction; a group with k members in a domain of
    the tier below owns k such shares.

    domain            ranks that one domain of this tier joins; 0 = all
    efficiency        share of the bandwidth that a large collective reaches
    latency_s         of one crossing: for TCP the whole, for NVLINK, PCI and NETWORK what comes on top of NCCL's own
    oversubscription  2.0 = the links above carry half of what enters from below
    """

    name: str
    link: Link
    domain: int
    bandwidth_Bps: float
    efficiency: float = 1.0
    latency_s: float = 0.0
    oversubscription: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate_Bps(self) -> float:
        """What one rank's share carries in practice."""
        return self.bandwidth_Bps * self.efficiency / self.oversubscription


@dataclass(frozen=True, slots=True)
class Cluster:
    """A device and the tiers that join many of it, from the innermost out.

    backend "nccl" or "gloo"; nccl_version selects the tuner's constants; cpu "intel" or "amd" sets its network
    overhead; nvls says whether the switches of the innermost tier can reduce.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    backend: str = "nccl"
    nccl_version: str = "2.30"
    cpu: str = "intel"
    nvls: bool = False
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def load(name_or_path: str | Path) -> Cluster:
        """A cluster of the catalog by name, or from a YAML file; raises InputError or UsageError with the remedy."""
        from scaletrace.extrapolate.catalog import load_cluster

        return load_cluster(name_or_path)

    @property
    def node_size(self) -> int:
        """Ranks in one innermost domain: a node, or an NVLink domain where that spans several."""
        return self.tiers[0].domain or 1

    def fills(self, ranks: int) -> bool:
        """Whether so many ranks leave no node partly filled, or share one: else the last node's few NICs set the pace."""
        return ranks <= self.node_size or ranks % self.node_size == 0

    def with_tier(self, index: int, **changes: float) -> Cluster:
        """The same cluster with some numbers of one tier changed."""
        changed = replace(self.tiers[index], **changes)  # type: ignore[arg-type]
        return replace(self, tiers=(*self.tiers[:index], changed, *self.tiers[index + 1 :]))


@dataclass(frozen=True, slots=True)
class Placement:
    """How a group lies on a cluster: members[t] of its `size` ranks share one domain of tier t; the last is `size`."""

    size: int
    members: tuple[int, ...]

    @property
    def local(self) -> int:
        """Members in one innermost domain (k: the NICs that the group owns in a node)."""
        return self.members[0]

    @property
    def nodes(self) -> int:
        """Innermost domains that the group spans."""
        return -(-self.size // self.members[0])

    @property
    def top(self) -> int:
        """Index of the highest tier that the group crosses."""
        return next(t for t, members in enumerate(self.members) if members >= self.size)

    def fewest(self, tier: int) -> int:
        """Members in the emptiest domain of `tier`: what is left for the last one."""
        return self.size % self.members[tier] or self.members[tier]

    @property
    def even(self) -> bool:
        """Whether every domain that the group spans holds as many members, on every tier."""
        return all(self.size % members == 0 for members in self.members)

    def domains(self, tier: int) -> int:
        """Domains of `tier` that the group spans."""
        return -(-self.size // self.members[tier])


def place(size: int, cluster: Cluster, stride: int = 1, per_node: int | None = None) -> Placement:
    """Lay a group of `size` ranks, `stride` apart, on the cluster; `per_node` overrides its members in a node."""
    if size < 1 or stride < 1 or (per_node is not None and per_node < 1):
        raise UsageError(
            f"a group needs size ≥ 1 and stride ≥ 1, got size {size}, stride {stride}, per node {per_node}"
        )
    base = cluster.tiers[0].domain
    members: list[int] = []
    for tier in cluster.tiers:
        if tier.domain == 0:
            inside = size
        elif per_node is None or base == 0:
            inside = max(1, tier.domain // stride)
        else:
            inside = max(1, per_node * (tier.domain // base))
        members.append(max(min(inside, size), members[-1] if members else 1))
    members[-1] = size
    return Placement(size, tuple(members))
