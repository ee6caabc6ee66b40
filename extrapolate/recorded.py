"""Turns what is known of the network that a trace was recorded on into costs of its transfers on another of its kind.

By default a trace counts as recorded on the cluster that it is stretched on. It is not where the user says so, nor where
its transfers ran faster than that cluster's links can: then they are carried over by the ratio of the two models, each
with what the trace tells of its hosts. The same machines on links of other rates are meant, so latencies keep their
multipliers; so does the bandwidth where the link decided it, and where the hosts did, they keep their rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaletrace.extrapolate import gloo
from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster, Tier, place
from scaletrace.extrapolate.costs import Calibration, Fit
from scaletrace.extrapolate.origin import on_network
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.health import Health

LARGE_BYTES = 256 << 10
"""What a rank receives of vectors of this size takes longer than a host's clock and scheduler get wrong."""
FASTER = 1.25
"""Transfers that ran at so many times the line rate of a link did not run over it; limited links let bursts through."""
HOST_BOUND = 1.5
"""Where transfers took so many times as long as their link allows, hosts set their pace, not the link."""
NETWORK_ERROR = 0.1
"""Relative error (1 sigma) of a cost carried to another network, beside that of its fit: as for compute on another GPU
(origin.DEVICE_ERROR), since nothing of it was measured there."""


def beyond_line_rate(found: Sequence[Evidence], cluster: Cluster) -> float:
    """Times the line rate at which large transfers over gloo ran, the median; 0.0 where none was large enough."""
    plain = replace(cluster, tiers=tuple(replace(tier, efficiency=1.0) for tier in cluster.tiers))
    speeds = []
    for item in found:
        placed = place(item.ranks, plain, item.stride, item.per_node)
        if item.size_bytes >= LARGE_BYTES and item.kind not in ("barrier", "send", "recv"):
            term = min(gloo.candidates(item.kind, item.size_bytes, placed, plain), key=lambda term: term.seconds)
            speeds.append(term.wire_s / item.seconds)
    return float(np.median(speeds)) if speeds else 0.0


def seen_on(found: Sequence[Evidence], cluster: Cluster, health: Health) -> Cluster:
    """The cluster, or one with links as fast as a trace's gloo transfers ran, where its own can't have carried them."""
    times = beyond_line_rate(found, cluster) if cluster.backend == "gloo" else 0.0
    if times < FASTER:
        return cluster
    health.note(
        f"Transfers of the trace ran at {times:.3g} times the line rate of {cluster.name}, so it was not recorded there; "
        "it is taken for a network of that rate. Name it with --recorded-on."
    )
    return faster(cluster, times)


def carry(
    graph: Graph,
    alone_ns: IntArray,
    here: Cluster,
    there: Cluster,
    fitted: Calibration,
    more: Sequence[Evidence],
    same_hosts: bool,
    health: Health,
) -> tuple[Graph, Calibration]:
    """The graph with its transfers as they would be `there`, and what is known of costs there.

    alone_ns    int64[n], of transfers as they would be alone on their rank's link
    fitted      what the trace tells of costs `here`;  more  evidence of `there`
    same_hosts  only links differ, so that what the trace tells of hosts stays
    """
    kept = carried(fitted, here, there) if same_hosts and here.backend == there.backend else Calibration()
    spent = np.where(graph.kind == NodeKind.TRANSFER, alone_ns, graph.dur_ns)
    graph = replace(graph, dur_ns=on_network(graph, spent, here, fitted, there, kept if kept.fits else None))
    own = calibrate(more, there)
    if same_hosts:
        health.note(
            f"CARRIED: recorded on {here.name}, predicted for {there.name}: transfers follow the ratio of the models of "
            "the two networks, so even the measured size is modelled."
        )
    return graph, Calibration({**kept.fits, **own.fits}, {**kept.algorithms, **own.algorithms})


def faster(cluster: Cluster, times: float) -> Cluster:
    """The cluster with links of so many times their rates: what a trace looks to have been recorded on."""
    tiers = tuple(replace(tier, bandwidth_Bps=tier.bandwidth_Bps * times) for tier in cluster.tiers)
    return replace(cluster, name=f"{cluster.name} with {times:.3g} times its rates", tiers=tiers)


def same_network(one: Cluster, other: Cluster) -> bool:
    """Whether two clusters join their ranks alike, whatever they and their tiers are called."""
    return one.backend == other.backend and [_link(tier) for tier in one.tiers] == [_link(tier) for tier in other.tiers]


def _link(tier: Tier) -> tuple[object, ...]:
    return tier.link, tier.domain, tier.rate_Bps, tier.latency_s


def carried(calibration: Calibration, here: Cluster, there: Cluster) -> Calibration:
    """What a trace recorded `here` tells of the same hosts `there`: nothing of it was measured there."""
    fits = {key: _carried(fit, key[2], here, there) for key, fit in calibration.fits.items()}
    return replace(calibration, fits=fits)


def _carried(fit: Fit, crosses: bool, here: Cluster, there: Cluster) -> Fit:
    was, now = (_tier(cluster, fit, crosses) for cluster in (here, there))
    wire = fit.wire
    if wire > HOST_BOUND:
        wire = max(1.0, wire * now.rate_Bps / was.rate_Bps)
    wire = max(wire, now.efficiency)
    residual = float(np.hypot(fit.residual, NETWORK_ERROR))
    return replace(fit, wire=wire, residual=residual, seen=frozenset())


def _tier(cluster: Cluster, fit: Fit, crosses: bool) -> Tier:
    """The slowest tier that the evidence of a fit used."""
    top = min(max(fit.top, int(crosses)), len(cluster.tiers) - 1)
    return min(cluster.tiers[: top + 1], key=lambda tier: tier.rate_Bps)
