"""Turns columns of slices and counter steps into protobuf packets in bulk (numba), minimal varints, two packets a slice.

A slice is a TYPE_SLICE_BEGIN and a TYPE_SLICE_END packet. The trace processor sorts packets by time and keeps file order
within one nanosecond, so slices sorted by (track, start, longest first) nest as drawn.
Layout of TracePacket and TrackEvent: field numbers in `wire`; sizes are computed first, then bytes are written.
"""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, IntArray

INT, DOUBLE, TEXT = 0, 1, 2
"""Kinds of an argument's value: an int64, the bits of a float64, the id of an interned string."""

_SLICE_BYTES, _FLOW_BYTES, _ARGUMENT_BYTES = 96, 10, 32
"""Upper bounds of what a slice, a flow and an argument take."""


@jit
def _size(value: int) -> int:
    """Bytes of a non-negative number as a varint."""
    n = 1
    while value > 127:
        value >>= 7
        n += 1
    return n


@jit
def _put(out: ByteArray, at: int, value: int) -> int:
    """Write a varint; negative numbers take ten bytes. Returns the place after it."""
    if value < 0:
        for k in range(9):
            out[at + k] = ((value >> (7 * k)) & 127) | 128
        out[at + 9] = 1
        return at + 10
    while value > 127:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@jit
def _put_fixed(out: ByteArray, at: int, value: int) -> int:
    """Write eight bytes, little end first."""
    for k in range(8):
        out[at + k] = (value >> (8 * k)) & 255
    return at + 8


@jit
def _argument_size(key: int, kind: int, value: int) -> int:
    """Bytes of a DebugAnnotation: key id, then int_value (4), double_value (5) or string_value_iid (17)."""
    size = 1 + _size(key)
    if kind == DOUBLE:
        return size + 9
    if kind == TEXT:
        return size + 2 + _size(value)
    return size + 1 + (10 if value < 0 else _size(value))


@jit
def _put_argument(out: ByteArray, at: int, key: int, kind: int, value: int) -> int:
    out[at] = 0x22
    at = _put(out, at + 1, _argument_size(key, kind, value))
    out[at] = 0x08
    at = _put(out, at + 1, key)
    if kind == DOUBLE:
        out[at] = 0x29
        return _put_fixed(out, at + 1, value)
    if kind == TEXT:
        out[at] = 0x88
        out[at + 1] = 0x01
        return _put(out, at + 2, value)
    out[at] = 0x20
    return _put(out, at + 1, value)


@jit
def _put_head(out: ByteArray, at: int, ts: int, sequence: int, flagged: bool, event_size: int) -> int:
    """Packet tag and length, timestamp, sequence (with the flag that interned names are used), TrackEvent tag and length."""
    size = 1 + _size(ts) + 1 + _size(sequence) + 1 + _size(event_size) + event_size + (2 if flagged else 0)
    out[at] = 0x0A
    at = _put(out, at + 1, size)
    out[at] = 0x40
    at = _put(out, at + 1, ts)
    out[at] = 0x50
    at = _put(out, at + 1, sequence)
    if flagged:
        out[at] = 0x68
        out[at + 1] = 2
        at += 2
    out[at] = 0x5A
    return _put(out, at + 1, event_size)


@jit
def _put_type(out: ByteArray, at: int, kind: int, track: int) -> int:
    out[at] = 0x48
    out[at + 1] = kind
    out[at + 2] = 0x58
    return _put(out, at + 3, track)


@jit
def write_slices(
    out: ByteArray,
    sequence: int,
    track: IntArray,
    start: IntArray,
    end: IntArray,
    name: IntArray,
    category: IntArray,
    flow_ptr: IntArray,
    flow: IntArray,
    arg_ptr: IntArray,
    arg_key: IntArray,
    arg_kind: IntArray,
    arg_value: IntArray,
) -> int:
    """Write n slices; flows of slice i are flow[flow_ptr[i]:flow_ptr[i+1]], its arguments likewise. Returns bytes written."""
    at = 0
    for i in range(len(track)):
        size = 3 + _size(track[i]) + 1 + _size(name[i]) + 1 + _size(category[i]) + 10 * (flow_ptr[i + 1] - flow_ptr[i])
        for a in range(arg_ptr[i], arg_ptr[i + 1]):
            inner = _argument_size(arg_key[a], arg_kind[a], arg_value[a])
            size += 1 + _size(inner) + inner
        at = _put_head(out, at, start[i], sequence, True, size)
        at = _put_type(out, at, 1, track[i])
        out[at] = 0x50
        at = _put(out, at + 1, name[i])
        out[at] = 0x18
        at = _put(out, at + 1, category[i])
        for f in range(flow_ptr[i], flow_ptr[i + 1]):
            out[at] = 0xF9
            out[at + 1] = 0x02
            at = _put_fixed(out, at + 2, flow[f])
        for a in range(arg_ptr[i], arg_ptr[i + 1]):
            at = _put_argument(out, at, arg_key[a], arg_kind[a], arg_value[a])
        at = _put_head(out, at, end[i], sequence, False, 3 + _size(track[i]))
        at = _put_type(out, at, 2, track[i])
    return at


@jit
def write_counter(out: ByteArray, sequence: int, track: int, at_ns: IntArray, bits: IntArray, is_double: bool) -> int:
    """Write the steps of one counter; `bits` holds integers, or the bits of float64s. Returns bytes written."""
    at = 0
    for i in range(len(at_ns)):
        value = bits[i]
        value_size = 8 if is_double else 10 if value < 0 else _size(value)
        at = _put_head(out, at, at_ns[i], sequence, False, 3 + _size(track) + 2 + value_size)
        at = _put_type(out, at, 4, track)
        if is_double:
            out[at] = 0xE1
            out[at + 1] = 0x02
            at = _put_fixed(out, at + 2, value)
        else:
            out[at] = 0xF0
            out[at + 1] = 0x01
            at = _put(out, at + 2, value)
    return at


def room_for(slices: int, flows: int, arguments: int) -> ByteArray:
    """A buffer that is large enough for so many; only the pages that are written cost memory."""
    return np.empty(slices * _SLICE_BYTES + flows * _FLOW_BYTES + arguments * _ARGUMENT_BYTES, np.uint8)


def by_row(n: int, rows: IntArray) -> tuple[IntArray, IntArray]:
    """(ptr int64[n+1], order int64[k]) that list entries by the row they belong to, stably."""
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n), out=ptr[1:])
    in_order = len(rows) < 2 or bool(np.all(rows[1:] >= rows[:-1]))
    order = np.arange(len(rows), dtype=np.int64) if in_order else np.argsort(rows, kind="stable").astype(np.int64)
    return ptr, order
