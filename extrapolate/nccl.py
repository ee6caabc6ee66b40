"""Turns a collective on a placed group into the times that NCCL's own tuner would compare, algorithm by algorithm.

Form and constants follow NVIDIA/nccl@5067397 (v2.30.7), src/graph/tuning.cc, with the changes since 2.8. The bandwidths
are those of the cluster's tiers: a group with k members in a domain owns k shares of the tier above (its siblings
own the others), so a ring runs at the minimum over the tiers that it crosses of k · rate, k of the emptiest domain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster, Link, Placement

US = 1e-6
PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True, slots=True)
class Term:
    """One candidate: time = local_s + remote_s + wire_s, or the plateau where that is longer.

    local_s   base latency and hops inside the innermost domain (gloo: base latency alone)
    remote_s  hops across the network (gloo: all hops)
    wire_s    bytes over bandwidth
    last_s    what the last member to end takes beside that; 0 where all end together
    plateau   the least time in units of the two latencies: until bytes take longer than that, they hide
    busy      share of wire_s in which the links are; the rest is what few channels take longer
    """

    algorithm: str
    protocol: str
    local_s: float
    remote_s: float
    wire_s: float
    last_s: float = 0.0
    plateau: float = 1.0
    busy: float = 1.0

    @property
    def seconds(self) -> float:
        latency_s = self.local_s + self.remote_s
        return latency_s + max(self.wire_s, (self.plateau - 1) * latency_s)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Latency constants of one NCCL version in µs, each for LL, LL128, Simple."""

    tree_base: tuple[float, float, float] = (6.8, 14.0, 8.4)
    ring_base: tuple[float, float, float] = (6.6, 14.0, 8.4)
    tree_nvlink: tuple[float, float, float] = (0.6, 1.25, 4.0)
    ring_nvlink: tuple[float, float, float] = (0.6, 1.9, 3.4)
    tree_net: tuple[float, float, float] = (5.0, 8.5, 14.0)
    ring_net: tuple[float, float, float] = (2.7, 4.0, 14.0)
    ring_pci: tuple[float, float, float] = (1.0, 2.5, 5.7)
    tree_pci: tuple[float, float, float] = (1.0, 1.9, 4.0)
    nvls: float = 25.0
    nvls_net: float = 18.0
    nvls_tree_net: float = 20.9
    pat_base: float = 8.0


VERSIONS: tuple[tuple[tuple[int, int], Tuning], ...] = (
    (
        (2, 8),
        Tuning(
            (4.4, 4.4, 0.0), (3.6, 10.0, 8.4), (0.52, 1.25, 28.0), (0.47, 1.9, 3.4), (5.0, 8.5, 28.0), (2.7, 4.0, 9.6)
        ),
    ),
    (
        (2, 12),
        Tuning(
            (4.4, 4.4, 0.0), (3.6, 10.0, 8.4), (0.52, 1.25, 28.0), (0.47, 1.9, 3.4), (5.0, 8.5, 28.0), (2.7, 4.0, 28.0)
        ),
    ),
    ((2, 18), Tuning(tree_base=(6.8, 14.0, 0.0), nvls=23.0, nvls_tree_net=19.0)),
    (
        (2, 21),
        Tuning(
            tree_base=(6.8, 14.0, 0.0),
            tree_nvlink=(0.6, 1.25, 28.0),
            tree_net=(5.0, 8.5, 28.0),
            nvls_tree_net=14.0,
        ),
    ),
    ((2, 24), Tuning(nvls_tree_net=14.0)),
    ((2, 30), Tuning()),
)
LL_CAP_BPS = {"volta": 39e9, "ampere": 87.7e9, "hopper": 141e9, "blackwell": 282e9}
LL_NET_CAP_BPS = {"intel": (39.0e9, 20.4e9), "amd": (22.5e9, 19.0e9), "other": (39.0e9, 20.4e9)}
NET_OVERHEAD_US = {"intel": 1.0, "amd": 2.0, "other": 1.0}
"""Over two nodes and over more; what is neither AMD nor mixed counts as Intel in ncclTopoTuneModel."""
NVLS_SHARE = {"hopper": 0.59, "blackwell": 0.53}
"""Bytes reduced a second inside the switch over link bandwidth: 480 and 846 GB/s bus at 8 GPUs (H200, B200)."""
NVLS_MIN_RANKS = {"hopper": 5, "blackwell": 6}
TREE_BANDWIDTH, LL128_BANDWIDTH, PAT_BANDWIDTH = 0.92, 0.92, 0.75
TREE_NET_MEASURED = 2.0
"""Measured over tuned latency of one level of a tree across nodes: the tuner ranks algorithms and leaves out what all
share. 1.97 from NVIDIA's NVLSTree all-reduce, 32 to 128 GPUs (GTC24 S62129, slide 35); used for both trees."""
RING_PLATEAU = 1.4
RING_PLATEAU_OLD = 1.9
"""What a step of a ring across nodes takes over its hop by Simple (ncclTopoGetAlgoTime, "Plateau effect of ring"; the
old one before Ampere). The tuner charges it to all-reduces alone, since gathers leave it no choice between algorithms."""
LL_CHANNEL_BYTES = 8 * 512
"""Bytes of one rank from which a ring with LL takes a further channel: NCCL_LL_THREAD_THRESHOLD times the threads of a
channel (threadThresholds[RING][LL] *= nRanks in ncclTopoTuneModel, used by getChannelThreadInfo and its successors)."""
CHANNELS_PER_NIC, MOST_CHANNELS = 2, 16
"""Rings across nodes: one a NIC, each twice (connect.cc), up to those of the hosts with 8 NICs that LL's caps are of."""
SIMPLE_FROM_BYTES = 1 << 20
"""Above this many bytes a collective across nodes is taken to run Simple, whatever the tuner says of LL128 (gathers
choose by bytes a rank, _gather_ring)."""


def tuning(version: str) -> Tuning:
    """The constants of the newest listed NCCL that is not newer than `version` (the oldest for older ones)."""
    parts = version.split(".")
    wanted = (int(parts[0]), int(parts[1]))
    found = VERSIONS[0][1]
    for known, constants in VERSIONS:
        if known <= wanted:
            found = constants
    return found


def ring_rate_Bps(cluster: Cluster, placed: Placement, nics: int | None = None) -> float:
    """Bus bandwidth of rings over the group: the minimum over the tiers crossed of members below · rate of a share.

    Every ring passes every domain, so the one with the fewest members, and NICs, sets the pace: the last, if partly filled.
    `nics` caps how many of a node's shares the group drives (a ring with one channel uses one).
    """
    rate = cluster.tiers[0].rate_Bps
    for t in range(1, placed.top + 1):
        below = placed.fewest(t - 1)
        shares = below if nics is None else min(below, nics * max(1, below // placed.local))
        rate = (
            min(rate, shares * cluster.tiers[t].rate_Bps)
            if placed.local > 1 or t > 1
            else shares * cluster.tiers[t].rate_Bps
        )
    return rate


def _extra_hops_s(cluster: Cluster, placed: Placement, logarithmic: bool) -> float:
    """Latency that the tiers add to NCCL's own, once for every crossing on the way (log2 of them for trees)."""
    total = cluster.tiers[0].latency_s * max(0, placed.local - 1)
    for t in range(1, placed.top + 1):
        inner, outer = placed.domains(t - 1), placed.domains(t)
        hops = math.log2(inner / outer) if logarithmic else inner - outer
        total += cluster.tiers[t].latency_s * hops
    return total


def _ring(cluster: Cluster, placed: Placement, size_bytes: float, passes: int, nics: int | None) -> list[Term]:
    """Ring in `passes` (2 for all-reduce, 1 for gather and scatter) over n-1 steps each."""
    const = tuning(cluster.nccl_version)
    n, nodes = placed.size, placed.nodes
    hop = const.ring_pci if cluster.tiers[0].link is Link.PCI else const.ring_nvlink
    inter = nodes - 1
    bus = ring_rate_Bps(cluster, placed, nics)
    old = cluster.device.generation == "volta"
    out = []
    for p, protocol in enumerate(PROTOCOLS):
        overhead = NET_OVERHEAD_US[cluster.cpu] * (3 if protocol == "Simple" else 1) if nodes > 1 else 0.0
        local = passes * (n - 1 - inter) * max(hop[p], overhead) * US
        remote = passes * (inter * const.ring_net[p] * US + _extra_hops_s(cluster, placed, False))
        if protocol == "Simple" and passes == 2 and nodes > 1:
            plateau = RING_PLATEAU_OLD if old else RING_PLATEAU
            local, remote = local * plateau, remote * plateau
        rate = bus
        if protocol == "LL":
            rate = min(bus / 2, _ll_cap_Bps(cluster, nodes))
        elif protocol == "LL128":
            rate = bus * LL128_BANDWIDTH
        out.append(
            Term("ring", protocol, const.ring_base[p] * US + local, remote, passes * size_bytes * (n - 1) / n / rate)
        )
    return out


def _gather_ring(cluster: Cluster, placed: Placement, size_bytes: float, nics: int | None) -> list[Term]:
    """Ring of a gather or scatter. Across nodes with the protocol that NCCL's table prefers, and as long as that takes.

    LL128, where a build enables it across nodes, is not in the choice: published gathers of 16 to 64 KiB a rank take
    twice as long as it would. Steps of Simple take at least the plateau of the ring, in which their bytes hide.
    """
    terms = _ring(cluster, placed, size_bytes, 1, nics)
    if placed.nodes == 1:
        return terms
    plateau = RING_PLATEAU_OLD if cluster.device.generation == "volta" else RING_PLATEAU
    return [*_gather_ll(cluster, placed, size_bytes, nics), replace(terms[2], plateau=plateau)]


def _gather_ll(cluster: Cluster, placed: Placement, size_bytes: float, nics: int | None) -> list[Term]:
    """LL of a gather across nodes, up to the bytes from which NCCL's table has Simple faster, and somewhat beyond.

    The table has LL as fast with few channels as with all. In truth a step takes the same time until all are there, as
    each of them moves the same bytes. So Simple takes longer at the switch than LL. Where exactly a build switches is
    not known that well, and one rank more, with fewer bytes each, must not make all faster: the rise is spread over as
    many more bytes. A node that is not full counts as a part of one, as otherwise its first rank would do that too.
    """
    const = tuning(cluster.nccl_version)
    hop_us = const.ring_pci if cluster.tiers[0].link is Link.PCI else const.ring_nvlink
    overhead_us = NET_OVERHEAD_US[cluster.cpu]
    low_us, high_us = max(hop_us[0], overhead_us), max(hop_us[2], 3 * overhead_us)
    inside, across = placed.size - placed.size / placed.local, placed.size / placed.local - 1
    cap, bus = _ll_cap_Bps(cluster, placed.nodes), ring_rate_Bps(cluster, placed, nics)
    # The table knows the links of the hosts, not what the switches above them hold back.
    hosts = Placement(2 * placed.local, (placed.local, *(2 * placed.local for _ in placed.members[1:])))
    links = ring_rate_Bps(cluster, hosts, nics)
    gained_us = (placed.local - 1) * (high_us - low_us) + const.ring_net[2] - const.ring_net[0]
    switch_bytes = gained_us * US / placed.local / (1 / min(links / 2, cap) - 1 / links)
    if switch_bytes <= 0:
        return []
    part_bytes = size_bytes / placed.size
    more = max(1.0, part_bytes / switch_bytes)
    channels = min(MOST_CHANNELS, CHANNELS_PER_NIC * min(placed.local, nics or placed.local))
    used = min(channels, max(1.0, min(part_bytes, switch_bytes) / LL_CHANNEL_BYTES))
    rate = min(bus / 2, cap * used / channels)
    local_s = (const.ring_base[0] + inside * low_us * more) * US
    remote_s = across * const.ring_net[0] * more * US + _extra_hops_s(cluster, placed, False)
    wire_s = size_bytes * (placed.size - 1) / placed.size / rate
    return [Term("ring", "LL", local_s, remote_s, wire_s, busy=2 * rate / bus)]


def _ll_cap_Bps(cluster: Cluster, nodes: int) -> float:
    if nodes == 1:
        return LL_CAP_BPS.get(cluster.device.generation, LL_CAP_BPS["hopper"])
    return LL_NET_CAP_BPS[cluster.cpu][0 if nodes == 2 else 1]


def _tree(cluster: Cluster, placed: Placement, size_bytes: float, nics: int | None) -> list[Term]:
    """Double binary tree across nodes, a chain inside each."""
    const = tuning(cluster.nccl_version)
    hop = const.tree_pci if cluster.tiers[0].link is Link.PCI else const.tree_nvlink
    n, nodes = placed.size, placed.nodes
    bus = ring_rate_Bps(cluster, placed, nics)
    # Between two nodes each sends the vector once, where a ring sends it almost twice.
    wire_share = 2 * (n - 1) / n if nodes == 2 else 1.0
    rate = min(cluster.tiers[0].rate_Bps, bus * wire_share) if placed.local > 1 else bus * wire_share
    out = []
    for p, protocol in enumerate(PROTOCOLS):
        local = const.tree_base[p] + 2 * (placed.local - 1) * hop[p]
        remote = 2 * (
            math.log2(nodes) * TREE_NET_MEASURED * const.tree_net[p] * US + _extra_hops_s(cluster, placed, True)
        )
        share = TREE_BANDWIDTH
        if protocol == "LL":
            share = min(1 / 3.8, _ll_cap_Bps(cluster, nodes) / rate)
        elif protocol == "LL128":
            share = 7 / 9 if nodes == 1 else 120 / 128
        out.append(Term("tree", protocol, local * US, remote, 2 * size_bytes * (n - 1) / n / (rate * share)))
    return out


def _nvls(cluster: Cluster, placed: Placement, size_bytes: float, nics: int | None) -> list[Term]:
    """Reduction inside the NVLink switch, with a tree above it where the group spans several domains."""
    generation = cluster.device.generation
    if not cluster.nvls or generation not in NVLS_SHARE or placed.local < NVLS_MIN_RANKS[generation]:
        return []
    const = tuning(cluster.nccl_version)
    inside = size_bytes / (NVLS_SHARE[generation] * cluster.tiers[0].bandwidth_Bps)
    if placed.nodes == 1:
        return [Term("nvls", "Simple", const.nvls * US, 0.0, inside)]
    n = placed.size
    bus = ring_rate_Bps(cluster, placed, nics)
    across = (2 if placed.nodes > 2 else 1) * size_bytes * (n - 1) / n / bus
    remote = 2 * (
        math.log2(placed.nodes) * TREE_NET_MEASURED * const.nvls_tree_net * US + _extra_hops_s(cluster, placed, True)
    )
    return [Term("nvls_tree", "Simple", (8.4 + const.nvls) * US, remote, max(inside, across))]


def _pat(cluster: Cluster, placed: Placement, size_bytes: float) -> list[Term]:
    """Parallel aggregated trees for all-gather and reduce-scatter, only with one rank a node and since 2.23."""
    version = tuple(int(part) for part in cluster.nccl_version.split(".")[:2])
    if placed.local > 1 or placed.nodes < 2 or version < (2, 23):
        return []
    const = tuning(cluster.nccl_version)
    n = placed.size
    remote = math.log2(n) * const.ring_net[2] / 3.5 * US + _extra_hops_s(cluster, placed, True)
    wire = size_bytes * (n - 1) / n / (PAT_BANDWIDTH * ring_rate_Bps(cluster, placed))
    return [Term("pat", "Simple", (const.pat_base + 2.8 * n) * US, remote, wire)]


def _all_to_all(cluster: Cluster, placed: Placement, size_bytes: float) -> list[Term]:
    """Pairwise exchange: every tier carries what leaves the domains below it, all at once, so the slowest counts."""
    const = tuning(cluster.nccl_version)
    n = placed.size
    wire = 0.0
    for t, tier in enumerate(cluster.tiers[: placed.top + 1]):
        stays = placed.fewest(t - 1) if t else 1
        wire = max(wire, size_bytes * (n - stays) / n / tier.rate_Bps)
    remote = const.ring_net[2] * US + _extra_hops_s(cluster, placed, True) if placed.nodes > 1 else 0.0
    return [Term("pairwise", "Simple", (const.ring_base[2] + const.ring_nvlink[2]) * US, remote, wire)]


def _point_to_point(cluster: Cluster, placed: Placement, size_bytes: float) -> list[Term]:
    """One message between two ranks as far apart as the group's members are."""
    const = tuning(cluster.nccl_version)
    top = placed.top
    remote = const.ring_net[2] * US + sum(tier.latency_s for tier in cluster.tiers[1 : top + 1]) if top else 0.0
    rate = min(tier.rate_Bps for tier in cluster.tiers[: top + 1])
    return [
        Term(
            "p2p", "Simple", (const.ring_base[2] + (0 if top else const.ring_nvlink[2])) * US, remote, size_bytes / rate
        )
    ]


def _chain(cluster: Cluster, placed: Placement, size_bytes: float, nics: int | None) -> list[Term]:
    """Broadcast and reduce run down the ring, pipelined: the latency of n-1 hops, the bytes once."""
    n = placed.size
    return [
        Term("chain", term.protocol, term.local_s, term.remote_s, term.wire_s * n / max(1, n - 1))
        for term in _ring(cluster, placed, size_bytes, 1, nics)
    ]


def candidates(
    kind: str, size_bytes: float, placed: Placement, cluster: Cluster, nics: int | None = None
) -> list[Term]:
    """All ways in which NCCL could run `kind` (KINDS of the job) with `size_bytes`, before any calibration.

    `size_bytes` is the whole vector: the output of an all-gather, the input of a reduce-scatter, what one rank sends
    in an all-to-all, the message otherwise.
    """
    if placed.size == 1:
        return [Term("none", "Simple", 0.0, 0.0, 0.0)]
    if kind == "all_reduce":
        terms = _ring(cluster, placed, size_bytes, 2, nics) + _tree(cluster, placed, size_bytes, nics)
        terms += _nvls(cluster, placed, size_bytes, nics)
    elif kind in ("all_gather", "reduce_scatter"):
        return _gather_ring(cluster, placed, size_bytes, nics) + _pat(cluster, placed, size_bytes)
    elif kind in ("broadcast", "reduce"):
        terms = _chain(cluster, placed, size_bytes, nics)
    elif kind in ("all_to_all", "gather", "scatter"):
        terms = _all_to_all(cluster, placed, size_bytes)
    elif kind in ("send", "recv"):
        terms = _point_to_point(cluster, placed, size_bytes)
    elif kind == "barrier":
        terms = _tree(cluster, placed, 4.0, nics)
    else:
        raise UsageError(f"no cost model for a collective of kind {kind!r}")
    if placed.nodes > 1 and size_bytes > SIMPLE_FROM_BYTES:
        terms = [term for term in terms if term.protocol == "Simple"]
    return terms
