"""Turns the text of trace events into columns, at memory speed and without a Python object per event.

`scan_events` reads events from a buffer until the list ends, the buffer ends inside an event, an event is not JSON or a
column is full. An event is taken whole or not at all, so that every stop can be resumed at the returned position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, IntArray
from scaletrace.parse.scan_keys import INT, LABELS_KEY, NAME_KEY, REAL, TEXT, KeyTable
from scaletrace.parse.scan_tables import Lanes, Rows, Strings, intern, lane_of
from scaletrace.parse.scan_text import (
    BAD,
    BAD_ESCAPE,
    CONTROL,
    ESCAPE,
    FULL,
    GROW,
    IS_FLOAT,
    IS_HUGE,
    NEED,
    SURROGATE,
    U64Array,
    compact,
    fail,
    hash_bytes,
    literal,
    number,
    real,
    scaled,
    space,
    string_end,
    string_hash,
    unescape,
    value_end,
)

DONE, SEPARATOR = 1, 2
"""Why the scan stopped: the list ended; two events without one comma between them (`where[0]`: the place)."""

TAG_INT, TAG_UINT, TAG_REAL, TAG_TEXT = 0, 1, 2, 3

CONTROLS, BAD_ESCAPES, SURROGATES, MISTYPED, HUGE, CAPPED, NO_TIME, NO_PHASE = range(8)
"""Positions in `stats`."""

PH, CAT, NAME, PID, TID, TS, DUR, ID, HAVE, ARGS, META, CORRELATION = range(12)
"""Positions in `field`, the event being read; from CORRELATION on stand the four dense arguments."""

HAS_TS, HAS_ID = 1, 2
NOT_GIVEN = -1
MISSING = -1

_K_PH, _K_TS, _K_ID, _K_CAT, _K_PID, _K_TID, _K_DUR, _K_NAME, _K_ARGS = (
    int.from_bytes(text.encode(), "big") for text in ("ph", "ts", "id", "cat", "pid", "tid", "dur", "name", "args")
)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_U29 = np.uint64(29)
_I63 = np.uint64(0x7FFFFFFFFFFFFFFF)


class Work(NamedTuple):
    """All that the scanner reads and writes besides the buffer. `field`, `pending`, `content`: the event at hand."""

    strings: Strings
    lanes: Lanes
    rows: Rows
    keys: KeyTable
    stack: ByteArray
    scratch: ByteArray
    field: IntArray
    pending: IntArray
    content: U64Array
    stats: IntArray
    where: IntArray


@jit
def _count_flags(pending: IntArray, flags: int) -> None:
    if flags & CONTROL:
        pending[CONTROLS] += 1
    if flags & BAD_ESCAPE:
        pending[BAD_ESCAPES] += 1
    if flags & SURROGATE:
        pending[SURROGATES] += 1


@jit
def _skip(buf: ByteArray, i: int, end: int, w: Work) -> int:
    """Position after the value at `i`."""
    after, flags = value_end(buf, i, end, w.stack, w.where)
    if flags & ~ESCAPE:
        _count_flags(w.pending, flags)
    return after


@jit
def _text(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, int]:
    """(position after, code) of the value at `i` as text: a string's content, JSON without white space, -1 for null."""
    c = buf[i]
    if c == 34:
        close, flags, h = string_hash(buf, i + 1, end)
        if close < 0:
            return close, 0
        if flags == 0:
            return close + 1, intern(w.strings, buf, i + 1, close, h)
        n, more = unescape(buf, i + 1, close, w.scratch)
        _count_flags(w.pending, flags | more)
        return close + 1, intern(w.strings, w.scratch, 0, n, hash_bytes(w.scratch, 0, n))
    after = _skip(buf, i, end, w)
    if after < 0 or c == 110:
        return after, MISSING
    if c == 123 or c == 91:
        n = compact(buf, i, after, w.scratch)
        return after, intern(w.strings, w.scratch, 0, n, hash_bytes(w.scratch, 0, n))
    return after, intern(w.strings, buf, i, after, hash_bytes(buf, i, after))


@jit
def _token(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, int]:
    """(position after, code) of the value at `i` as JSON text, so that 7 and "7" stay different."""
    after = _skip(buf, i, end, w)
    if after < 0:
        return after, 0
    return after, intern(w.strings, buf, i, after, hash_bytes(buf, i, after))


@jit
def _digits_in(buf: ByteArray, a: int, b: int) -> tuple[bool, int]:
    """(whether buf[a:b] is a decimal integer below 10^18, its value)."""
    i = a + 1 if a < b and buf[a] == 45 else a
    if i == b or b - i > 18:
        return False, 0
    value = 0
    for k in range(i, b):
        if buf[k] < 48 or buf[k] > 57:
            return False, 0
        value = value * 10 + np.int64(buf[k] - np.uint8(48))
    return True, (-value if i > a else value)


@jit
def _integer(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, int, int]:
    """(position after, tag, value) of an integer argument; tag -1 where there is none."""
    c = buf[i]
    if c == 45 or 48 <= c <= 57:
        after, negative, digits, power, kind = number(buf, i, end, w.where)
        if after < 0:
            return after, -1, 0
        if kind == IS_HUGE or (negative and digits > _I63):
            w.pending[HUGE] += 1
            return after, -1, 0
        if kind == IS_FLOAT:
            value, over = scaled(negative, digits, power)
            exact = not over and real(negative, digits, power) == np.float64(value)
            if not exact:
                w.pending[MISTYPED] += 1
            return after, (TAG_INT if exact else -1), value
        if digits > _I63:
            return after, TAG_UINT, np.int64(digits)
        value = np.int64(digits)
        return after, TAG_INT, (-value if negative else value)
    if c == 34:
        close, _ = string_end(buf, i + 1, end)
        if close < 0:
            return close, -1, 0
        ok, value = _digits_in(buf, i + 1, close)
        if not ok:
            w.pending[MISTYPED] += 1
        return close + 1, (TAG_INT if ok else -1), value
    if c == 116 or c == 102:
        return literal(buf, i, end, w.where), TAG_INT, (1 if c == 116 else 0)
    if c != 110:
        w.pending[MISTYPED] += 1
    return _skip(buf, i, end, w), -1, 0


@jit
def _real(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, int, int]:
    """(position after, tag, bits) of a float64 argument; tag -1 where there is none."""
    c = buf[i]
    if c == 45 or 48 <= c <= 57:
        after, negative, digits, power, kind = number(buf, i, end, w.where)
        if after < 0 or kind == IS_HUGE:
            return after, -1, 0
        return after, TAG_REAL, np.float64(real(negative, digits, power)).view(np.int64)
    if c != 110:
        w.pending[MISTYPED] += 1
    return _skip(buf, i, end, w), -1, 0


@jit
def _product(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, int, int]:
    """(position after, tag, value) of the product of the integers in a list such as [864, 1, 1] or "864,1,1"."""
    after = _skip(buf, i, end, w)
    if after < 0:
        return after, -1, 0
    product, value, digits = 1, 0, 0
    for k in range(i, after + 1):
        if k < after and 48 <= buf[k] <= 57 and digits < 10:
            value = value * 10 + np.int64(buf[k] - np.uint8(48))
            digits += 1
        elif digits > 0:
            product = product * value if product < (1 << 31) else product
            value = 0
            digits = 0
            if product == 0:
                break
    found = product != 1 or after - i > 2
    return after, (TAG_INT if found and buf[i] != 110 else -1), product


@jit
def _wanted(keys: KeyTable, h: np.uint64, length: int) -> int:
    """Number of the argument key with this hash and length, -1 where nobody wants it."""
    slot = np.int64(h & np.uint64(len(keys.hash) - 1))
    while keys.number[slot] >= 0:
        if keys.hash[slot] == h and keys.length[slot] == length:
            return keys.number[slot]
        slot = (slot + 1) & (len(keys.hash) - 1)
    return -1


@jit
def _mix(key: int, value: np.uint64) -> np.uint64:
    x = (value ^ (np.uint64(key + 1) * _MIX)) * _MIX
    return (x ^ (x >> _U29)) * _MIX


@jit
def _argument(buf: ByteArray, i: int, end: int, key: int, w: Work) -> int:
    """Read the wanted argument `key`, whose value starts at `i`; position after it or a stop code."""
    kind = w.keys.kind[key]
    if kind == TEXT:
        after, code = _text(buf, i, end, w)
        if after < 0 or code == MISSING:
            return after
        if code < 0:
            return code
        if key in (NAME_KEY, LABELS_KEY):
            w.field[META] = code
        tag, value, hashed = TAG_TEXT, code, w.strings.hash[code]
    else:
        if kind == INT:
            after, tag, value = _integer(buf, i, end, w)
        elif kind == REAL:
            after, tag, value = _real(buf, i, end, w)
        else:
            after, tag, value = _product(buf, i, end, w)
        if after < 0 or tag < 0:
            return after
        hashed = np.uint64(value)
    w.content[0] += _mix(key, hashed)
    if key < 4 and tag == TAG_INT:
        w.field[CORRELATION + key] = value
        return after
    rows = w.rows
    at = rows.count[1] + w.field[ARGS]
    if at == len(rows.arg_row):
        return FULL
    rows.arg_row[at], rows.arg_key[at], rows.arg_tag[at], rows.arg_value[at] = rows.count[0], key, tag, value
    w.field[ARGS] += 1
    return after


@jit
def _arguments(buf: ByteArray, i: int, end: int, w: Work) -> int:
    """Read the "args" value at `i`; position after it or a stop code."""
    w.field[ARGS] = 0
    if buf[i] != 123:
        return _skip(buf, i, end, w)
    i = space(buf, i + 1)
    if buf[i] == 125:
        return i + 1
    while True:
        if buf[i] != 34:
            return fail(i, end, w.where)
        close, flags, h = string_hash(buf, i + 1, end)
        if close < 0:
            return close
        if flags & ~ESCAPE:
            _count_flags(w.pending, flags)
        key = _wanted(w.keys, h, close - i - 1)
        i = space(buf, close + 1)
        if buf[i] != 58:
            return fail(i, end, w.where)
        i = space(buf, i + 1)
        i = _argument(buf, i, end, key, w) if key >= 0 else _skip(buf, i, end, w)
        if i < 0:
            return i
        i = space(buf, i)
        if buf[i] == 125:
            return i + 1
        if buf[i] != 44:
            return fail(i, end, w.where)
        i = space(buf, i + 1)


@jit
def _time(buf: ByteArray, i: int, end: int, w: Work) -> tuple[int, bool, int]:
    """(position after, whether there is a number, integer ns) of a time in microseconds at `i`."""
    quoted = buf[i] == 34
    a = i + 1 if quoted else i
    if buf[a] != 45 and not 48 <= buf[a] <= 57:
        return _skip(buf, i, end, w), False, 0
    after, negative, digits, power, _ = number(buf, a, end, w.where)
    if after < 0:
        return (_skip(buf, i, end, w) if quoted and after == BAD else after), False, 0
    value, over = scaled(negative, digits, power + 3)
    if over:
        w.pending[CAPPED] += 1
    if quoted:
        return (after + 1, True, value) if buf[after] == 34 else (_skip(buf, i, end, w), False, 0)
    return after, True, value


@jit
def _value(buf: ByteArray, i: int, end: int, key: int, w: Work) -> int:
    """Read the value at `i` of the event key `key` (its bytes as a big-endian number); position after or stop code."""
    field = w.field
    if key in (_K_NAME, _K_CAT):
        i, code = _text(buf, i, end, w)
        field[NAME if key == _K_NAME else CAT] = code
        return GROW if i >= 0 and code == GROW else i
    if key in (_K_PID, _K_TID):
        i, code = _token(buf, i, end, w)
        field[PID if key == _K_PID else TID] = code
        return GROW if i >= 0 and code == GROW else i
    if key == _K_TS:
        i, given, field[TS] = _time(buf, i, end, w)
        if given:
            field[HAVE] |= HAS_TS
        return i
    if key == _K_DUR:
        i, given, field[DUR] = _time(buf, i, end, w)
        return i
    if key == _K_ARGS:
        return _arguments(buf, i, end, w)
    if key == _K_ID:
        mistyped = w.pending[MISTYPED]
        i, tag, field[ID] = _integer(buf, i, end, w)
        w.pending[MISTYPED] = mistyped
        if tag >= 0:
            field[HAVE] |= HAS_ID
        return i
    if key == _K_PH and buf[i] == 34 and buf[i + 2] == 34:
        field[PH] = buf[i + 1]
        return i + 3
    return _skip(buf, i, end, w)


@jit
def _event(buf: ByteArray, i: int, end: int, w: Work) -> int:
    """Read the object whose brace stands at `i` into `field`; position after it or a stop code."""
    w.field[:] = 0
    w.field[CAT] = w.field[NAME] = w.field[PID] = w.field[TID] = w.field[META] = NOT_GIVEN
    w.field[CORRELATION:] = MISSING
    w.content[0] = np.uint64(0)
    w.pending[:] = 0
    i = space(buf, i + 1)
    if buf[i] == 125:
        return i + 1
    while True:
        if buf[i] != 34:
            return fail(i, end, w.where)
        close, flags = string_end(buf, i + 1, end)
        if close < 0:
            return close
        if flags:
            w.where[0] = i
            return BAD
        key = 0
        if close - i <= 5:
            for k in range(i + 1, close):
                key = key << 8 | np.int64(buf[k])
        i = space(buf, close + 1)
        if buf[i] != 58:
            return fail(i, end, w.where)
        i = space(buf, i + 1)
        i = _value(buf, i, end, key, w)
        if i < 0:
            return i
        i = space(buf, i)
        if buf[i] == 125:
            return i + 1
        if buf[i] != 44:
            return fail(i, end, w.where)
        i = space(buf, i + 1)


@jit
def _commit(w: Work, offset: int) -> int:
    """Move `field` to the columns of its kind of record; 0, or GROW / FULL where there is no room."""
    field, rows = w.field, w.rows
    count = rows.count
    if count[0] == len(rows.ph) or count[2] == len(rows.flow_ph) or count[3] == len(rows.meta_name):
        return FULL
    ph = field[PH]
    lane = lane_of(w.lanes, field[PID], field[TID])
    if lane < 0:
        return GROW
    if ph == 77:
        n = count[3]
        rows.meta_name[n], rows.meta_lane[n], rows.meta_value[n] = field[NAME], lane, field[META]
        count[3] += 1
    elif ph == 115 or ph == 116 or ph == 102:
        n = count[2]
        rows.flow_ph[n], rows.flow_cat[n], rows.flow_lane[n] = ph, field[CAT], lane
        rows.flow_id[n], rows.flow_ts[n] = field[ID], field[TS]
        if field[HAVE] & HAS_ID and field[HAVE] & HAS_TS:
            count[2] += 1
        else:
            w.pending[NO_TIME] += 1
    elif not field[HAVE] & HAS_TS:
        w.pending[NO_TIME] += 1
    else:
        if ph == 0:
            w.pending[NO_PHASE] += 1
            ph = 88
        n = count[0]
        rows.ph[n], rows.cat[n], rows.name[n], rows.lane[n] = ph, field[CAT], field[NAME], lane
        rows.ts[n], rows.dur[n], rows.offset[n], rows.content[n] = field[TS], field[DUR], offset, w.content[0]
        for k in range(4):
            rows.dense[n, k] = field[CORRELATION + k]
        count[0] += 1
        count[1] += field[ARGS]
    count[4] += 1
    for k in range(len(w.pending)):
        w.stats[k] += w.pending[k]
    return 0


@jit
def scan_events(buf: ByteArray, i: int, end: int, base: int, strict: bool, fresh: bool, w: Work) -> tuple[int, int]:
    """(why it stopped, position to go on from), reading the list of events from `i`.

    `fresh` says that no comma is due before the next event. `base` is the file offset of buf[0].
    Stops: DONE (after the list's bracket), NEED, BAD and DEEP (at the event's brace; `where[0]` the wrong byte),
    GROW and FULL (make room and come again), SEPARATOR (at what stands where a comma should). `where[1]` is the
    `fresh` to come again with.
    """
    while True:
        w.where[1] = fresh
        i = space(buf, i)
        if buf[i] == 93:
            return DONE, i + 1
        if not fresh:
            if buf[i] != 44:
                return (NEED if i >= end else SEPARATOR), i
            start = space(buf, i + 1)
        else:
            start = i
        if buf[start] != 123:
            w.where[0] = start
            return (NEED if start >= end else SEPARATOR), i
        after = _event(buf, start, end, w)
        if after < 0:
            return after, i
        if strict:
            for k in range(3):
                if w.pending[k]:
                    w.where[0] = start
                    return BAD, i
        stop = _commit(w, base + start)
        if stop < 0:
            return stop, i
        i = after
        fresh = False
