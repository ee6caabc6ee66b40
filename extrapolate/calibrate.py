"""Turns measured transfers into multipliers on the cost model, shrunk toward the prior where evidence is thin.

For each family of collectives and each reach (inside a node, across) three multipliers are sought, on latency inside,
latency across and bytes over bandwidth, that maximise the posterior of log-times: a robust (Huber) likelihood with a
noise of `NOISE`, and a normal prior around log 1. Two sizes can't tell latency from bandwidth: the prior then decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scaletrace.errors import InputError
from scaletrace.extrapolate import gloo, nccl
from scaletrace.extrapolate.cluster import Cluster, Placement, place
from scaletrace.extrapolate.costs import ANY, FAMILY, NOT_TREE, Calibration, Fit, FitKey, is_as_seen
from scaletrace.extrapolate.nccl import Term

Floats = npt.NDArray[np.float64]
NOISE = 0.05
HUBER = 1.5
PRIOR_SD = np.array([0.7, 0.7, 0.3])
GLOO_PRIOR_SD = np.array([1.0, 0.7, 2.0])
"""gloo's rates depend on the host far more than NCCL's on the fabric, so their prior is only an order of magnitude, and
so does what a call takes beside its hops. Groups of one or two sizes hardly tell that from the hops: then both are
drawn to their priors, and the doubt about their shares widens the band of larger groups (Fit.doubt)."""
ITERATIONS = 60
LARGEST_HOST = 16
"""Accelerators of one host at most (DGX-2); the innermost domain of a larger one spans hosts, as in NVL72."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured transfer: `seconds` from the last arrival to the end; `algorithm` where the kernel's name tells
    (costs.NOT_TREE where it only rules the tree out).

    `per_node` counts the members on one host where that is known. `size_bytes` is the whole vector, as in costs.collective_seconds; `weight` counts how often it was seen.
    """

    kind: str
    size_bytes: float
    ranks: int
    seconds: float
    stride: int = 1
    per_node: int | None = None
    algorithm: str = ""
    weight: float = 1.0


def calibrate(evidence: Iterable[Evidence], cluster: Cluster) -> Calibration:
    """Fit all families and reaches that the evidence covers; sizes and times that are not positive are refused."""
    groups: dict[tuple[str, bool], list[tuple[Evidence, Placement]]] = defaultdict(list)
    for item in evidence:
        if not (item.seconds > 0 and item.size_bytes > 0):
            raise InputError(f"evidence needs positive bytes and seconds, got {item.size_bytes} and {item.seconds}")
        if item.kind not in FAMILY or item.ranks < 2:
            continue
        hosts_are_domains = cluster.node_size <= LARGEST_HOST
        placed = place(item.ranks, cluster, item.stride, item.per_node if hosts_are_domains else None)
        groups[FAMILY[item.kind], placed.top > 0].append((item, placed))
    fits: dict[FitKey, Fit] = {}
    algorithms: dict[tuple[str, bool], str] = {}
    for (family, crosses), items in groups.items():
        named = {item.algorithm for item, _ in items if item.algorithm}
        seen = next(iter(named)) if len(named) == 1 else ""
        if seen and (seen != NOT_TREE or _mostly_trees(items, cluster)):
            algorithms[family, crosses] = seen
        fits[family, "", crosses] = _fit(items, cluster, seen)
    if cluster.backend == "gloo":
        fits |= _shared(fits)
    return Calibration(fits, algorithms)


def _mostly_trees(items: Sequence[tuple[Evidence, Placement]], cluster: Cluster) -> bool:
    """Whether the tuner's form would have chosen trees where the trace shows none: then they are off at other sizes too."""
    fastest = [min(_options(item, placed, cluster, "any"), key=lambda term: term.seconds) for item, placed in items]
    return sum(term.algorithm == "tree" for term in fastest) > len(fastest) / 2


def _shared(fits: dict[FitKey, Fit]) -> dict[FitKey, Fit]:
    """For each reach what its families have in common, for those without evidence: over TCP all share one transport."""
    out: dict[FitKey, Fit] = {}
    for crosses in (False, True) if fits else ():
        found = [fit for key, fit in fits.items() if key[2] == crosses] or list(fits.values())
        logs = np.log([(fit.local, fit.remote, fit.wire) for fit in found])
        local, remote, wire = np.exp(np.average(logs, axis=0, weights=[fit.count for fit in found])).tolist()
        out[ANY, "", crosses] = Fit(local, remote, wire)
    return out


def _fit(items: Sequence[tuple[Evidence, Placement]], cluster: Cluster, algorithm: str) -> Fit:
    """Choose the algorithm by the prior, fit, choose again with the multipliers, until the choice stands."""
    seconds = np.array([item.seconds for item, _ in items])
    weight = np.array([item.weight for item, _ in items])
    options = [_options(item, placed, cluster, item.algorithm or algorithm) for item, placed in items]
    prior_sd = GLOO_PRIOR_SD if cluster.backend == "gloo" else PRIOR_SD
    logs = np.zeros(3)
    chosen: Floats | None = None
    for _ in range(8):
        parts = np.array([_fastest(terms, np.exp(logs)) for terms in options])
        if chosen is not None and np.array_equal(parts, chosen):
            break
        chosen = parts
        logs = _posterior(parts, seconds, weight, prior_sd)
    if chosen is None:
        raise RuntimeError("no evidence")  # calibrate() makes no empty group
    error = np.abs(np.log(chosen @ np.exp(logs) / seconds))
    sizes = [item.size_bytes for item, _ in items]
    ranks = [item.ranks for item, _ in items]
    parts_bytes = [item.size_bytes / item.ranks for item, _ in items]
    local, remote, wire = np.exp(logs).tolist()
    residual = float(np.median(error) * 1.4826)
    shares = chosen * np.exp(logs)
    shares /= shares.sum(axis=1)[:, None]
    return Fit(
        local, remote, wire,
        residual=residual,
        count=len(items),
        sizes_bytes=(min(sizes), max(sizes)),
        ranks=(min(ranks), max(ranks)),
        seen=frozenset((item.ranks, placed.local, int(item.size_bytes)) for item, placed in items),
        parts_bytes=(min(parts_bytes), max(parts_bytes)),
        members=(min(placed.local for _, placed in items), max(placed.local for _, placed in items)),
        top=max(placed.top for _, placed in items),
        ends=(tuple(shares[np.argmin(parts_bytes)].tolist()), tuple(shares[np.argmax(parts_bytes)].tolist())),
        covariance=tuple(_covariance(shares, weight, residual, prior_sd).ravel().tolist()),
    )  # fmt: skip


def _options(item: Evidence, placed: Placement, cluster: Cluster, seen: str) -> list[Term]:
    """The candidates for a measured transfer: those that are as seen, or all where none is."""
    terms = (
        gloo.candidates(item.kind, item.size_bytes, placed, cluster)
        if cluster.backend == "gloo"
        else nccl.candidates(item.kind, item.size_bytes, placed, cluster)
    )
    return [term for term in terms if is_as_seen(term.algorithm, seen)] or terms


def _fastest(terms: Sequence[Term], multipliers: Floats) -> tuple[float, float, float]:
    """The parts of the fastest term; of one on its plateau the latencies as often as that has them, and no bytes."""
    local, remote, wire = multipliers.tolist()
    corrected = [
        (replace(term, local_s=term.local_s * local, remote_s=term.remote_s * remote, wire_s=term.wire_s * wire), term)
        for term in terms
    ]
    now, best = min(corrected, key=lambda pair: pair[0].seconds)
    latency_s = now.local_s + now.remote_s
    if now.wire_s < (best.plateau - 1) * latency_s:
        return best.plateau * best.local_s, best.plateau * best.remote_s, 0.0
    return best.local_s, best.remote_s, best.wire_s


def _posterior(parts: Floats, seconds: Floats, weight: Floats, prior_sd: Floats) -> Floats:
    """Gauss-Newton on the logs of the multipliers; parts float64[m, 3], seconds float64[m]."""
    logs = np.zeros(3)
    scale = np.sqrt(weight / weight.mean()) / NOISE
    for _ in range(ITERATIONS):
        shares = parts * np.exp(logs)
        total = shares.sum(axis=1)
        residual = np.log(total / seconds) * scale
        slope = shares / total[:, None] * scale[:, None]
        robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))
        hessian = slope.T @ (robust[:, None] * slope) + np.diag(prior_sd**-2.0)
        step = np.linalg.solve(hessian, slope.T @ (robust * residual) + logs / prior_sd**2)
        logs = logs - np.clip(step, -0.5, 0.5)
        if np.max(np.abs(step)) < 1e-9:
            break
    return logs


def _covariance(shares: Floats, weight: Floats, residual: float, prior_sd: Floats) -> Floats:
    """Covariance of the logs of the multipliers, float64[3, 3]; shares float64[m, 3]: of each part in a cost.

    The noise is what the fit leaves over, but never taken to be less than NOISE.
    """
    scale = np.sqrt(weight / weight.mean()) / max(NOISE, residual)
    slope = shares * scale[:, None]
    return np.asarray(np.linalg.inv(slope.T @ slope + np.diag(prior_sd**-2.0)))
