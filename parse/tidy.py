"""Turns raw times into usable ones: unknown times are marked, impossible ends clipped, and each kind is counted."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import TIME_UNKNOWN, BoolArray, ByteArray, IntArray
from scaletrace.parse.health import Health

_FAR_NS = 1_000_000_000_000
"""A trace whose other events start this long (1,000 s) after zero does not have an event at zero."""

_MAX_NS = 4_000_000_000_000_000_000
_ABSOLUTE_NS = 1_000_000_000_000_000_000
"""Since September 2001; relative times are below a quarter of a year."""
_DAY_NS = 86_400_000_000_000

UNKNOWN_TIME = "records without a usable time"
NEGATIVE = "negative durations set to 0"
PAST_WINDOW = "ends beyond the record window"
ENDLESS = "impossible durations, clipped to the last plausible end"


def mark_unknown(ts: IntArray, health: Health) -> IntArray:
    """`ts` (ns, before the base is added) with TIME_UNKNOWN where a record has none: Kineto then writes 0."""
    out_of_range = np.abs(ts) > _MAX_NS
    zero = ts == 0
    rest = ts[~zero & ~out_of_range]
    unknown = out_of_range
    if len(rest) and zero.any():
        first, span = int(rest.min()), int(rest.max()) - int(rest.min())
        if first > max(_FAR_NS, span):
            unknown = unknown | zero
    if unknown.any():
        health.dropped[UNKNOWN_TIME] += int(unknown.sum())
        ts = ts.copy()
        ts[unknown] = TIME_UNKNOWN
    return ts


def base_for(ts: IntArray, base_ns: int, health: Health) -> int:
    """The base to add to `ts`: 0 where the times are absolute already, although the file names a base."""
    known = ts[ts != TIME_UNKNOWN]
    if base_ns > _ABSOLUTE_NS and len(known) and int(known.min()) > _ABSOLUTE_NS:
        health.guessed["files whose times are absolute in spite of a base"] += 1
        return 0
    return base_ns


def clip(ph: ByteArray, ts: IntArray, dur: IntArray, is_window_end: BoolArray, health: Health) -> IntArray:
    """Durations in ns without negative ones and without ends beyond the record window."""
    negative = dur < 0
    if negative.any():
        health.clipped[NEGATIVE] += int(negative.sum())
        dur = np.where(negative, 0, dur)
    known = ts != TIME_UNKNOWN
    timed = known & (ph == ord("X"))
    dur = np.where(known, dur, 0)
    if is_window_end.any():
        limit, reason = int(ts[is_window_end].max()), PAST_WINDOW
        late = timed & (dur > limit - ts) & (ts <= limit) & (dur > 0)
    else:
        sane = timed & (dur < _DAY_NS)
        latest = np.concatenate([ts[known], ts[sane] + dur[sane]])
        limit, reason = (int(latest.max()) if len(latest) else 0), ENDLESS
        late = timed & (dur >= _DAY_NS) & (dur > limit - ts)
    if late.any():
        health.clipped[reason] += int(late.sum())
        dur = np.where(late, limit - ts, dur)
    return dur
