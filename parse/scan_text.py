"""Turns JSON text in a byte buffer into positions, integers and hashes, without building a Python object.

Every buffer ends in at least `SENTINEL` zero bytes after `end`, so that loops test the byte instead of the position.
Functions return the position after what they read, or a negative code: NEED (the buffer ends inside the value),
BAD (not JSON; `where[WHERE]` is the place) or DEEP (nested too deep).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from scaletrace.jit import jit
from scaletrace.parse.events import ByteArray, IntArray

SENTINEL = 16
WHERE = 32
"""Position in the state array (`where`) of the place of the last error."""

NEED, BAD, GROW, FULL, DEEP = -1, -2, -3, -4, -5

ESCAPE, CONTROL, BAD_ESCAPE, SURROGATE = 1, 2, 4, 8
"""Flags of a string: has escapes; has raw control characters; has escapes that JSON does not know; half a pair."""

IS_INT, IS_FLOAT, IS_HUGE = 0, 1, 2
"""Kinds of a number: fits uint64 with its sign aside; has a fraction or exponent; an integer beyond uint64."""

U64Array = npt.NDArray[np.uint64]

I64 = cast(Callable[[Any], int], np.int64)
"""np.int64 for the compiler, int for the type checker: uint64 and int64 must not meet in one expression."""

FNV_SEED = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
_U10 = np.uint64(10)
_UMAX = np.uint64(0xFFFFFFFFFFFFFFFF)
_I62, _I63 = np.uint64(0x3FFFFFFFFFFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF)
_U0, _U1, _U2 = np.uint64(0), np.uint64(1), np.uint64(2)


@jit
def space(buf: ByteArray, i: int) -> int:
    """First position at or after `i` that is not white space."""
    while True:
        c = buf[i]
        if c == 32 or c == 10 or c == 13 or c == 9:
            i += 1
        else:
            return i


@jit
def fail(i: int, end: int, where: IntArray) -> int:
    """NEED where the buffer ended, BAD (and the place) where the byte is wrong."""
    if i >= end:
        return NEED
    where[WHERE] = i
    return BAD


@jit
def hex_digit(c: int) -> int:
    """Value of a hexadecimal digit, -1 for any other byte."""
    if 48 <= c <= 57:
        return c - 48
    if 97 <= c <= 102:
        return c - 87
    if 65 <= c <= 70:
        return c - 55
    return -1


@jit
def escape_flags(buf: ByteArray, i: int) -> int:
    """Flags of the escape whose backslash stands at `i`."""
    c = buf[i + 1]
    if c == 117:
        for k in range(2, 6):
            if hex_digit(I64(buf[i + k])) < 0:
                return ESCAPE | BAD_ESCAPE
        return ESCAPE
    if c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116:
        return ESCAPE
    return ESCAPE | BAD_ESCAPE


@jit
def string_end(buf: ByteArray, i: int, end: int) -> tuple[int, int]:
    """(position of the closing quote or NEED, flags) of the string whose first character stands at `i`."""
    flags = 0
    while True:
        c = buf[i]
        if c == 34:
            return i, flags
        if c == 92:
            if i + 6 >= end:
                return NEED, flags
            flags |= escape_flags(buf, i)
            i += 2
            continue
        if c < 32:
            if i >= end:
                return NEED, flags
            flags |= CONTROL
        i += 1


@jit
def string_hash(buf: ByteArray, i: int, end: int) -> tuple[int, int, np.uint64]:
    """`string_end` and the FNV-1a hash of the bytes as written."""
    flags = 0
    h = FNV_SEED
    while True:
        c = buf[i]
        if c == 34:
            return i, flags, h
        if c == 92:
            if i + 6 >= end:
                return NEED, flags, h
            flags |= escape_flags(buf, i)
            h = (h ^ c) * FNV_PRIME
            i += 1
            c = buf[i]
        elif c < 32:
            if i >= end:
                return NEED, flags, h
            flags |= CONTROL
        h = (h ^ c) * FNV_PRIME
        i += 1


@jit
def hash_bytes(buf: ByteArray, a: int, b: int) -> np.uint64:
    """FNV-1a hash of buf[a:b]."""
    h = FNV_SEED
    for i in range(a, b):
        h = (h ^ buf[i]) * FNV_PRIME
    return h


@jit
def put_utf8(out: ByteArray, n: int, point: int) -> int:
    """Write one code point as UTF-8 at out[n]; returns the position after it."""
    if point < 0x80:
        out[n] = point
        return n + 1
    if point < 0x800:
        out[n] = 0xC0 | (point >> 6)
        out[n + 1] = 0x80 | (point & 0x3F)
        return n + 2
    if point < 0x10000:
        out[n] = 0xE0 | (point >> 12)
        out[n + 1] = 0x80 | ((point >> 6) & 0x3F)
        out[n + 2] = 0x80 | (point & 0x3F)
        return n + 3
    out[n] = 0xF0 | (point >> 18)
    out[n + 1] = 0x80 | ((point >> 12) & 0x3F)
    out[n + 2] = 0x80 | ((point >> 6) & 0x3F)
    out[n + 3] = 0x80 | (point & 0x3F)
    return n + 4


@jit
def four_hex(buf: ByteArray, i: int) -> int:
    """The number that four hexadecimal digits at `i` write, -1 if they are not all digits."""
    value = 0
    for k in range(4):
        digit = hex_digit(I64(buf[i + k]))
        if digit < 0:
            return -1
        value = value << 4 | digit
    return value


@jit
def code_point(buf: ByteArray, i: int, b: int) -> tuple[int, int]:
    """(code point, bytes) of the \\uXXXX escape or pair of them whose backslash stands at `i`; -1 where there is none."""
    if buf[i + 1] != 117 or i + 6 > b:
        return -1, 0
    point = four_hex(buf, i + 2)
    if 0xD800 <= point < 0xDC00 and i + 12 <= b and buf[i + 6] == 92 and buf[i + 7] == 117:
        low = four_hex(buf, i + 8)
        if 0xDC00 <= low < 0xE000:
            return 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00), 12
    return point, 6


@jit
def unescape(buf: ByteArray, a: int, b: int, out: ByteArray, to: int) -> tuple[int, int]:
    """(end, flags) of the string buf[a:b] with its escapes resolved into UTF-8 in `out` from `to` on.

    Half a surrogate pair becomes U+FFFD; an unknown escape stays as written.
    """
    n, flags, i = to, 0, a
    while i < b:
        c = I64(buf[i])
        if c != 92 or i + 1 >= b:
            out[n] = c
            n += 1
            i += 1
            continue
        kind = I64(buf[i + 1])
        point, length = code_point(buf, i, b)
        if point >= 0:
            i += length
            if 0xD800 <= point < 0xE000:
                flags |= SURROGATE
                point = 0xFFFD
            n = put_utf8(out, n, point)
            continue
        plain = _plain_escape(kind)
        if plain < 0:
            flags |= BAD_ESCAPE
            out[n] = 92
            n += 1
            i += 1
            continue
        out[n] = plain
        n += 1
        i += 2
    return n, flags


@jit
def _plain_escape(kind: int) -> int:
    if kind == 34 or kind == 92 or kind == 47:
        return kind
    if kind == 110:
        return 10
    if kind == 116:
        return 9
    if kind == 114:
        return 13
    if kind == 98:
        return 8
    if kind == 102:
        return 12
    return -1


@jit
def plain_digits(buf: ByteArray, i: int) -> tuple[int, int]:
    """(position after, value) of an integer of at most 18 digits without sign; position `i` where there is none such."""
    first, value = i, 0
    while 48 <= buf[i] <= 57:
        value = value * 10 + I64(buf[i] - np.uint8(48))
        i += 1
    if i - first > 18 or (buf[first] == 48 and i > first + 1):
        return first, 0
    return i, value


@jit
def ends_value(c: int) -> bool:
    """Whether a byte may follow a number: comma, brace, bracket or white space."""
    return c == 44 or c == 125 or c == 93 or c == 32 or c == 10 or c == 13 or c == 9


@jit
def number(buf: ByteArray, i: int, end: int, where: IntArray) -> tuple[int, bool, np.uint64, int, int]:
    """(position after, negative, digits as uint64, power of ten, kind) of the JSON number at `i`.

    The value is digits x 10^power. Digits beyond uint64 are dropped from a fraction and make an integer IS_HUGE.
    """
    negative = buf[i] == 45
    if negative:
        i += 1
    first, digits, power, kind = i, _U0, 0, IS_INT
    limit = (_UMAX - np.uint64(9)) // _U10
    while 48 <= buf[i] <= 57:
        d = np.uint64(buf[i] - np.uint8(48))
        if digits <= limit or digits <= (_UMAX - d) // _U10:
            digits = digits * _U10 + d
        else:
            kind = IS_HUGE
            power += 1
        i += 1
    if i == first or (buf[first] == 48 and i > first + 1):
        return fail(i, end, where), negative, digits, power, kind
    if buf[i] == 46:
        i += 1
        first = i
        full = kind == IS_HUGE
        kind = IS_FLOAT
        while 48 <= buf[i] <= 57:
            if not full and digits <= limit:
                digits = digits * _U10 + np.uint64(buf[i] - np.uint8(48))
                power -= 1
            else:
                full = True
            i += 1
        if i == first:
            return fail(i, end, where), negative, digits, power, kind
    if buf[i] == 101 or buf[i] == 69:
        i, shift = _exponent(buf, i + 1, end, where)
        power += shift
        kind = IS_FLOAT
    if i >= end:
        i = NEED
    return i, negative, digits, power, kind


@jit
def _exponent(buf: ByteArray, i: int, end: int, where: IntArray) -> tuple[int, int]:
    sign = 1
    if buf[i] == 45 or buf[i] == 43:
        if buf[i] == 45:
            sign = -1
        i += 1
    first, value = i, 0
    while 48 <= buf[i] <= 57:
        if value < 100000:
            value = value * 10 + I64(buf[i] - np.uint8(48))
        i += 1
    if i == first:
        return fail(i, end, where), 0
    return i, sign * value


@jit
def scaled(negative: bool, digits: np.uint64, power: int) -> tuple[int, bool]:
    """(digits x 10^power rounded half to even as int64, whether it was out of range and had to be capped)."""
    value = digits
    over = False
    while power > 0 and value != _U0:
        if value > _I63 // _U10:
            over = True
            break
        value = value * _U10
        power -= 1
    if power < 0:
        divisor = _U1
        while power < 0 and divisor <= _UMAX // _U10:
            divisor = divisor * _U10
            power += 1
        if power < 0:
            value = _U0
        else:
            rest = value % divisor
            value = value // divisor
            half = divisor // _U2
            if divisor > _U1 and (rest > half or (rest == half and value % _U2 == _U1)):
                value = value + _U1
    if over or value > _I63:
        value = _I63
        over = True
    whole = I64(value)
    return (-whole if negative else whole), over


@jit
def _product_error(a: float, b: float) -> float:
    """Exact difference between a x b and its rounded value (Dekker's product)."""
    high, low = _halves(a)
    other_high, other_low = _halves(b)
    rounded = a * b
    return ((high * other_high - rounded) + high * other_low + low * other_high) + low * other_low


@jit
def _halves(a: float) -> tuple[float, float]:
    c = 134217729.0 * a
    high = c - (c - a)
    return high, a - high


@jit
def real(negative: bool, digits: np.uint64, power: int) -> float:
    """digits x 10^power as float64; what Python's float gives for up to 18 digits and powers from -22 to 0.

    The quotient is corrected by its exact remainder, since 17 digits and a power of ten do not both fit a float64.
    """
    value = float(np.float64(digits))
    if -22 <= power < 0 and digits < _I62:
        divisor = 10.0**-power
        rest = float(np.float64(I64(digits) - I64(value)))
        quotient = value / divisor
        value = quotient + ((value - quotient * divisor) - _product_error(quotient, divisor) + rest) / divisor
    elif power < 0:
        value = value / 10.0**-power if power >= -300 else 0.0
    elif power > 0:
        value = value * 10.0 ** min(power, 400)
    return -value if negative else value


@jit
def literal(buf: ByteArray, i: int, end: int, where: IntArray) -> int:
    """Position after true, false or null at `i`."""
    c = buf[i]
    if c == 116 and buf[i + 1] == 114 and buf[i + 2] == 117 and buf[i + 3] == 101:
        return i + 4 if i + 4 <= end else NEED
    if c == 110 and buf[i + 1] == 117 and buf[i + 2] == 108 and buf[i + 3] == 108:
        return i + 4 if i + 4 <= end else NEED
    if c == 102 and buf[i + 1] == 97 and buf[i + 2] == 108 and buf[i + 3] == 115 and buf[i + 4] == 101:
        return i + 5 if i + 5 <= end else NEED
    return NEED if i + 5 > end else fail(i, end, where)


@jit
def key_end(buf: ByteArray, i: int, end: int, where: IntArray) -> int:
    """Position of the value that follows the object key whose opening quote is expected at `i`."""
    if buf[i] != 34:
        return fail(i, end, where)
    close, _ = string_end(buf, i + 1, end)
    if close < 0:
        return NEED
    i = space(buf, close + 1)
    if buf[i] != 58:
        return fail(i, end, where)
    return space(buf, i + 1)


@jit
def scalar_end(buf: ByteArray, i: int, end: int, where: IntArray) -> tuple[int, int]:
    """(position after the string, number or literal at `i`, string flags)."""
    c = buf[i]
    if c == 34:
        close, flags = string_end(buf, i + 1, end)
        return (close + 1 if close >= 0 else NEED), flags
    if c == 45 or 48 <= c <= 57:
        return number(buf, i, end, where)[0], 0
    return literal(buf, i, end, where), 0


@jit
def value_end(
    buf: ByteArray, i: int, end: int, stack: ByteArray, bottom: int, room: int, where: IntArray
) -> tuple[int, int]:
    """(position after the JSON value at `i`, flags of its strings); stack[bottom : bottom + room] bounds the depth."""
    depth, flags = 0, 0
    while True:
        c = buf[i]
        if c == 123 or c == 91:
            if depth == room:
                where[WHERE] = i
                return DEEP, flags
            stack[bottom + depth] = c
            depth += 1
            i = space(buf, i + 1)
            if buf[i] == c + 2:
                i += 1
                depth -= 1
            elif c == 123:
                i = key_end(buf, i, end, where)
                if i < 0:
                    return i, flags
                continue
            else:
                continue
        else:
            i, more = scalar_end(buf, i, end, where)
            flags |= more
            if i < 0:
                return i, flags
        i, depth = _close(buf, i, end, stack, bottom, depth, where)
        if i < 0 or depth == 0:
            return i, flags


@jit
def _close(
    buf: ByteArray, i: int, end: int, stack: ByteArray, bottom: int, depth: int, where: IntArray
) -> tuple[int, int]:
    """(position of the next value, depth) after a value has ended at `i`; depth 0 when the outermost one has."""
    while depth > 0:
        i = space(buf, i)
        top = stack[bottom + depth - 1]
        if buf[i] == 44:
            i = space(buf, i + 1)
            return (key_end(buf, i, end, where) if top == 123 else i), depth
        if buf[i] != top + 2:
            return fail(i, end, where), depth
        i += 1
        depth -= 1
    return i, 0


@jit
def compact(buf: ByteArray, a: int, b: int, out: ByteArray, to: int) -> int:
    """End of the JSON value buf[a:b] copied into `out` from `to` on, without the white space between its tokens.

    Escaped characters that need no escape become UTF-8, so that it does not matter whether the writer escaped them.
    """
    n, i, quoted = to, a, False
    while i < b:
        c = buf[i]
        if quoted:
            if c == 92:
                point, length = code_point(buf, i, b)
                if point >= 32 and point != 34 and point != 92 and not 0xD800 <= point < 0xE000:
                    n = put_utf8(out, n, point)
                    i += length
                    continue
                out[n] = c
                n += 1
                i += 1
                c = buf[i]
            elif c == 34:
                quoted = False
        elif c == 34:
            quoted = True
        elif c == 32 or c == 10 or c == 13 or c == 9:
            i += 1
            continue
        out[n] = c
        n += 1
        i += 1
    return n
