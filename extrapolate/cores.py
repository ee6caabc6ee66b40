"""Turns where the ranks of a job ran into who shared cores or devices with whom, and what that leaves open of other sizes.

Ranks that compute on the CPU slow each other on one host, and by how much more or fewer of them would is in no trace of
one size: a step over two ranks of 34 ms took 117 ms over four on the same two cores, where four hosts would have taken 40.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.parse.build import Built
from scaletrace.parse.manifest import cpus_in, hosts_in


@dataclass(frozen=True, slots=True)
class Crowd:
    """How ranks shared cores or devices: `most` of them on one of `hosts` hosts, which has `cpus` (0 not known).

    sliced  ranks whose device another process shared
    domain  ranks on a host of the cluster that was named; 0 where none was, so that other sizes may lie on the same hosts
    """

    most: int
    hosts: int
    cpus: int
    domain: int
    sliced: tuple[int, ...] = ()

    def on_a_host(self, ranks: int) -> int:
        """How many of so many ranks a host holds."""
        return min(ranks, self.domain) if self.domain else -(-ranks // self.hosts)

    def untold(self, ranks: int) -> str:
        """Why a band says nothing at a size where more (or, on the same hosts, fewer) ranks share a host's cores; "" where
        it does: a rank on a host of its own has at least the cores that it had."""
        if self.sliced:
            names = ", ".join(map(str, self.sliced))
            return (
                f"another process shared the device of rank{'s' * (len(self.sliced) > 1)} {names}; whether one does "
                "elsewhere is in no number, so low and high cover what was measured alone"
            )
        there = self.on_a_host(ranks)
        if there == self.most or (self.domain and there < self.most):
            return ""
        return (
            f"{self.most} ranks shared the cores of one host; that {there} of them have {'fewer' * (there > self.most)}"
            f"{'more' * (there < self.most)} each is in no number, so low and high cover what was measured alone"
        )

    def note(self) -> str:
        """What the reader should know before any other size; "" where the graph's own note says it."""
        if self.sliced:
            return ""
        cpus = f" of {self.cpus} CPUs" if self.cpus else ""
        said = (
            f"{self.most} ranks ran on one host{cpus} and shared its cores. Every size is that of ranks with as many cores "
            "each as these had: what more ranks on the same host take from each other is not predicted"
        )
        if self.domain:
            return f"{said}."
        return f"{said}, and the band of other sizes is left open (?). Name where they will run with --cluster (gloo_10g: one rank a host)."


def crowd_of(built: Built, cluster: Cluster | None) -> Crowd | None:
    """How ranks without devices shared cores, or which devices other processes shared; None where no record tells either.

    cluster: the one that the user named for other sizes.
    """
    job = built.job
    if built.quality.time_sliced_ranks:
        return Crowd(0, 0, 0, 0, built.quality.time_sliced_ranks)
    if any(lane.is_device for lane in built.graph.lanes):
        return None
    stated = hosts_in(job.manifest)
    names = Counter(name for trace in job.ranks if (name := stated.get(trace.rank, trace.host)))
    most = max(names.values(), default=0)
    if most < 2 or names.total() < len(job.ranks):
        return None
    cpus = cpus_in(job.manifest)
    fewest = min((cpus[trace.rank] for trace in job.ranks if trace.rank in cpus), default=0)
    return Crowd(most, len(names), fewest, cluster.node_size if cluster is not None else 0)
