"""Turns the text of trace events into columns, at memory speed and without a Python object per event.

`scan_events` reads events from a buffer until the list ends, the buffer ends inside an event, an event is not JSON or a
column is full. An event is taken whole or not at all, so that every stop can be resumed at the returned position.
"""

from __future__ import annotations

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, IntArray
from scaletrace.parse.scan_keys import INT, KEY_SLOTS, LABEL, REAL, TEXT
from scaletrace.parse.scan_state import (
    ARG_AT,
    ARG_CAP,
    ARG_WIDTH,
    ARGS,
    ARGUMENTS,
    CAT,
    CONTENT,
    DENSE,
    DUR,
    EVENT_AT,
    EVENT_CAP,
    EVENT_WIDTH,
    EVENTS,
    FRESH,
    HAVE,
    ID,
    KEYS_AT,
    LAST_PID,
    LAST_TID,
    META,
    NAME,
    OTHER_AT,
    OTHER_CAP,
    OTHER_WIDTH,
    OTHERS,
    PENDING,
    PH,
    PID,
    RECORDS,
    SCRATCH_AT,
    STACK_AT,
    STACK_CAP,
    STATS,
    TEXT_AT,
    TID,
    TS,
    intern,
    lane_of,
)
from scaletrace.parse.scan_text import (
    BAD,
    BAD_ESCAPE,
    CONTROL,
    ESCAPE,
    FULL,
    GROW,
    I64,
    IS_FLOAT,
    IS_HUGE,
    NEED,
    SURROGATE,
    WHERE,
    compact,
    ends_value,
    fail,
    hash_bytes,
    literal,
    number,
    plain_digits,
    real,
    scaled,
    space,
    string_end,
    string_hash,
    unescape,
    value_end,
)

DONE, SEPARATOR = 1, 2
"""Why the scan stopped: the list ended; two events without one comma between them (st[WHERE]: the place)."""

TAG_INT, TAG_UINT, TAG_REAL, TAG_TEXT = 0, 1, 2, 3

CONTROLS, BAD_ESCAPES, SURROGATES, MISTYPED, HUGE, CAPPED, NO_TIME, NO_PHASE = range(8)
"""Positions in the counts of faults."""

HAS_TS, HAS_ID = 1, 2
MISSING = -1

_K_PH, _K_TS, _K_ID, _K_CAT, _K_PID, _K_TID, _K_DUR, _K_NAME, _K_ARGS = (
    int.from_bytes(text.encode(), "big") for text in ("ph", "ts", "id", "cat", "pid", "tid", "dur", "name", "args")
)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_U29 = np.uint64(29)
_I63 = np.uint64(0x7FFFFFFFFFFFFFFF)
_MAX_PRODUCT = 1 << 62
_MAX_PLAIN_US = 9_000_000_000_000_000


@jit
def _count_flags(st: IntArray, flags: int) -> None:
    if flags & CONTROL:
        st[PENDING + CONTROLS] += 1
    if flags & BAD_ESCAPE:
        st[PENDING + BAD_ESCAPES] += 1
    if flags & SURROGATE:
        st[PENDING + SURROGATES] += 1


@jit
def _skip(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> int:
    """Position after the value at `i`."""
    if 48 <= buf[i] <= 57:
        after, _ = plain_digits(buf, i)
        if after > i and ends_value(buf[after]):
            return after
    after, flags = value_end(buf, i, end, mem, st[STACK_AT], st[STACK_CAP], st)
    if flags & ~ESCAPE:
        _count_flags(st, flags)
    return after


@jit
def _text(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> tuple[int, int]:
    """(position after, code) of the value at `i` as text: a string's content, JSON without white space, -1 for null."""
    c = buf[i]
    if c == 34:
        close, flags, h = string_hash(buf, i + 1, end)
        if close < 0:
            return close, 0
        if flags == 0:
            return close + 1, intern(st, mem, buf, i + 1, close, h)
        a = st[SCRATCH_AT]
        b, more = unescape(buf, i + 1, close, mem, a)
        _count_flags(st, flags | more)
        return close + 1, intern(st, mem, mem, a, b, hash_bytes(mem, a, b))
    after = _skip(buf, i, end, st, mem)
    if after < 0 or c == 110:
        return after, MISSING
    if c == 123 or c == 91:
        a = st[SCRATCH_AT]
        b = compact(buf, i, after, mem, a)
        return after, intern(st, mem, mem, a, b, hash_bytes(mem, a, b))
    return after, intern(st, mem, buf, i, after, hash_bytes(buf, i, after))


@jit
def _token(buf: ByteArray, i: int, end: int, last: int, st: IntArray, mem: ByteArray) -> tuple[int, int]:
    """(position after, code) of the value at `i` as JSON text, so that 7 and "7" stay different.

    st[last] is the code that was last found here.
    """
    code = st[last]
    if code >= 0:
        entry = st[TEXT_AT] + 3 * code
        at, n = st[entry], st[entry + 1]
        k = 0
        while k < n and buf[i + k] == mem[at + k]:
            k += 1
        if k == n and ends_value(buf[i + n]):
            return i + n, code
    after = _skip(buf, i, end, st, mem)
    if after < 0:
        return after, 0
    code = intern(st, mem, buf, i, after, hash_bytes(buf, i, after))
    st[last] = code
    return after, I64(code)


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
        value = value * 10 + I64(buf[k] - np.uint8(48))
    return True, (-value if i > a else value)


@jit
def _integer(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> tuple[int, int, int]:
    """(position after, tag, value) of an integer argument; tag -1 where there is none."""
    after, value = plain_digits(buf, i)
    if after > i and ends_value(buf[after]):
        return after, TAG_INT, value
    c = buf[i]
    if c == 45 or 48 <= c <= 57:
        after, negative, digits, power, kind = number(buf, i, end, st)
        if after < 0:
            return after, -1, 0
        if kind == IS_HUGE or (negative and digits > _I63):
            st[PENDING + HUGE] += 1
            return after, -1, 0
        if kind == IS_FLOAT:
            value, over = scaled(negative, digits, power)
            exact = not over and real(negative, digits, power) == np.float64(value)
            if not exact:
                st[PENDING + MISTYPED] += 1
            return after, (TAG_INT if exact else -1), value
        if digits > _I63:
            return after, TAG_UINT, I64(digits)
        value = I64(digits)
        return after, TAG_INT, (-value if negative else value)
    if c == 34:
        close, _ = string_end(buf, i + 1, end)
        if close < 0:
            return close, -1, 0
        ok, value = _digits_in(buf, i + 1, close)
        if not ok:
            st[PENDING + MISTYPED] += 1
        return close + 1, (TAG_INT if ok else -1), value
    if c == 116 or c == 102:
        return literal(buf, i, end, st), TAG_INT, (1 if c == 116 else 0)
    if c != 110:
        st[PENDING + MISTYPED] += 1
    return _skip(buf, i, end, st, mem), -1, 0


@jit
def _real(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> tuple[int, int, int]:
    """(position after, tag, bits) of a float64 argument; tag -1 where there is none."""
    c = buf[i]
    if c == 45 or 48 <= c <= 57:
        after, negative, digits, power, kind = number(buf, i, end, st)
        if after < 0 or kind == IS_HUGE:
            return after, -1, 0
        return after, TAG_REAL, I64(np.float64(real(negative, digits, power)).view(np.int64))
    if c != 110:
        st[PENDING + MISTYPED] += 1
    return _skip(buf, i, end, st, mem), -1, 0


@jit
def _product(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> tuple[int, int, int]:
    """(position after, tag, value) of the product of the integers in [864, 1, 1] or "864,1,1"; tag -1 for all else."""
    after = _skip(buf, i, end, st, mem)
    if after < 0 or buf[i] == 110:
        return after, -1, 0
    product, value, digits, found = 1, 0, 0, 0
    good = buf[i] == 91 or buf[i] == 34 or 48 <= buf[i] <= 57
    for k in range(i, after + 1):
        c = buf[k] if k < after else np.uint8(44)
        if 48 <= c <= 57 and digits < 10:
            value = value * 10 + I64(c) - 48
            digits += 1
        elif c == 44 or c == 32 or c == 91 or c == 93 or c == 10 or c == 13 or c == 9 or (c == 34 and buf[i] == 34):
            if digits > 0:
                good = good and (value == 0 or product <= _MAX_PRODUCT // value)
                product, value, digits, found = product * value, 0, 0, found + 1
        else:
            good = False
        if not good:
            break
    if not good or found == 0:
        st[PENDING + MISTYPED] += 1
        return after, -1, 0
    return after, TAG_INT, product


@jit
def _wanted(st: IntArray, h: np.uint64, length: int) -> int:
    """Number of the argument key with this hash and length, -1 where nobody wants it."""
    slot = I64(h & np.uint64(KEY_SLOTS - 1))
    signed = I64(h)
    while True:
        at = KEYS_AT + 3 * slot
        if st[at + 2] < 0 or (st[at] == signed and st[at + 1] == length):
            return I64(st[at + 2])
        slot = (slot + 1) & (KEY_SLOTS - 1)


@jit
def _mix(key: int, value: np.uint64) -> np.uint64:
    x = (value ^ (np.uint64(key + 1) * _MIX)) * _MIX
    return (x ^ (x >> _U29)) * _MIX


@jit
def _argument(buf: ByteArray, i: int, end: int, key: int, st: IntArray, mem: ByteArray) -> int:
    """Read the wanted argument `key`, whose value starts at `i`; position after it or a stop code."""
    kind = st[KEYS_AT + 3 * KEY_SLOTS + key]
    if kind in (TEXT, LABEL):
        after, code = _text(buf, i, end, st, mem)
        if after < 0 or code == MISSING:
            return after
        if code < 0:
            return code
        if kind == LABEL:
            st[META] = code
            return after
        tag, value, hashed = TAG_TEXT, code, np.uint64(st[st[TEXT_AT] + 3 * code + 2])
    else:
        if kind == INT:
            after, tag, value = _integer(buf, i, end, st, mem)
        elif kind == REAL:
            after, tag, value = _real(buf, i, end, st, mem)
        else:
            after, tag, value = _product(buf, i, end, st, mem)
        if after < 0 or tag < 0:
            return after
        hashed = np.uint64(value)
    st[CONTENT] += I64(_mix(key, hashed))
    if key < 4 and tag == TAG_INT:
        st[DENSE + key] = value
        return after
    at = st[ARGUMENTS] + st[ARGS]
    if at == st[ARG_CAP]:
        return FULL
    at = st[ARG_AT] + ARG_WIDTH * at
    st[at], st[at + 1] = st[EVENTS] << 16 | key << 8 | tag, value
    st[ARGS] += 1
    return after


@jit
def _arguments(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> int:
    """Read the "args" value at `i`; position after it or a stop code."""
    st[ARGS] = 0
    if buf[i] != 123:
        return _skip(buf, i, end, st, mem)
    i = space(buf, i + 1)
    if buf[i] == 125:
        return i + 1
    while True:
        if buf[i] != 34:
            return fail(i, end, st)
        close, flags, h = string_hash(buf, i + 1, end)
        if close < 0:
            return close
        if flags & ~ESCAPE:
            _count_flags(st, flags)
        key = _wanted(st, h, close - i - 1)
        i = space(buf, close + 1)
        if buf[i] != 58:
            return fail(i, end, st)
        i = space(buf, i + 1)
        i = _argument(buf, i, end, key, st, mem) if key >= 0 else _skip(buf, i, end, st, mem)
        if i < 0:
            return i
        i = space(buf, i)
        if buf[i] == 125:
            return i + 1
        if buf[i] != 44:
            return fail(i, end, st)
        i = space(buf, i + 1)


@jit
def _time(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> tuple[int, bool, int]:
    """(position after, whether there is a number, integer ns) of a time in microseconds at `i`."""
    after, value = plain_digits(buf, i)
    if after > i and value < _MAX_PLAIN_US:
        if ends_value(buf[after]):
            return after, True, value * 1000
        if buf[after] == 46 and ends_value(buf[after + 4]):
            part = 0
            for k in range(after + 1, after + 4):
                part = part * 10 + I64(buf[k]) - 48 if 48 <= buf[k] <= 57 else -(1 << 40)
            if part >= 0:
                return after + 4, True, value * 1000 + part
    quoted = buf[i] == 34
    a = i + 1 if quoted else i
    if buf[a] != 45 and not 48 <= buf[a] <= 57:
        return _skip(buf, i, end, st, mem), False, 0
    after, negative, digits, power, _ = number(buf, a, end, st)
    if after < 0:
        return (_skip(buf, i, end, st, mem) if quoted and after == BAD else after), False, 0
    value, over = scaled(negative, digits, power + 3)
    if over:
        st[PENDING + CAPPED] += 1
    if quoted:
        return (after + 1, True, value) if buf[after] == 34 else (_skip(buf, i, end, st, mem), False, 0)
    return after, True, value


@jit
def _value(buf: ByteArray, i: int, end: int, key: int, st: IntArray, mem: ByteArray) -> int:
    """Read the value at `i` of the event key `key` (its bytes as a big-endian number); position after or stop code."""
    if key in (_K_NAME, _K_CAT):
        i, code = _text(buf, i, end, st, mem)
        st[NAME if key == _K_NAME else CAT] = code
        return GROW if i >= 0 and code == GROW else i
    if key in (_K_PID, _K_TID):
        i, code = _token(buf, i, end, LAST_PID if key == _K_PID else LAST_TID, st, mem)
        st[PID if key == _K_PID else TID] = code
        return GROW if i >= 0 and code == GROW else i
    if key == _K_TS:
        i, given, st[TS] = _time(buf, i, end, st, mem)
        if given:
            st[HAVE] |= HAS_TS
        return i
    if key == _K_DUR:
        i, given, st[DUR] = _time(buf, i, end, st, mem)
        return i
    if key == _K_ARGS:
        return _arguments(buf, i, end, st, mem)
    if key == _K_ID:
        mistyped = st[PENDING + MISTYPED]
        i, tag, st[ID] = _integer(buf, i, end, st, mem)
        st[PENDING + MISTYPED] = mistyped
        if tag >= 0:
            st[HAVE] |= HAS_ID
        return i
    if key == _K_PH and buf[i] == 34 and buf[i + 2] == 34:
        st[PH] = buf[i + 1]
        return i + 3
    return _skip(buf, i, end, st, mem)


@jit
def _is_header_key(buf: ByteArray, i: int, length: int) -> bool:
    """Whether the key at `i` is "traceEvents" or "schemaVersion", which means another document's header."""
    if length == 11:
        return bool(
            buf[i] == 116 and buf[i + 1] == 114 and buf[i + 4] == 101 and buf[i + 5] == 69 and buf[i + 10] == 115
        )
    return bool(length == 13 and buf[i] == 115 and buf[i + 1] == 99 and buf[i + 6] == 86 and buf[i + 12] == 110)


@jit
def _event(buf: ByteArray, i: int, end: int, st: IntArray, mem: ByteArray) -> int:
    """Read the object whose brace stands at `i` as the event at hand; position after it or a stop code."""
    for k in range(PENDING + 8):
        st[k] = 0
    st[CAT] = st[NAME] = st[PID] = st[TID] = st[META] = MISSING
    for k in range(DENSE, DENSE + 4):
        st[k] = MISSING
    i = space(buf, i + 1)
    if buf[i] == 125:
        return i + 1
    while True:
        if buf[i] != 34:
            return fail(i, end, st)
        key, close = 0, i + 1
        while buf[close] != 34 and close < i + 6 and buf[close] > 34:
            key = key << 8 | I64(buf[close])
            close += 1
        if buf[close] != 34 or buf[i + 1] == 92:
            key = 0
            close, flags = string_end(buf, i + 1, end)
            if close < 0:
                return close
            if flags or _is_header_key(buf, i + 1, close - i - 1):
                st[WHERE] = i
                return BAD
        i = space(buf, close + 1)
        if buf[i] != 58:
            return fail(i, end, st)
        i = space(buf, i + 1)
        i = _value(buf, i, end, key, st, mem)
        if i < 0:
            return i
        i = space(buf, i)
        if buf[i] == 125:
            return i + 1
        if buf[i] != 44:
            return fail(i, end, st)
        i = space(buf, i + 1)


@jit
def _commit(st: IntArray, offset: int) -> int:
    """Write the event at hand as a row of its kind of record; 0, or GROW / FULL where there is no room."""
    if st[EVENTS] == st[EVENT_CAP] or st[OTHERS] == st[OTHER_CAP]:
        return FULL
    ph = st[PH]
    lane = lane_of(st, st[PID], st[TID])
    if lane < 0:
        return GROW
    at = st[OTHER_AT] + OTHER_WIDTH * st[OTHERS]
    if ph == 77:
        st[at], st[at + 1], st[at + 2], st[at + 3] = ph, lane, st[NAME], st[META]
        st[OTHERS] += 1
    elif ph == 115 or ph == 116 or ph == 102:
        st[at], st[at + 1], st[at + 2], st[at + 3], st[at + 4] = ph, lane, st[CAT], st[ID], st[TS]
        if st[HAVE] == HAS_TS | HAS_ID:
            st[OTHERS] += 1
        else:
            st[PENDING + NO_TIME] += 1
    elif not st[HAVE] & HAS_TS:
        st[PENDING + NO_TIME] += 1
    else:
        if ph == 0:
            st[PENDING + NO_PHASE] += 1
            ph = 88
        at = st[EVENT_AT] + EVENT_WIDTH * st[EVENTS]
        st[at], st[at + 1], st[at + 2], st[at + 3] = ph, st[CAT], st[NAME], lane
        st[at + 4], st[at + 5], st[at + 6], st[at + 7] = st[TS], st[DUR], offset, st[CONTENT]
        for k in range(4):
            st[at + 8 + k] = st[DENSE + k]
        st[EVENTS] += 1
        st[ARGUMENTS] += st[ARGS]
    st[RECORDS] += 1
    for k in range(8):
        st[STATS + k] += st[PENDING + k]
    return 0


@jit
def scan_events(
    buf: ByteArray, i: int, end: int, base: int, strict: bool, fresh: bool, st: IntArray, mem: ByteArray
) -> tuple[int, int]:
    """(why it stopped, position to go on from), reading the list of events from `i`.

    `fresh` says that no comma is due before the next event. `base` is the file offset of buf[0].
    Stops: DONE (after the list's bracket), NEED, BAD and DEEP (at the event's brace; st[WHERE] the wrong byte),
    GROW and FULL (make room and come again), SEPARATOR (at what stands where a comma should). st[FRESH] is the
    `fresh` to come again with.
    """
    while True:
        st[FRESH] = fresh
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
            st[WHERE] = start
            return (NEED if start >= end else SEPARATOR), i
        after = _event(buf, start, end, st, mem)
        if after < 0:
            return after, i
        if strict:
            for k in range(3):
                if st[PENDING + k]:
                    st[WHERE] = start
                    return BAD, i
        stop = _commit(st, base + start)
        if stop < 0:
            return stop, i
        i = after
        fresh = False
