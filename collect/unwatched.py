"""Turns the times of recent step boundaries into how long the steps took that no profiler watched.

Beside the recorded steps they say what the profiler cost. The times are wall time from boundary to boundary.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

KEPT = 64
"""Boundaries that are remembered; a power of two, so that the slot of a boundary is cheap to find."""

Span = tuple[int, int]
"""[begin, end) on the clock of `time.perf_counter_ns`."""


class Boundaries:
    """When the last KEPT boundaries were. The recorder writes `at_ns[number & (KEPT - 1)]` itself: a call would cost more.

    `since` is the first boundary that counts. It starts at 1, the end of step 0, since nobody saw that step begin.
    """

    __slots__ = ("at_ns", "since")

    def __init__(self) -> None:
        self.at_ns = [0] * KEPT
        self.since = 1

    def start_over(self, number: int) -> None:
        """Steps that began before boundary `number` don't count any more."""
        self.since = max(self.since, number)

    def steps_ns(self, completed: int, watched: Iterable[Span]) -> list[int]:
        """The steps that ended by boundary `completed`, without those that overlap a span in `watched`."""
        spans = list(watched)
        numbers = range(max(self.since, completed - KEPT + 1), completed + 1)
        at = [self.at_ns[number & (KEPT - 1)] for number in numbers]
        return [
            end - begin for begin, end in pairwise(at) if not any(first < end and begin < last for first, last in spans)
        ]


class Watched:
    """When profilers other than ours were on: the last KEPT times, and the whole past before those."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._began_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """A profiler is prepared or started; only the first of several calls counts."""
        if self._began_ns is None:
            self._began_ns = now_ns

    def end(self, now_ns: int) -> None:
        """It is stopped; one that nobody saw start has been on all the time."""
        self._spans.append((self._began_ns or 0, now_ns))
        self._began_ns = None
        if len(self._spans) > KEPT:
            (_, end), (_, next_end) = self._spans.popleft(), self._spans.popleft()
            self._spans.appendleft((0, max(end, next_end)))

    def spans(self) -> list[Span]:
        """All of them; one that is still on has no end."""
        still_on = [] if self._began_ns is None else [(self._began_ns, 1 << 62)]
        return [*self._spans, *still_on]


def summary(steps_ns: Sequence[int]) -> dict[str, int] | None:
    """How many steps, their mean, median and spread (between the quartiles; absent for one step). None without steps."""
    if not steps_ns:
        return None
    found = {
        "count": len(steps_ns),
        "mean_ns": round(statistics.mean(steps_ns)),
        "median_ns": round(statistics.median(steps_ns)),
    }
    if len(steps_ns) > 1:
        low, _, high = statistics.quantiles(steps_ns, n=4, method="inclusive")
        found["spread_ns"] = round(high - low)
    return found
