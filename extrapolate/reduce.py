"""Turns a graph of classes into the much smaller graph of its longest paths between meetings of ranks.

Kept are arrivals, meetings, what directly waits for a meeting, and what an arrival directly waits for; all else becomes
edges: the longest path between two kept nodes that touches no third, split into what noise stretches and what not.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray

Floats = npt.NDArray[np.float64]
PLAIN, ARRIVE, MEET = 0, 1, 2
"""Roles of a node: any, the arrival of a member, and where the members' arrivals meet (hub or transfer)."""


def keep_mask(role: ByteArray, pred_ptr: IntArray, pred: Int32Array) -> BoolArray:
    """Which nodes stay; bool[n]."""
    into = np.repeat(np.arange(len(role)), np.diff(pred_ptr))
    keep = (role != PLAIN) | (np.diff(pred_ptr) == 0)
    keep[into[role[pred] == MEET]] = True
    keep[pred[role[into] == ARRIVE]] = True
    return np.asarray(keep, np.bool_)


@jit
def _reach(w: int, source: int, length: float, noisy: float, stamp: IntArray, total: Floats, part: Floats) -> bool:
    """Note a path of a length from `source` to w where it is the longest yet; whether it is the first."""
    first = stamp[w] != source
    if first or length > total[w]:
        stamp[w], total[w], part[w] = source, length, noisy
    return bool(first)


@jit
def longest_paths(
    dur_ns: Floats,
    noisy: BoolArray,
    cls: Int32Array,
    keep: BoolArray,
    succ_ptr: IntArray,
    succ: Int32Array,
    lag_ns: Floats,
    classes: int,
) -> tuple[Int32Array, Int32Array, Floats, Floats]:
    """(source, target, fixed ns, noisy ns) of every longest path between kept nodes; target n + c is class c's end.

    Lengths are from the end of the source to the start of the target; nodes are in topological order.
    """
    n = len(dur_ns)
    total, part = np.zeros(n), np.zeros(n)
    stamp = np.full(n, -1, np.int64)
    src, dst, fixed, varied = [0], [0], [0.0], [0.0]
    best, best_part = np.empty(classes), np.empty(classes)
    for s in range(n):
        if not keep[s]:
            continue
        best[:] = -1e300
        best[cls[s]], best_part[cls[s]] = 0.0, 0.0
        queue = [n]
        queue.pop()
        for e in range(succ_ptr[s], succ_ptr[s + 1]):
            if _reach(succ[e], s, lag_ns[e], 0.0, stamp, total, part):
                heappush(queue, np.int64(succ[e]))  # type: ignore[misc]
        while len(queue):
            v = heappop(queue)
            if keep[v]:
                src.append(s)
                dst.append(v)
                fixed.append(total[v] - part[v])
                varied.append(part[v])
                continue
            out = total[v] + dur_ns[v]
            out_part = part[v] + (dur_ns[v] if noisy[v] else 0.0)
            if out > best[cls[v]]:
                best[cls[v]], best_part[cls[v]] = out, out_part
            for e in range(succ_ptr[v], succ_ptr[v + 1]):
                if _reach(succ[e], s, out + lag_ns[e], out_part, stamp, total, part):
                    heappush(queue, np.int64(succ[e]))  # type: ignore[misc]
        for c in range(classes):
            if best[c] > -1e299:
                src.append(s)
                dst.append(n + c)
                fixed.append(best[c] - best_part[c])
                varied.append(best_part[c])
    return (
        np.array(src[1:], dtype=np.int32),
        np.array(dst[1:], dtype=np.int32),
        np.array(fixed[1:]),
        np.array(varied[1:]),
    )
