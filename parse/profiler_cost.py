"""Turns what a capture tells of its steps before and inside the window into what the profiler cost them, and how sure that is.

Both sides are measured by the collector, from boundary to boundary, on each traced rank. No time is corrected by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scaletrace.parse.health import Health
from scaletrace.parse.job import Job
from scaletrace.parse.manifest import is_int, mappings, numbers

LONGEST_NS = 1 << 62
"""Beyond it a number is damage."""
LARGE = 0.1
"""A cost above this share of a step is a warning."""


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """Step times without and with the profiler, as the median over ranks of each rank's median.

    unwatched_steps, recorded_steps  the fewest of any rank
    noise_ns   the largest of: the spread of the steps of a rank (between quartiles, on either side), and how far ranks
               are apart in what the profiler cost; None where single steps tell no spread
    """

    ranks: int
    unwatched_ns: int
    unwatched_steps: int
    recorded_ns: int
    recorded_steps: int
    noise_ns: int | None

    @property
    def share(self) -> float:
        """What the profiler added, as a share of a step without it; below 0 where recorded steps were faster."""
        return self.recorded_ns / self.unwatched_ns - 1

    @property
    def within_noise(self) -> bool | None:
        """Whether the difference is no larger than the noise; None where that is not known."""
        return None if self.noise_ns is None else abs(self.recorded_ns - self.unwatched_ns) <= self.noise_ns

    @property
    def large(self) -> bool:
        """Whether a reader must be warned: a large cost that is not known to be noise."""
        return self.share > LARGE and not self.within_noise

    def sentence(self) -> str:
        """The same for a reader."""
        of = f"median of {self.unwatched_steps} steps" if self.unwatched_steps > 1 else "1 step"
        said = (
            f"Without the profiler a step took {_ms(self.unwatched_ns)} ({of} before the window), "
            f"recorded {_ms(self.recorded_ns)}: "
        )
        if self.noise_ns is not None and self.within_noise:
            return f"{said}a difference of {self.share:+.1%}, within the noise of {_ms(self.noise_ns)}."
        if self.share < 0:
            return f"{said}the steps before the window were the slower ones, so what the profiler cost is not known."
        unsure = "" if self.noise_ns is not None else " (too few steps to tell noise)"
        warning = ". Projections carry this: no time is corrected for it" if self.large else ""
        return f"{said}the profiler cost {self.share:.1%}{unsure}{warning}."

    def to_json(self) -> dict[str, Any]:
        """The `profiler_cost` of JSON answers (docs/reference/json.md)."""
        kept = {name: getattr(self, name) for name in self.__slots__}
        judged = {"share": self.share, "within_noise": self.within_noise, "large": self.large}
        return {**kept, **judged, "sentence": self.sentence()}


def profiler_cost(job: Job) -> ProfilerCost | None:
    """What the profiler cost the steps of this job, None where the capture does not tell."""
    present = {trace.rank for trace in job.ranks}
    members = [one for one in mappings(job.manifest.get("members")) if one.get("rank") in present and one.get("trace")]
    found = [rank for rank in map(_of_rank, members) if rank is not None]
    if not found:
        return None
    costs = [one.recorded_ns - one.unwatched_ns for one in found]
    noises = [one.noise_ns for one in found if one.noise_ns is not None]
    return ProfilerCost(
        len(found),
        round(statistics.median(one.unwatched_ns for one in found)),
        min(one.unwatched_steps for one in found),
        round(statistics.median(one.recorded_ns for one in found)),
        min(one.recorded_steps for one in found),
        max(*noises, max(costs) - min(costs)) if len(noises) == len(found) else None,
    )


def _of_rank(member: Mapping[str, Any]) -> ProfilerCost | None:
    """The same of one rank; the first recorded step only opens the window, since the profiler starts inside it."""
    before = member.get("unwatched")
    recorded = [end - begin for begin, end in pairwise(numbers(member.get("boundaries_ns")))]
    if not isinstance(before, Mapping) or not recorded or not 0 < min(recorded) <= max(recorded) < LONGEST_NS:
        return None
    median, count, spread = (before.get(key) for key in ("median_ns", "count", "spread_ns"))
    if not (is_int(median) and is_int(count)) or not (0 < median < LONGEST_NS and 0 < count < LONGEST_NS):
        return None
    known = is_int(spread) and 0 <= spread < LONGEST_NS and len(recorded) > 1
    noise = max(spread, _spread_ns(recorded)) if is_int(spread) and known else None
    return ProfilerCost(1, median, count, round(statistics.median(recorded)), len(recorded), noise)


def _spread_ns(steps_ns: list[int]) -> int:
    low, _, high = statistics.quantiles(steps_ns, n=4, method="inclusive")
    return round(high - low)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.3g} s"


def tell_profiler_cost(job: Job, health: Health) -> None:
    """Say in the health report of a projection what the profiler cost the steps that it starts from."""
    cost = profiler_cost(job)
    if cost is not None:
        health.note(cost.sentence())
