"""Turns the shares of a replayed step into parts that add up to it, what communication costs of them, and its largest part.

What kernels lose to a collective beside them is a cost of communication, as the wait for one is: were it counted as
compute, communication would weigh the less the dearer its overlap is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scaletrace.extrapolate.steps import Shares

PACED = 0.5
"""From this share of the critical path on the host sets the pace, however busy the device is beside it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Shares of the mean rank's step, losses to stragglers included; the first five add up to 1.

    compute         kernels at the rate that they have with nothing beside them
    slowed_compute  what they take longer for collectives beside them
    exposed_comm    a collective is resident and nothing computes;  host: neither, the host and all else
    by_axis         what communication of each axis costs: exposed, and its part of slowed_compute by how long it is hidden
    path            shares of the critical path (replay.critical_path); empty where it was not asked for
    """

    compute: float
    slowed_compute: float
    exposed_comm: float
    host: float
    stragglers: float
    by_axis: Mapping[str, float] = field(default_factory=dict)
    path: Mapping[str, float] = field(default_factory=dict)

    @property
    def communication(self) -> float:
        """All that communication costs: where it is exposed, and where kernels beside it take longer."""
        return self.slowed_compute + self.exposed_comm

    @property
    def paced_by_host(self) -> bool:
        return self.path.get("host", 0.0) > PACED

    @property
    def dominant(self) -> str:
        """The host where most of the critical path is its work, else the largest of compute, each axis, stragglers, host."""
        if self.paced_by_host:
            return "host"
        terms = {"compute": self.compute, "stragglers": self.stragglers, "host": self.host}
        terms |= {f"{axis} communication": cost for axis, cost in self.by_axis.items()}
        return max(terms, key=lambda name: terms[name])

    def to_json(self) -> dict[str, float]:
        """The parts that add up to the step."""
        return {
            name: getattr(self, name) for name in ("compute", "slowed_compute", "exposed_comm", "host", "stragglers")
        }


def parts_of(found: Shares, keep: float, path: Mapping[str, float] | None = None) -> Parts:
    """The parts of a step of which `keep` is not lost to stragglers."""
    hidden = sum(found.hidden_by_axis.values())
    slowed = {axis: found.slowed * each / hidden if hidden else 0.0 for axis, each in found.hidden_by_axis.items()}
    return Parts(
        compute=(found.compute - found.slowed) * keep,
        slowed_compute=found.slowed * keep,
        exposed_comm=found.exposed * keep,
        host=found.rest * keep,
        stragglers=1 - keep,
        by_axis={axis: (share + slowed.get(axis, 0.0)) * keep for axis, share in found.by_axis.items()},
        path=path or {},
    )
