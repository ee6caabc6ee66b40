"""Turns the texts, lanes and values that the scanner meets into growing columns of plain numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, Int32Array, IntArray
from scaletrace.parse.scan_text import GROW, U64Array

MAX_PROBES = 4096
"""A longer search means a file built to make the hash table slow."""

_U32 = np.uint64(32)


class Strings(NamedTuple):
    """Interned byte strings: code → arena[start : start + length]; `used` holds (codes, arena bytes, floods)."""

    arena: ByteArray
    start: IntArray
    length: Int32Array
    hash: U64Array
    slots: Int32Array
    used: IntArray


class Lanes(NamedTuple):
    """Interned (pid code, tid code) pairs; `used` holds (lanes, lane of the last event)."""

    pair: IntArray
    slots: Int32Array
    used: IntArray


class Rows(NamedTuple):
    """Columns of one batch. `count` holds (events, arguments, flows, metadata records, records of any kind)."""

    ph: ByteArray
    cat: Int32Array
    name: Int32Array
    lane: Int32Array
    ts: IntArray
    dur: IntArray
    dense: IntArray
    offset: IntArray
    content: U64Array
    arg_row: Int32Array
    arg_key: ByteArray
    arg_tag: ByteArray
    arg_value: IntArray
    flow_ph: ByteArray
    flow_cat: Int32Array
    flow_lane: Int32Array
    flow_id: IntArray
    flow_ts: IntArray
    meta_name: Int32Array
    meta_lane: Int32Array
    meta_value: Int32Array
    count: IntArray


def new_strings(capacity: int = 1 << 12, arena_bytes: int = 1 << 18) -> Strings:
    """An empty string table."""
    return Strings(
        np.empty(arena_bytes, np.uint8),
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.uint64),
        np.full(2 * capacity, -1, np.int32),
        np.zeros(3, np.int64),
    )


def new_lanes(capacity: int = 256) -> Lanes:
    """An empty lane table."""
    return Lanes(np.full(capacity, -1, np.int64), np.full(2 * capacity, -1, np.int32), np.array([0, -1], np.int64))


def new_rows(events: int, args: int) -> Rows:
    """Empty columns with room for `events` records of each kind and `args` arguments."""

    def i32(n: int = events) -> Int32Array:
        return np.empty(n, np.int32)

    def i64(n: int = events) -> IntArray:
        return np.empty(n, np.int64)

    def u8(n: int = events) -> ByteArray:
        return np.empty(n, np.uint8)

    return Rows(
        u8(), i32(), i32(), i32(), i64(), i64(), np.empty((events, 4), np.int64), i64(), np.empty(events, np.uint64),
        i32(args), u8(args), u8(args), i64(args),
        u8(), i32(), i32(), i64(), i64(),
        i32(), i32(), i32(),
        np.zeros(5, np.int64),
    )  # fmt: skip


@jit
def _slot(h: np.uint64, size: int) -> int:
    return np.int64((h ^ (h >> _U32)) & np.uint64(size - 1))


@jit
def intern(s: Strings, buf: ByteArray, a: int, b: int, h: np.uint64) -> int:
    """Code of the text buf[a:b] with hash `h`, or GROW where a table is full."""
    n = b - a
    slot = _slot(h, len(s.slots))
    probes = 0
    while True:
        code = np.int64(s.slots[slot])
        if code < 0:
            break
        if s.hash[code] == h and s.length[code] == n:
            at = s.start[code]
            k = 0
            while k < n and s.arena[at + k] == buf[a + k]:
                k += 1
            if k == n:
                return code
        slot = (slot + 1) & (len(s.slots) - 1)
        probes += 1
    if probes > MAX_PROBES:
        s.used[2] += 1
    code, at = s.used[0], s.used[1]
    if code == len(s.start) or at + n > len(s.arena):
        return GROW
    for k in range(n):
        s.arena[at + k] = buf[a + k]
    s.start[code], s.length[code], s.hash[code], s.slots[slot] = at, n, h, code
    s.used[0] += 1
    s.used[1] += n
    return code


@jit
def _rehash(hashes: U64Array, count: int, slots: Int32Array) -> None:
    for code in range(count):
        slot = _slot(hashes[code], len(slots))
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = code


def grown_strings(s: Strings, extra_bytes: int) -> Strings:
    """A table with twice the codes and room for at least `extra_bytes` more text; codes stay."""
    count, used = int(s.used[0]), int(s.used[1])
    codes = 2 * len(s.start) if count >= len(s.start) else len(s.start)
    room = len(s.arena)
    if used + extra_bytes > room:
        room = max(used + extra_bytes, room + room // 2)
    new = Strings(
        _longer(s.arena, room, used),
        _longer(s.start, codes, count),
        _longer(s.length, codes, count),
        _longer(s.hash, codes, count),
        np.full(2 * codes, -1, np.int32),
        s.used.copy(),
    )
    _rehash(new.hash, count, new.slots)
    return new


def _longer(array: npt.NDArray[Any], size: int, used: int) -> npt.NDArray[Any]:
    if size == len(array):
        return array
    out = np.empty(size, array.dtype)
    out[:used] = array[:used]
    return out


@jit
def lane_of(lanes: Lanes, pid: int, tid: int) -> int:
    """Number of the lane (pid code, tid code), or GROW where the table is full."""
    pair = pid << 32 | (tid & 0xFFFFFFFF)
    last = lanes.used[1]
    if last >= 0 and lanes.pair[last] == pair:
        return last
    h = np.uint64(pair) * np.uint64(0x9E3779B97F4A7C15)
    slot = _slot(h, len(lanes.slots))
    while True:
        code = np.int64(lanes.slots[slot])
        if code < 0:
            break
        if lanes.pair[code] == pair:
            lanes.used[1] = code
            return code
        slot = (slot + 1) & (len(lanes.slots) - 1)
    code = lanes.used[0]
    if code == len(lanes.pair):
        return GROW
    lanes.pair[code], lanes.slots[slot] = pair, code
    lanes.used[0] += 1
    lanes.used[1] = code
    return code


def grown_lanes(lanes: Lanes) -> Lanes:
    """A table with twice the room; lane numbers stay."""
    count = int(lanes.used[0])
    new = new_lanes(2 * len(lanes.pair))
    new.pair[:count] = lanes.pair[:count]
    hashes = new.pair[:count].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    _rehash(hashes, count, new.slots)
    new.used[:] = lanes.used
    return new
