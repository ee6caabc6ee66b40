"""The Job: the event tables of all ranks, their groups, matched collectives and clocks, and what had to be guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scaletrace.parse.events import BoolArray, ByteArray, Events, Int32Array, IntArray
from scaletrace.parse.health import Health


@dataclass(frozen=True, slots=True)
class Step:
    """One ProfilerStep of one rank on the host: [start, end) in ns of that rank's own clock."""

    number: int
    start_ns: int
    end_ns: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's file: its events, its header, and who it says it is.

    `header` holds the top-level keys other than traceEvents (distributedInfo, deviceProperties, …) as decoded JSON.
    `rank_rule` says how the rank was found ("distributedInfo", "file name", …).
    `sidecar` is the flight-recorder dump of this rank, if one lies beside the trace.
    """

    rank: int
    world_size: int | None
    events: Events
    source: str
    header: Mapping[str, Any] = field(default_factory=dict)
    rank_rule: str = "distributedInfo"
    host: str = ""
    steps: tuple[Step, ...] = ()
    sidecar: Mapping[str, Any] | None = None
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: (start, stride, size) where its members are regular, the exact `members` always.

    `axis` is one of dp, fsdp, tp, pp, ep, cp, world or "" where unknown; `confidence` is 1.0 where the trace says so.
    """

    id: int
    name: str
    description: str
    members: tuple[int, ...]
    axis: str = ""
    confidence: float = 1.0

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def stride(self) -> int:
        """Distance between neighbours, 0 for a single member, -1 where it is not constant."""
        steps = set(np.diff(self.members).tolist())
        return 0 if not steps else steps.pop() if len(steps) == 1 else -1


KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
    "custom",
    "unknown",
)
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds whose members can't end before the last one has started (with a payload); the others say nothing on clocks."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """All collectives of the job, one row per member (m rows), sorted by (instance, rank).

    instance    int64: one occurrence over ranks, 0 … count-1 in order of first start; an unmatched member has its own
    rank        int32
    event       int32: row of the span that carries the time in that rank's Events (NCCL kernel, gloo span), or -1
    host_event  int32: row of the host record (record_param_comms, c10d op), or -1
    kind        uint8: index into KINDS
    group       int32: Group.id, -1 unknown
    seq         int64: sequence number in the group, -1 unknown
    bytes_in, bytes_out  int64: payload of this member, -1 unknown
    start_ns, end_ns     int64: on the job's common clock (offset removed)
    wait_ns     int64: how long this member waited for the last one that it had to wait for
    transfer_ns int64: end - start - wait; -1 where the members seen do not tell
    matched     bool: the instance holds all members that are present in the job
    """

    instance: IntArray
    rank: Int32Array
    event: Int32Array
    host_event: Int32Array
    kind: ByteArray
    group: Int32Array
    seq: IntArray
    bytes_in: IntArray
    bytes_out: IntArray
    start_ns: IntArray
    end_ns: IntArray
    wait_ns: IntArray
    transfer_ns: IntArray
    matched: BoolArray
    rung: str = ""
    unmatched: int = 0

    def __len__(self) -> int:
        return len(self.instance)

    def to_frame(self) -> pd.DataFrame:
        """One row per member; `kind` as text."""
        names = [name for name in self.__slots__ if name not in ("rung", "unmatched", "kind")]
        frame = pd.DataFrame({name: getattr(self, name) for name in names})
        frame.insert(2, "kind", [KINDS[code] for code in self.kind])
        return frame


@dataclass(frozen=True, slots=True)
class Clock:
    """Offset of one rank's clock to the job's: true time = own time - offset, known to lie in [low, high].

    `offset_ns` holds at `origin_ns` of the own clock and grows by `drift_ppm`; the interval holds for the whole window.
    `source`: "reference", "ends of kernels", "same host", "middle of the bounds", or "unaligned" (can't be compared).
    """

    offset_ns: int
    low_ns: int
    high_ns: int
    drift_ppm: float = 0.0
    source: str = "same host"
    origin_ns: int = 0

    def to_job_ns(self, own_ns: IntArray) -> IntArray:
        """Times of this rank's clock on the job's clock, int64 of the same shape."""
        if self.drift_ppm == 0.0:
            return own_ns - self.offset_ns
        moved = np.rint((own_ns - self.origin_ns) * (self.drift_ppm / 1e6)).astype(np.int64)
        return np.asarray(own_ns - self.offset_ns - moved, np.int64)

    def to_own_ns(self, job_ns: IntArray) -> IntArray:
        """Times of the job's clock on this rank's: the first that `to_job_ns` takes there or beyond."""
        if self.drift_ppm == 0.0:
            return np.asarray(job_ns + self.offset_ns, np.int64)
        since = (job_ns + self.offset_ns - self.origin_ns) / (1.0 - self.drift_ppm / 1e6)
        own = np.asarray(self.origin_ns + np.floor(since).astype(np.int64) - 2, np.int64)
        for _ in range(4):
            own = own + (self.to_job_ns(own) < job_ns)
        return own


STEADY = Clock(0, 0, 0)
"""The clock of a rank of which nothing is known: the job's own."""


@dataclass(frozen=True, slots=True)
class Job:
    """A whole job: what all ranks did, on one clock. `ranks` is sorted by rank; ranks may be missing.

    `captures` names every capture that was found, with its ranks; `capture` is the one loaded.
    `residual_ns` int64: spread of kernel ends that alignment leaves, one per synchronising instance.
    """

    ranks: tuple[RankTrace, ...]
    world_size: int
    groups: tuple[Group, ...]
    collectives: Collectives
    clocks: Mapping[int, Clock]
    health: Health
    source: str = ""
    capture: str = ""
    captures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    residual_ns: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        present = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in present)

    def rank(self, number: int) -> RankTrace:
        for rank in self.ranks:
            if rank.rank == number:
                return rank
        raise KeyError(f"rank {number} is not in this job")

    @property
    def backend(self) -> str:
        """ "nccl", "gloo", … as the trace says; "" where it does not."""
        for rank in self.ranks:
            info = rank.header.get("distributedInfo")
            if isinstance(info, Mapping) and isinstance(info.get("backend"), str):
                return str(info["backend"])
        return ""

    def save(self, folder: str | Path) -> Path:
        """Write the job as Arrow files, which `load(folder)` maps instead of reading the traces again."""
        from scaletrace.parse.store import save_job

        return save_job(self, folder)
