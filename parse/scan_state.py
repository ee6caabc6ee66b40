"""Turns the scanner's tables into two flat arrays, which cost nothing to hand from one compiled function to the next.

`st` (int64) holds the event at hand, counters, the tables of keys, texts and lanes, and a batch of rows; `mem` (uint8)
holds the interned bytes, scratch space and the nesting stack. Where each region starts stands in `st` itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, IntArray
from scaletrace.parse.scan_keys import KEY_SLOTS, key_table
from scaletrace.parse.scan_text import GROW, I64

# The event at hand, its faults, the faults of all events so far.
PH, CAT, NAME, PID, TID, TS, DUR, ID, HAVE, ARGS, META, CONTENT, DENSE = range(13)
PENDING, STATS, WHERE, FRESH = 16, 24, 32, 33
# How many rows, texts and lanes there are.
EVENTS, ARGUMENTS, OTHERS, RECORDS, TEXTS, ARENA_USED, LANES, LAST_LANE, FLOODS = range(40, 49)
# Where each region starts, and how much it holds.
TEXT_AT, TEXT_CAP, SLOT_AT, LANE_AT, LANE_CAP, LANE_SLOT_AT = range(50, 56)
EVENT_AT, EVENT_CAP, ARG_AT, ARG_CAP, OTHER_AT, OTHER_CAP = range(56, 62)
ARENA_CAP, SCRATCH_AT, STACK_AT, STACK_CAP = range(62, 66)
# Codes of the last pid and tid, since most events share them with the one before.
LAST_PID, LAST_TID = 66, 67
KEYS_AT = 80
"""Fixed: KEY_SLOTS times (hash, length, number), then the kinds by number."""

EVENT_WIDTH, ARG_WIDTH, OTHER_WIDTH = 12, 2, 5
MAX_PROBES = 4096
"""A longer search means a file that was built to make the hash table slow."""

_U32 = np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Room in each region: counts of entries, except for the three byte regions."""

    texts: int = 1 << 12
    lanes: int = 256
    events: int = 1 << 12
    args: int = 1 << 15
    arena_bytes: int = 1 << 18
    scratch_bytes: int = 1 << 16
    max_depth: int = 128


def new_state(size: Sizes) -> tuple[IntArray, ByteArray]:
    """(st, mem) with empty tables of these sizes; texts and lanes must be powers of two."""
    at = KEYS_AT + 3 * KEY_SLOTS + 256
    places: dict[int, int] = {}
    for name, words in (
        (TEXT_AT, 3 * size.texts),
        (SLOT_AT, 2 * size.texts),
        (LANE_AT, size.lanes),
        (LANE_SLOT_AT, 2 * size.lanes),
        (EVENT_AT, EVENT_WIDTH * size.events),
        (ARG_AT, ARG_WIDTH * size.args),
        (OTHER_AT, OTHER_WIDTH * size.events),
    ):
        places[name] = at
        at += words
    st = np.empty(at, np.int64)
    st[:KEYS_AT] = 0
    for name, place in places.items():
        st[name] = place
    st[KEYS_AT : KEYS_AT + 3 * KEY_SLOTS + 256] = key_table()
    st[places[SLOT_AT] : places[SLOT_AT] + 2 * size.texts] = -1
    st[places[LANE_SLOT_AT] : places[LANE_SLOT_AT] + 2 * size.lanes] = -1
    st[TEXT_CAP], st[LANE_CAP], st[LAST_LANE] = size.texts, size.lanes, -1
    st[EVENT_CAP], st[ARG_CAP], st[OTHER_CAP] = size.events, size.args, size.events
    st[LAST_PID], st[LAST_TID] = -1, -1
    st[ARENA_CAP], st[SCRATCH_AT] = size.arena_bytes, size.arena_bytes
    st[STACK_AT], st[STACK_CAP] = size.arena_bytes + size.scratch_bytes, size.max_depth
    return st, np.empty(size.arena_bytes + size.scratch_bytes + size.max_depth, np.uint8)


def region(st: IntArray, at: int, width: int, count: int) -> IntArray:
    """View of the first `count` entries of the region whose start stands in st[at], int64[count, width]."""
    start = int(st[at])
    return st[start : start + width * count].reshape(count, width)


def enlarged(st: IntArray, mem: ByteArray, size: Sizes) -> tuple[IntArray, ByteArray]:
    """(st, mem) of the new sizes with the texts, lanes and counters of the old; the row batch must have been drained."""
    new, new_mem = new_state(size)
    fixed = np.r_[0:TEXT_AT]
    new[fixed] = st[fixed]
    texts, lanes, used = int(st[TEXTS]), int(st[LANES]), int(st[ARENA_USED])
    region(new, TEXT_AT, 3, texts)[:] = region(st, TEXT_AT, 3, texts)
    region(new, LANE_AT, 1, lanes)[:] = region(st, LANE_AT, 1, lanes)
    _rehash(new, int(new[SLOT_AT]), 2 * size.texts, region(st, TEXT_AT, 3, texts)[:, 2].copy())
    pairs = region(st, LANE_AT, 1, lanes)[:, 0].view(np.uint64) * _MIX
    _rehash(new, int(new[LANE_SLOT_AT]), 2 * size.lanes, pairs.view(np.int64))
    new_mem[:used] = mem[:used]
    return new, new_mem


@jit
def slot_of(h: np.uint64, size: int) -> int:
    """Home slot of hash `h` in a table of `size` slots, a power of two."""
    return I64((h ^ (h >> _U32)) & np.uint64(size - 1))


@jit
def _rehash(st: IntArray, at: int, size: int, hashes: IntArray) -> None:
    for code in range(len(hashes)):
        slot = slot_of(np.uint64(hashes[code]), size)
        while st[at + slot] >= 0:
            slot = (slot + 1) & (size - 1)
        st[at + slot] = code


@jit
def intern(st: IntArray, mem: ByteArray, buf: ByteArray, a: int, b: int, h: np.uint64) -> int:
    """Code of the text buf[a:b] with hash `h`, or GROW where a table is full. `buf` may be `mem` itself."""
    n = b - a
    texts, slots, size = st[TEXT_AT], st[SLOT_AT], 2 * st[TEXT_CAP]
    signed = I64(h)
    slot = slot_of(h, size)
    probes = 0
    while True:
        code = st[slots + slot]
        if code < 0:
            break
        entry = texts + 3 * code
        if st[entry + 2] == signed and st[entry + 1] == n:
            at = st[entry]
            k = 0
            while k < n and mem[at + k] == buf[a + k]:
                k += 1
            if k == n:
                return I64(code)
        slot = (slot + 1) & (size - 1)
        probes += 1
    if probes > MAX_PROBES:
        st[FLOODS] += 1
    code, at = st[TEXTS], st[ARENA_USED]
    if code == st[TEXT_CAP] or at + n > st[ARENA_CAP]:
        return GROW
    for k in range(n):
        mem[at + k] = buf[a + k]
    entry = texts + 3 * code
    st[entry], st[entry + 1], st[entry + 2], st[slots + slot] = at, n, signed, code
    st[TEXTS] += 1
    st[ARENA_USED] += n
    return I64(code)


@jit
def lane_of(st: IntArray, pid: int, tid: int) -> int:
    """Number of the lane (pid code, tid code), or GROW where the table is full."""
    pair = pid << 32 | (tid & 0xFFFFFFFF)
    lanes, last = st[LANE_AT], st[LAST_LANE]
    if last >= 0 and st[lanes + last] == pair:
        return I64(last)
    slots, size = st[LANE_SLOT_AT], 2 * st[LANE_CAP]
    slot = slot_of(np.uint64(pair) * _MIX, size)
    while True:
        code = st[slots + slot]
        if code < 0:
            break
        if st[lanes + code] == pair:
            st[LAST_LANE] = code
            return I64(code)
        slot = (slot + 1) & (size - 1)
    code = st[LANES]
    if code == st[LANE_CAP]:
        return GROW
    st[lanes + code], st[slots + slot] = pair, code
    st[LANES] += 1
    st[LAST_LANE] = code
    return I64(code)


def text_bytes(st: IntArray, mem: ByteArray, code: int) -> bytes:
    """The interned byte string with this code; b"" for a negative one."""
    if code < 0:
        return b""
    start, length = st[st[TEXT_AT] + 3 * code : st[TEXT_AT] + 3 * code + 2].tolist()
    return mem[start : start + length].tobytes()


CodeMask = npt.NDArray[np.bool_]


def texts_of(st: IntArray, mem: ByteArray, used: CodeMask) -> tuple[list[bytes], IntArray]:
    """(byte strings of the `used` codes, those codes)."""
    codes = np.flatnonzero(used)
    table = region(st, TEXT_AT, 3, int(st[TEXTS]))[codes]
    raw = mem[: int(st[ARENA_USED])].tobytes()
    starts, ends = table[:, 0], table[:, 0] + table[:, 1]
    return [raw[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)], codes
