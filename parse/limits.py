"""Turns the question "how much may one file cost?" into numbers that every reader checks."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that guard against hostile or broken input; each error names the field that raises it.

    max_bytes        decompressed size of one file
    max_ratio        decompressed / compressed size, looked at once `ratio_floor_bytes` are out (a gzip bomb has 1,000)
    max_event_bytes  one event, or one top-level value, as JSON text
    max_depth        nesting of lists and objects inside an event or a top-level value
    piece_bytes      how much is decompressed and scanned at a time
    """

    max_bytes: int = 16 << 30
    max_ratio: int = 400
    ratio_floor_bytes: int = 256 * MIB
    max_event_bytes: int = 64 * MIB
    max_depth: int = 128
    piece_bytes: int = MIB


DEFAULT = Limits()

MOST_RANKS = 1 << 20
"""No job is larger; a rank or world size beyond it is damage, and would cost memory by the rank."""
