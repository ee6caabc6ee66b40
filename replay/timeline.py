"""The Timeline: the answer of one replay, start and end of every node and which predecessor held it back."""

from __future__ import annotations

from dataclasses import dataclass

from scaletrace.parse.events import Int32Array, IntArray
from scaletrace.parse.graph import Graph


@dataclass(frozen=True, slots=True)
class Timeline:
    """start_ns, end_ns int64[n]; binding int32[n] is the predecessor that decided the start, -1 where release did."""

    graph: Graph
    start_ns: IntArray
    end_ns: IntArray
    binding: Int32Array

    @property
    def origin_ns(self) -> int:
        return int(self.start_ns.min()) if len(self.start_ns) else 0

    @property
    def makespan_ns(self) -> int:
        """From the earliest start to the latest end."""
        return int(self.end_ns.max()) - self.origin_ns if len(self.end_ns) else 0
