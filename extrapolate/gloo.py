"""Turns a collective on a placed group into the time that gloo takes over TCP.

Algorithms as torch 2.13 runs them: all-reduce and all-gather are rings, broadcast and reduce binomial trees, barrier a
dissemination. ProcessGroupGloo reduces and scatters by an all-reduce of the whole vector followed by a copy.
"""

from __future__ import annotations

import math

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster, Placement
from scaletrace.extrapolate.nccl import Term

QUEUED_BYTES = 128 << 10
"""What Linux lets one connection put into the queue of a link: two segments of 64 kB (TCP small queues)."""
BASE_S = 15e-6
"""What a call takes beside its hops: its way to gloo's thread and back. The shortest tenth of all-reduces of one number
over a single rank, which sends nothing (torch 2.13, 2 cores of an AMD EPYC)."""


def _hop_s(cluster: Cluster, placed: Placement) -> float:
    """Latency of the slowest hop that a step of the ring takes: all its hops run at once."""
    return max(tier.latency_s for tier in cluster.tiers[: placed.top + 1])


def ring_rate_Bps(cluster: Cluster, placed: Placement) -> float:
    """Rate of one ring: a rank sends to one neighbour only, so a crossing carries one stream, whatever it owns there.

    Sibling groups that cross a tier at the same time share it: each member below brings its own share.
    """
    return min(
        tier.rate_Bps * (placed.fewest(t - 1) if t else 1) for t, tier in enumerate(cluster.tiers[: placed.top + 1])
    )


def _split(
    cluster: Cluster, placed: Placement, steps: float, wire_s: float, algorithm: str, last_s: float = 0.0
) -> Term:
    """local_s is the base of the call, remote_s its hops, so that evidence can tell one from the other."""
    return Term(algorithm, "tcp", BASE_S, steps * _hop_s(cluster, placed), wire_s, last_s)


def candidates(kind: str, size_bytes: float, placed: Placement, cluster: Cluster) -> list[Term]:
    """The one way in which gloo runs `kind`; `size_bytes` as in nccl.candidates."""
    n = placed.size
    if n == 1:
        return [Term("none", "tcp", 0.0, 0.0, 0.0)]
    rate = ring_rate_Bps(cluster, placed)
    if kind in ("all_reduce", "reduce_scatter"):
        return [_split(cluster, placed, 2 * (n - 1), 2 * size_bytes * (n - 1) / n / rate, "ring")]
    if kind == "all_gather":
        # Shards travel in halves, each sent once its receiver has announced that it is ready. The rank that comes last
        # sends at once, as its neighbour is ready, and its own announcement stands behind what it sends: behind half a
        # shard on the one connection that two ranks have, else behind what the host has queued for its link.
        half = size_bytes / (2 * n)
        behind = half if n == 2 else min(half, QUEUED_BYTES)
        return [_split(cluster, placed, n - 1, size_bytes * (n - 1) / n / rate, "ring", behind / rate)]
    if kind in ("broadcast", "reduce"):
        rounds = math.ceil(math.log2(n))
        return [_split(cluster, placed, rounds, rounds * size_bytes / rate, "binomial")]
    if kind in ("all_to_all", "gather", "scatter"):
        return [_split(cluster, placed, n - 1, size_bytes * (n - 1) / n / rate, "pairwise")]
    if kind in ("send", "recv"):
        return [_split(cluster, placed, 1, size_bytes / rate, "p2p")]
    if kind == "barrier":
        return [_split(cluster, placed, math.ceil(math.log2(n)), 0.0, "dissemination")]
    raise UsageError(f"no cost model for a collective of kind {kind!r}")
