"""Turns the aligned members of each instance into waiting and transferring time, and bandwidths with NCCL's conventions."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.members import KIND

_ALL = tuple(
    KIND[k] for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "custom", "unknown")
)
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
    comparable: BoolArray,
    alone: BoolArray,
) -> tuple[IntArray, IntArray]:
    """(wait_ns, transfer_ns) of members sorted by instance; instance k is rows first[k] … first[k] + size[k] - 1.

    A member waits for the last start of those it depends on: all others in a synchronising collective, the root in a
    broadcast or scatter, and the root for all others in a reduce or gather; a receive for its send. A wait never
    exceeds the member's own time. Where the members seen do not tell (`alone` in a larger group, or clocks that
    can't be compared) transfer is -1.
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
    dur = end_ns - start_ns
    wait = np.clip(np.where(awaited == floor, 0, awaited - start_ns), 0, dur)
    unknown = ~comparable | alone
    wait[unknown] = 0
    return wait, np.where(unknown, -1, dur - wait)
