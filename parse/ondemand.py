"""Turns event rows back into their full arguments, by reading the file again at the places where the events stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaletrace.parse import salvage
from scaletrace.parse.buffer import Buffer
from scaletrace.parse.limits import Limits
from scaletrace.parse.pieces import Damage, opened, pieces
from scaletrace.parse.scan_text import NEED, WHERE, space, value_end


def arguments_at(source: str | Path, offsets: Sequence[int], limits: Limits) -> list[dict[str, Any]]:
    """The "args" object of the event at each document offset, in the order asked; {} where an event has none.

    Values are as in the file: exact integers, nested lists, None where the file has no value.
    """
    found: dict[int, dict[str, Any]] = {}
    with opened(source) as stream:
        buf = Buffer(pieces(stream, str(source), limits, Damage()), limits.piece_bytes + (1 << 16))
        for offset in sorted({int(offset) for offset in offsets}):
            if not _advance(buf, offset):
                break
            event = _event(buf, limits)
            args = event.get("args")
            found[offset] = args if isinstance(args, dict) else {}
    return [found.get(int(offset), {}) for offset in offsets]


def _advance(buf: Buffer, offset: int) -> bool:
    while offset >= buf.base + buf.end:
        buf.at = buf.end
        if not buf.more():
            return False
    buf.at = offset - buf.base
    return True


def _event(buf: Buffer, limits: Limits) -> dict[str, Any]:
    stack, state = np.zeros(limits.max_depth, np.uint8), np.zeros(WHERE + 1, np.int64)
    while True:
        start = int(space(buf.data, buf.at))
        after, _ = value_end(buf.data, start, buf.end, stack, 0, len(stack), state)
        if after != NEED or not buf.more():
            break
    if after > 0:
        try:
            value = json.loads(buf.text(start, after).decode("utf-8", "replace"), strict=False)
            return value if isinstance(value, dict) else {}
        except (ValueError, RecursionError):
            pass  # an integer of thousands of digits: the forgiving reader takes it as a real number
    for raw, final in buf.growing(limits.max_event_bytes):
        stop = salvage.event_end(raw, final)
        if stop:
            break
    try:
        return salvage.decode_event(raw[: stop or len(raw)])[0]
    except salvage.Unreadable:
        return {}
