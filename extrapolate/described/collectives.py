"""Turns a payload and a group's shape into seconds, by NCCL's own latency and bandwidth form (constants.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scaletrace.extrapolate import cluster, nccl
from scaletrace.extrapolate.described.constants import (
    NCCL_BASE_S,
    RING_MULTINODE_FACTOR,
    RING_NETWORK_HOP_S,
    RING_NVLINK_HOP_S,
    SEND_RECV_S,
    TREE_BANDWIDTH_SHARE,
    TREE_NETWORK_HOP_S,
    TREE_NVLINK_HOP_S,
    Device,
)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """`size` ranks, `per_node` of them on each node. `nic_cap_Bps` bounds the network rate where a fact says so.

    Sibling groups are active together, so a group with k members a node owns k of the node's NICs. A job that gave its
    ring one channel, or one NIC a node, states that as `nic_cap_Bps`; nothing in a small run tells it.
    """

    size: int
    per_node: int
    nic_cap_Bps: float = math.inf

    @property
    def members_per_node(self) -> int:
        return max(1, min(self.per_node, self.size))

    @property
    def nodes(self) -> int:
        return max(1, math.ceil(self.size / self.members_per_node))


def bus_Bps(device: Device, group: GroupShape) -> float:
    """Bus bandwidth of one ring of the group, in bytes a second."""
    nvlink = device.nvlink_share * device.nvlink_Bps
    if group.nodes == 1:
        return nvlink
    network = group.members_per_node * device.nic_share * device.nic_Bps
    return min(nvlink, network, group.nic_cap_Bps)


def ring_latency_s(group: GroupShape) -> float:
    """Latency of size - 1 ring steps, of which nodes - 1 cross the network."""
    if group.size <= 1:
        return 0.0
    network_hops = group.nodes - 1
    return NCCL_BASE_S + (group.size - 1 - network_hops) * RING_NVLINK_HOP_S + network_hops * RING_NETWORK_HOP_S


def all_gather_s(device: Device, size_bytes: float, group: GroupShape) -> float:
    """All-gather with `size_bytes` of output, or reduce-scatter with as much input: ring only, latency linear in ranks."""
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    return size_bytes * (group.size - 1) / group.size / bus_Bps(device, group) + ring_latency_s(group)


def gather_as_run_s(device: Device, size_bytes: float, group: GroupShape) -> float:
    """The same as NCCL runs it (extrapolate/nccl.py): by LL or Simple, with LL's channels and the plateau of rings.

    Written traces take this, so that a stretched trace meets a written one. Steps that are modelled as a whole keep
    `all_gather_s`, with which what overlap costs was fitted (interference.py).
    """
    if group.nodes == 1 or size_bytes <= 0 or group.nic_cap_Bps < math.inf:
        return all_gather_s(device, size_bytes, group)
    described = cluster.Cluster(
        device.name,
        cluster.Device(device.name, device.generation, device.bf16_flop_s, device.hbm_bytes, device.hbm_Bps, 0.0),
        (
            cluster.Tier("node", cluster.Link.NVLINK, device.gpus_per_node, device.nvlink_Bps, device.nvlink_share),
            cluster.Tier("network", cluster.Link.NETWORK, 0, device.nic_Bps, device.nic_share),
        ),
    )
    placed = cluster.place(group.size, described, per_node=group.members_per_node)
    return min(term.seconds for term in nccl.candidates("all_gather", size_bytes, placed, described))


def broadcast_s(device: Device, size_bytes: float, group: GroupShape) -> float:
    """Broadcast or reduce of `size_bytes`: a pipelined ring passes each byte once over every link.

    The tuner counts `size` steps for these two, `nodes` of them across the network (tuning.cc: nsteps, nInterSteps).
    """
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    one_more_hop = RING_NETWORK_HOP_S if group.nodes > 1 else RING_NVLINK_HOP_S
    return size_bytes / bus_Bps(device, group) + ring_latency_s(group) + one_more_hop


def all_reduce_s(device: Device, size_bytes: float, group: GroupShape) -> float:
    """All-reduce of `size_bytes`: the faster of ring and tree."""
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    bandwidth = bus_Bps(device, group)
    hops = 2 * (ring_latency_s(group) - NCCL_BASE_S)
    ring = NCCL_BASE_S + 2 * size_bytes * (group.size - 1) / group.size / bandwidth
    if group.nodes == 1:
        return ring + hops
    ring += hops * RING_MULTINODE_FACTOR
    depth = (group.members_per_node - 1) * TREE_NVLINK_HOP_S + math.log2(group.nodes) * TREE_NETWORK_HOP_S
    tree = NCCL_BASE_S + 2 * depth + 2 * size_bytes / (TREE_BANDWIDTH_SHARE * bandwidth)
    return min(ring, tree)


def all_to_all_s(device: Device, size_bytes: float, group: GroupShape) -> float:
    """All-to-all of `size_bytes` a rank: pairwise sends; the slower of the NVLink and the network share bounds it."""
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    inside = group.members_per_node - 1
    outside = group.size - group.members_per_node
    per_peer = size_bytes / group.size
    nvlink = per_peer * inside / (device.nvlink_share * device.nvlink_Bps)
    network = per_peer * outside / min(device.nic_share * device.nic_Bps, group.nic_cap_Bps)
    return SEND_RECV_S + max(nvlink, network)


def send_s(device: Device, size_bytes: float, across_nodes: bool) -> float:
    """One point-to-point message between two GPUs."""
    rate = device.nic_share * device.nic_Bps if across_nodes else device.nvlink_share * device.nvlink_Bps
    return SEND_RECV_S + size_bytes / rate
