"""Turns sets of time spans into unions, intersections and their lengths, in integer nanoseconds."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import IntArray

Spans = tuple[IntArray, IntArray]
"""(start, end) int64[k] each."""


def union(start: IntArray, end: IntArray) -> Spans:
    """Disjoint spans in ascending order that cover the same time; touching spans become one, empty ones vanish."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.append(True, start[1:] > reach[:-1])
    last = np.append(first[1:], True)
    return start[first], reach[last]


def length_ns(spans: Spans) -> int:
    """Summed length of disjoint spans."""
    return int((spans[1] - spans[0]).sum())


def busy_ns(start: IntArray, end: IntArray) -> int:
    """Time covered by at least one span."""
    return length_ns(union(start, end))


def overlap_ns(start: IntArray, end: IntArray) -> int:
    """Summed length beyond the covered time: 0 where no two spans overlap."""
    return int(np.maximum(end - start, 0).sum()) - busy_ns(start, end)


def intersection(a: Spans, b: Spans) -> Spans:
    """The time that lies in both of two sets of disjoint, ascending spans."""
    if not len(a[0]) or not len(b[0]):
        return a[0][:0], a[0][:0]
    first = np.searchsorted(b[1], a[0], side="right")
    last = np.searchsorted(b[0], a[1], side="left")
    count = np.maximum(last - first, 0)
    left = np.repeat(np.arange(len(a[0])), count)
    right = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return np.maximum(a[0][left], b[0][right]), np.minimum(a[1][left], b[1][right])


def difference_ns(a: Spans, b: Spans) -> int:
    """Length of the time in `a` that is not in `b`; both disjoint and ascending."""
    return length_ns(a) - length_ns(intersection(a, b))
