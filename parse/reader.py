"""Turns one Kineto file, however it is compressed, formatted or damaged, into an event table and its header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from scaletrace.errors import CorruptTraceError, NotATraceError
from scaletrace.parse import scan
from scaletrace.parse.document import Document, Walker
from scaletrace.parse.events import Events, IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.kernels import Rules
from scaletrace.parse.limits import DEFAULT, Limits
from scaletrace.parse.ondemand import arguments_at
from scaletrace.parse.overrun import clip_overruns
from scaletrace.parse.pieces import Damage, checked_utf8, opened, pieces
from scaletrace.parse.scan_state import STATS
from scaletrace.parse.survey import survey
from scaletrace.parse.table import build

_MAX_BASE_NS = 4_000_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file as read: events, the top-level keys beside them, and what had to be done.

    `records` counts all entries of the event list that were read, flow arrows and metadata included.
    `offsets` int64[n]: where each event's text starts in the decompressed document.
    `legacy` marks the list-at-root form, whose times count from the profiler's start and can't be aligned over ranks.
    """

    source: str
    events: Events
    header: Mapping[str, Any]
    health: Health = field(default_factory=Health)
    records: int = 0
    truncated: bool = False
    legacy: bool = False
    offsets: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    limits: Limits = DEFAULT

    def arguments(self, rows: Sequence[int] | IntArray) -> list[dict[str, Any]]:
        """All arguments of these event rows, those without a column included, read from the file again."""
        return arguments_at(
            self.source.split("#rank")[0], self.offsets[np.asarray(rows, np.int64)].tolist(), self.limits
        )


def read_file(
    source: str | Path | IO[bytes], *, strict: bool = False, limits: Limits = DEFAULT, rules: Rules | None = None
) -> TraceFile:
    """Read one trace from a path, an fsspec URL or a binary stream; plain, gzip or zstd.

    Damage is repaired event by event and counted in `health`; `strict` refuses it with the byte offset instead.
    Kernels that no rule classifies are listed there; `rules` as in `kernels.load_rules`, by default those that ship.
    Raises InputError (can't be opened), NotATraceError (something else), CorruptTraceError and LimitError.
    """
    name = str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "stream"))
    health, damage = Health(), Damage()
    with opened(source) as stream:
        parts = pieces(stream, name, limits, damage)
        document = Walker(checked_utf8(parts, name) if strict else parts, name, limits, strict, health).run()
    if damage.reason:
        if strict:
            raise CorruptTraceError(f"{name}: {damage.reason}; read it without --strict to keep the readable prefix")
        health.note(f"truncated: {damage.reason}; the readable prefix is used")
    document.table.drain()
    if not document.has_events:
        raise NotATraceError(f"{name}: JSON without a list of traceEvents; give a Kineto trace")
    if document.list_at_root and not document.table.records:
        raise NotATraceError(f"{name}: a list without trace events; give a Kineto trace")
    _count(document, health)
    base_ns = _base_ns(document, health)
    events, offsets = build(document.table, base_ns, health)
    events = clip_overruns(events, health)
    survey(events, health, rules)
    return TraceFile(
        source=name,
        events=events,
        header=document.header,
        health=health,
        records=document.table.records,
        truncated=document.truncated or bool(damage.reason),
        legacy=document.list_at_root,
        offsets=offsets,
        limits=limits,
    )


def _count(document: Document, health: Health) -> None:
    stats = document.table.st[STATS : STATS + 8]
    for kind, at, reason in (
        ("repaired", scan.CONTROLS, "strings with raw control characters"),
        ("repaired", scan.BAD_ESCAPES, "strings with unknown escapes"),
        ("repaired", scan.SURROGATES, "strings with half a surrogate pair"),
        ("guessed", scan.NO_PHASE, "records without a phase taken as spans"),
        ("clipped", scan.CAPPED, "times beyond 64 bits"),
        ("dropped", scan.HUGE, "integers beyond 64 bits left out of the columns"),
        ("dropped", scan.MISTYPED, "arguments of an unexpected type left out of the columns"),
        ("dropped", scan.NO_TIME, "records without a time or id"),
    ):
        if stats[at]:
            getattr(health, kind)[reason] += int(stats[at])
    if document.list_at_root:
        health.note(
            "legacy trace (list at the root): times count from the profiler's start, not alignable across ranks"
        )


def _base_ns(document: Document, health: Health) -> int:
    """baseTimeNanoseconds wherever it stood, 0 for older files, whose times are absolute."""
    value = document.header.get("baseTimeNanoseconds")
    try:
        base_ns = int(value or 0)
    except (TypeError, ValueError, OverflowError):
        base_ns = _MAX_BASE_NS
    if abs(base_ns) >= _MAX_BASE_NS:
        health.dropped["unusable baseTimeNanoseconds"] += 1
        return 0
    return base_ns
