"""Turns integers of ns and bytes, rates and fractions into short text for people; None is shown as a dash, never as 0."""

from __future__ import annotations

import math

MISSING = "–"
_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
_BYTES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_RATES = ((10**12, "TB/s"), (10**9, "GB/s"), (10**6, "MB/s"), (10**3, "kB/s"))
LONGEST_NAME = 4096
"""Characters of a name that are kept; C++ kernel names of 2,000 are real, longer ones are junk or an attack."""


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float (bool is not a number here)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _digits(value: float) -> str:
    """Three significant digits, without exponents for what people meet."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _scaled(value: float | None, scales: tuple[tuple[int, str], ...], unit: str) -> str:
    if value is None or not is_number(value):
        return MISSING
    for scale, name in scales:
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {name}"
    return f"{_digits(value)} {unit}"


def duration(ns: float | None) -> str:
    """Nanoseconds with a fitting unit: 1234567 → "1.23 ms"."""
    return _scaled(ns, _TIMES, "ns")


def seconds(value_s: float | None) -> str:
    """Seconds with a fitting unit: 0.0312 → "31.2 ms"."""
    return MISSING if value_s is None or not is_number(value_s) else duration(value_s * 1e9)


def size(size_bytes: float | None) -> str:
    """Bytes in decimal units, as nccl-tests and links count: 65536 → "65.5 kB"; negative stands for unknown in our tables."""
    return _scaled(size_bytes if size_bytes is not None and size_bytes >= 0 else None, _BYTES, "B")


def rate(rate_Bps: float | None) -> str:
    """Bytes a second in decimal units, as links are sold: 2.5e10 → "25 GB/s"."""
    return _scaled(rate_Bps, _RATES, "B/s")


def percent(fraction: float | None, signed: bool = False) -> str:
    """A fraction as a percentage: 0.0312 → "3.1 %"."""
    if fraction is None or not is_number(fraction):
        return MISSING
    value = round(fraction * 100, 2)
    if value == 0:
        return "0 %"
    digits = 0 if abs(value) >= 99.95 else 2 if abs(value) < 1 else 1
    return f"{value:+.{digits}f} %" if signed else f"{value:.{digits}f} %"


def number(value: float | None) -> str:
    """A count or a plain number: 123456 → "123,456"."""
    return MISSING if value is None or not is_number(value) else _digits(value)


def clean(text: object, limit: int = LONGEST_NAME) -> str:
    """`text` safe to show anywhere: control and invisible characters as escapes, lone surrogates replaced, at most `limit` long.

    Escapes such as ``\\x1b`` stay readable; a cut name ends in "…" and says how long it was.
    """
    raw = str(text)
    kept = raw[:limit]
    if not kept.isprintable():
        kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in kept)[: 2 * limit]
    return kept if len(raw) <= limit else f"{kept}… ({len(raw):,} characters)"


def shorten(text: object, width: int) -> str:
    """`text`, cleaned, cut in the middle to `width` characters: kernel names differ at both ends."""
    whole = clean(text)
    if len(whole) <= width:
        return whole
    head = (width - 1) * 2 // 3
    return f"{whole[:head]}…{whole[len(whole) - (width - 1 - head) :]}"
