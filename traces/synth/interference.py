"""Turns works that depend on each other and slow each other into times: kernels beside collectives, transfers beside kernels.

While a collective is resident on a rank (from its start there until it ends for all), that rank's kernels advance at
1 / (1 + κ), κ being the largest of the resident ones; while a kernel runs on one of its ranks, a transfer advances at
1 / (1 + μ). Everything else takes the time that it takes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Before = Sequence[Sequence[tuple[int, int]]]


@dataclass(slots=True)
class Roles:
    """Which nodes slow or are slowed: kernels by rank, arrivals as (rank, transfer), transfers with ranks and κ."""

    kernels: dict[int, int] = field(default_factory=dict)
    arrivals: dict[int, tuple[int, int]] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    slowdown: dict[int, float] = field(default_factory=dict)


def contended(dur_ns: Sequence[int], before: Before, roles: Roles, mu: float) -> tuple[list[int], list[int]]:
    """Start and end of every node in ns; end -1 where a cycle keeps it from starting."""
    return _Run(dur_ns, before, roles, mu).run()


class _Run:
    """One run through time: nodes start when what they need has ended, and rates change where neighbours come and go."""

    __slots__ = (
        "after",
        "at",
        "dur_ns",
        "end_ns",
        "heap",
        "left",
        "missing",
        "moving",
        "mu",
        "rate",
        "resident",
        "roles",
        "running",
        "since",
        "start_ns",
        "version",
    )

    def __init__(self, dur_ns: Sequence[int], before: Before, roles: Roles, mu: float) -> None:
        n = len(dur_ns)
        self.dur_ns, self.roles, self.mu = dur_ns, roles, mu
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for node, needs in enumerate(before):
            for earlier, lag in needs:
                self.after[earlier].append((node, lag))
        self.missing = [len(needs) for needs in before]
        self.at = [0] * n
        self.start_ns, self.end_ns = [0] * n, [-1] * n
        self.heap: list[tuple[int, int, int]] = []
        self.left: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.since: dict[int, int] = {}
        self.version: dict[int, int] = {}
        self.running: dict[int, set[int]] = defaultdict(set)
        self.moving: dict[int, set[int]] = defaultdict(set)
        self.resident: dict[int, list[float]] = defaultdict(list)

    def run(self) -> tuple[list[int], list[int]]:
        for node in [node for node, missing in enumerate(self.missing) if not missing]:
            self.ready(node)
        while self.heap:
            now, node, version = heapq.heappop(self.heap)
            if version < 0:
                self.begin(node, now)
            elif self.version.get(node) == version:
                self.finish(node, now)
        return self.start_ns, self.end_ns

    def ready(self, first: int) -> None:
        """A node whose needs are all known: it starts in its turn, or at once where nothing slows or is slowed by it."""
        waiting = [first]
        while waiting:
            node = waiting.pop()
            start = max(0, self.at[node])
            if node in self.roles.kernels or node in self.roles.arrivals or node in self.roles.members:
                heapq.heappush(self.heap, (start, node, -1))
                continue
            self.start_ns[node] = start
            waiting += self.ended(node, start + self.dur_ns[node])

    def ended(self, node: int, now: int) -> list[int]:
        """Note a node's end; returns those that only waited for it."""
        self.end_ns[node] = now
        released = []
        for later, lag in self.after[node]:
            self.at[later] = max(self.at[later], now + lag)
            self.missing[later] -= 1
            if not self.missing[later]:
                released.append(later)
        return released

    def begin(self, node: int, now: int) -> None:
        self.start_ns[node] = now
        if node in self.roles.arrivals:
            rank, transfer = self.roles.arrivals[node]
            self.resident[rank].append(self.roles.slowdown.get(transfer, 0.0))
            self.reconsider(self.running[rank], now)
            self.release(self.ended(node, now + self.dur_ns[node]))
            return
        self.left[node], self.since[node], self.version[node] = float(self.dur_ns[node]), now, 0
        self.rate[node] = 1.0
        if node in self.roles.kernels:
            rank = self.roles.kernels[node]
            self.running[rank].add(node)
            if len(self.running[rank]) == 1:
                self.reconsider(self.moving[rank], now)
        else:
            for rank in self.roles.members[node]:
                self.moving[rank].add(node)
        self.pace(node, now)

    def finish(self, node: int, now: int) -> None:
        if node in self.roles.kernels:
            rank = self.roles.kernels[node]
            self.running[rank].discard(node)
            if not self.running[rank]:
                self.reconsider(self.moving[rank], now)
        else:
            for rank in self.roles.members[node]:
                self.moving[rank].discard(node)
                self.resident[rank].remove(self.roles.slowdown.get(node, 0.0))
                self.reconsider(self.running[rank], now)
        for table in (self.left, self.rate, self.since, self.version):
            table.pop(node)
        self.release(self.ended(node, now))

    def release(self, nodes: list[int]) -> None:
        for node in nodes:
            self.ready(node)

    def reconsider(self, nodes: set[int], now: int) -> None:
        for node in sorted(nodes):
            self.pace(node, now)

    def pace(self, node: int, now: int) -> None:
        """Take off what was done since the last change, and work out the end at the present rate."""
        self.left[node] -= (now - self.since[node]) * self.rate[node]
        self.since[node] = now
        if node in self.roles.kernels:
            self.rate[node] = 1 / (1 + max(self.resident[self.roles.kernels[node]], default=0.0))
        else:
            beside = any(self.running[rank] for rank in self.roles.members[node])
            self.rate[node] = 1 / (1 + self.mu) if beside else 1.0
        self.version[node] += 1
        end = now + max(0, round(self.left[node] / self.rate[node]))
        heapq.heappush(self.heap, (end, node, self.version[node]))
