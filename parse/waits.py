"""Turns the aligned members of each instance into waiting and transferring time, and bandwidths with NCCL's conventions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.job import KINDS, Job
from scaletrace.parse.members import KIND

_ALL = tuple(
    KIND[k] for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "custom", "unknown")
)
FloatArray = npt.NDArray[np.float64]
_NEVER = np.iinfo(np.int64).max
_FROM_ROOT = (KIND["broadcast"], KIND["scatter"])
_TO_ROOT = (KIND["reduce"], KIND["gather"])


def split(
    first: IntArray,
    size: IntArray,
    rank: Int32Array,
    kind: ByteArray,
    root: Int32Array,
    start_ns: IntArray,
    end_ns: IntArray,
    on_device: BoolArray,
    comparable: BoolArray,
    alone: BoolArray,
) -> tuple[IntArray, IntArray]:
    """(wait_ns, transfer_ns) of members sorted by instance; instance k is rows first[k] … first[k] + size[k] - 1.

    A member waits for the last start of those it depends on: all others in a synchronising collective, the root in a
    broadcast or scatter, and the root for all others in a reduce or gather; a receive for its send, and a send by a
    kernel for its receive. A wait never
    exceeds the member's own time. Where the members seen do not tell (`alone`: others of the instance were not seen;
    or clocks that can't be compared) transfer is -1.
    """
    of = np.repeat(np.arange(len(first)), size)
    wait = np.zeros(len(rank), np.int64)
    if not len(rank):
        return wait, wait.copy()
    last = np.maximum.reduceat(start_ns, first)[of]
    is_root = (rank == root) & (root >= 0)
    floor = np.iinfo(np.int64).min
    roots = np.maximum.reduceat(np.where(is_root, start_ns, floor), first)[of]
    sends = np.maximum.reduceat(np.where(kind == KIND["send"], start_ns, floor), first)[of]
    awaited = np.full(len(rank), floor)
    awaited = np.where(np.isin(kind, _ALL), last, awaited)
    awaited = np.where(np.isin(kind, _FROM_ROOT) & ~is_root, roots, awaited)
    awaited = np.where(np.isin(kind, _TO_ROOT) & is_root, last, awaited)
    awaited = np.where(kind == KIND["recv"], sends, awaited)
    # a kernel of NCCL holds its send until the receiver is there; gloo hands it to the system
    awaited = np.where((kind == KIND["send"]) & on_device, last, awaited)
    dur = end_ns - start_ns
    wait = np.clip(np.where(awaited == floor, 0, awaited - start_ns), 0, dur)
    unknown = ~comparable | alone
    wait[unknown] = 0
    return wait, np.where(unknown, -1, dur - wait)


@dataclass(frozen=True, slots=True)
class Instances:
    """One row per collective instance of a job (k rows, row i is instance i).

    kind        uint8 index into KINDS
    group       int32 Group.id, -1 unknown
    members     int64: how many were seen
    bytes       int64: payload as NCCL counts it (see `payload`), -1 unknown
    late_rank   int64: rank that started last on the job's clock, -1 where fewer than two were seen
    wait_ns     int64: sum of the members' waits
    transfer_ns int64: time after the last start, -1 where the members seen do not tell
    at_most_ns  int64: shortest member of any instance of the same kind, group and size. A transfer can't be longer, so
                where a rank stands alone this is what its trace says, an upper bound; -1 where no span was recorded
    algbw_Bps, busbw_Bps  float64: nan where bytes or time are unknown
    """

    kind: ByteArray
    group: Int32Array
    members: IntArray
    bytes: IntArray
    late_rank: IntArray
    wait_ns: IntArray
    transfer_ns: IntArray
    at_most_ns: IntArray
    algbw_Bps: FloatArray
    busbw_Bps: FloatArray

    def __len__(self) -> int:
        return len(self.kind)


def bus_factor(kind: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it: what each link carries per byte of payload."""
    if size < 1:
        return float("nan")
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def payload(kind: str, bytes_in: int, bytes_out: int) -> int:
    """Bytes by which nccl-tests divides: the full buffer, which is the output of a gather and the input of the others."""
    return bytes_out if kind in ("all_gather", "gather", "recv") else bytes_in


def bus_bandwidth(kind: str, size: int, moved: IntArray, transfer_ns: IntArray) -> float | None:
    """Bus bandwidth of several instances of one kind and group size: the median over those whose transfer is known.

    moved, transfer_ns  int64 per instance: payload (see `payload`) and time without waiting, as in Instances
    None where no instance tells, or where the group holds fewer than two ranks.
    """
    known = (moved > 0) & (transfer_ns > 0)
    if size < 2 or not known.any():
        return None
    rate = moved[known] / (transfer_ns[known] / 1e9) * bus_factor(kind, size)
    return float(np.median(rate))


def instances_of(job: Job) -> Instances:
    """Wait, transfer and bandwidth of every instance.

    The transfer of a synchronising collective is its shortest member, which started last and waited for nobody: no
    clock takes part in it. That of the others is from the last start to the last end on the job's clock.
    """
    c = job.collectives
    first = np.flatnonzero(np.r_[True, c.instance[1:] != c.instance[:-1]]) if len(c) else np.zeros(0, np.int64)
    count = np.diff(np.r_[first, len(c)])
    last = np.maximum.reduceat(c.start_ns, first) if len(first) else first
    is_last = c.start_ns == np.repeat(last, count)
    late = np.maximum.reduceat(np.where(is_last, c.rank, -1), first) if len(first) else first
    dur = c.end_ns - c.start_ns
    known = c.transfer_ns >= 0
    shortest = np.minimum.reduceat(dur, first) if len(first) else first
    whole = (np.maximum.reduceat(c.end_ns, first) if len(first) else first) - last
    sync = np.isin(c.kind[first], _ALL)
    told = np.logical_and.reduceat(known, first) if len(first) else np.zeros(0, np.bool_)
    transfer = np.where(told, np.where(sync, shortest, np.maximum(whole, 0)), -1)
    sent = np.maximum.reduceat(c.bytes_in, first) if len(first) else first
    got = np.maximum.reduceat(c.bytes_out, first) if len(first) else first
    gathers = np.isin(c.kind[first], [KIND[k] for k in ("all_gather", "gather", "recv")])
    moved = np.where(gathers, got, sent)
    sizes = np.array([group.size for group in job.groups] + [-1], np.int64)[c.group[first]]
    factor = np.array([bus_factor(KINDS[k], n) for k, n in zip(c.kind[first].tolist(), sizes.tolist(), strict=True)])
    with np.errstate(divide="ignore", invalid="ignore"):
        algbw = np.where((moved > 0) & (transfer > 0), moved / (transfer / 1e9), np.nan)
    waited = np.add.reduceat(c.wait_ns, first) if len(first) else first
    return Instances(
        c.kind[first],
        c.group[first],
        count,
        moved,
        np.where(count > 1, late, -1),
        waited,
        transfer,
        _envelope(c.kind[first], c.group[first], moved, np.where(c.event[first] >= 0, shortest, _NEVER)),
        algbw,
        algbw * factor if len(first) else algbw,
    )


def _envelope(kind: ByteArray, group: Int32Array, moved: IntArray, shortest: IntArray) -> IntArray:
    """The least of `shortest` over the instances that move the same in the same way."""
    if not len(kind):
        return shortest
    key = np.column_stack([kind.astype(np.int64), group.astype(np.int64), moved])
    _, code = np.unique(key, axis=0, return_inverse=True)
    least = np.full(int(code.max()) + 1, _NEVER)
    np.minimum.at(least, code.reshape(-1), shortest)
    return np.where(least < _NEVER, least, -1)[code.reshape(-1)]
