"""Turns drawing calls into a native Perfetto trace (.pftrace): packets with interned names, streamed to a file."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import Measured
from scaletrace.replay.critical_path import CriticalPath
from scaletrace.replay.timeline import Timeline
from scaletrace.view import packets, units, wire
from scaletrace.view.layout import Variant
from scaletrace.view.path import path_of
from scaletrace.view.scene import Scene
from scaletrace.view.sink import Argument, FloatArray, Flow, Slices

CHUNK = 1 << 17
"""Slices encoded at a time: about 10 MB."""
_SEQUENCE = 1
_CATEGORIES, _NAMES, _KEYS, _VALUES = 1, 2, 3, 29
_YEAR_2001_NS = 10**18


@dataclass(slots=True)
class _Interner:
    """Ids of strings that the trace names once; ids start at 1."""

    field: int
    ids: dict[str, int]

    def ids_of(self, codes: IntArray, texts: Sequence[str], new: list[bytes]) -> IntArray:
        """int64 ids of `texts[codes]`; a packet that introduces the unseen ones is appended to `new`."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
        table = np.zeros(len(texts), np.int64)
        fresh: list[tuple[int, str]] = []
        for code in used.tolist():
            text = units.clean(texts[code])
            known = self.ids.get(text)
            if known is None:
                known = self.ids[text] = len(self.ids) + 1
                fresh.append((known, text))
            table[code] = known
        if fresh:
            new.append(wire.interned_packet(_SEQUENCE, self.field, fresh))
        return table[codes]


class PerfettoSink:
    """A `Sink` that writes a Perfetto trace to a binary file. All times must be at or after `base_ns`."""

    def __init__(self, out: BinaryIO, base_ns: int = 0) -> None:
        self._out = out
        self._base_ns = base_ns
        self._uuids = 0
        self._interners = {field: _Interner(field, {}) for field in (_CATEGORIES, _NAMES, _KEYS, _VALUES)}
        self.slices_written = 0
        self.counter_steps = 0
        self.bytes_written = 0
        self._write(wire.clock_packets(_SEQUENCE, max(base_ns, 0), base_ns > _YEAR_2001_NS))

    def _write(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self.bytes_written += len(data)

    def process(self, pid: int, name: str) -> None:
        self._uuids += 1
        self._write(wire.process_packet(self._uuids, pid, units.clean(name)))

    def track(self, name: str, parent: int = 0, order: int = 0, unit: str = "", description: str = "") -> int:
        self._uuids += 1
        self._write(wire.track_packet(self._uuids, units.clean(name), parent, order, unit, units.clean(description)))
        return self._uuids

    def slices(self, batch: Slices) -> None:
        for first in range(0, len(batch), CHUNK):
            self._chunk(batch, first, min(first + CHUNK, len(batch)))
        self.slices_written += len(batch)

    def _chunk(self, batch: Slices, first: int, last: int) -> None:
        n, new = last - first, []  # type: int, list[bytes]
        name = self._interners[_NAMES].ids_of(batch.name[first:last], batch.names, new)
        category = self._interners[_CATEGORIES].ids_of(batch.category[first:last], batch.names, new)
        flow_ptr, flow = _flows(batch.flow, first, last)
        arg_ptr, arguments = self._arguments(batch.arguments, first, last, new)
        for data in new:
            self._write(data)
        out = packets.room_for(n, len(flow), len(arguments[0]))
        used = packets.write_slices(
            out,
            _SEQUENCE,
            batch.track[first:last],
            batch.start_ns[first:last] - self._base_ns,
            batch.end_ns[first:last] - self._base_ns,
            name,
            category,
            flow_ptr,
            flow,
            arg_ptr,
            *arguments,
        )
        self._write(out[:used].data)

    def _arguments(
        self, arguments: Sequence[Argument], first: int, last: int, new: list[bytes]
    ) -> tuple[IntArray, tuple[IntArray, IntArray, IntArray]]:
        """CSR over the rows first…last of (key id, kind, value)."""
        rows, keys, kinds, values = [], [], [], []
        for argument in arguments:
            low, high = np.searchsorted(argument.rows, (first, last))
            if low == high:
                continue
            key = self._interners[_KEYS].ids_of(np.zeros(1, np.int64), [argument.key], new)[0]
            value, kind = self._value(argument, slice(low, high), new)
            rows.append(argument.rows[low:high] - first)
            keys.append(np.full(high - low, key, np.int64))
            kinds.append(np.full(high - low, kind, np.int64))
            values.append(value)
        if not rows:
            return np.zeros(last - first + 1, np.int64), (_NONE, _NONE, _NONE)
        ptr, order = packets.by_row(last - first, np.concatenate(rows))
        key_column, kind_column, value_column = (np.concatenate(parts)[order] for parts in (keys, kinds, values))
        return ptr, (key_column, kind_column, value_column)

    def _value(self, argument: Argument, part: slice, new: list[bytes]) -> tuple[IntArray, int]:
        values = argument.values[part]
        if len(argument.texts):
            return self._interners[_VALUES].ids_of(values.astype(np.int64), argument.texts, new), packets.TEXT
        if values.dtype == np.float64:
            return np.ascontiguousarray(values).view(np.int64), packets.DOUBLE
        return values.astype(np.int64), packets.INT

    def counter(self, track: int, at_ns: IntArray, values: IntArray | FloatArray) -> None:
        is_double = values.dtype == np.float64
        for first in range(0, len(at_ns), CHUNK):
            part = slice(first, first + CHUNK)
            bits = np.ascontiguousarray(values[part]).view(np.int64)
            out = packets.room_for(len(bits), 0, 0)
            used = packets.write_counter(out, _SEQUENCE, track, at_ns[part] - self._base_ns, bits, is_double)
            self._write(out[:used].data)
        self.counter_steps += len(at_ns)

    def close(self) -> None:
        self._out.flush()


_NONE: IntArray = np.zeros(0, np.int64)


def _flows(flow: Flow | None, first: int, last: int) -> tuple[IntArray, IntArray]:
    """CSR of the flow ids of the rows first…last."""
    if flow is None:
        return np.zeros(last - first + 1, np.int64), _NONE
    low, high = np.searchsorted(flow.rows, (first, last))
    ptr, order = packets.by_row(last - first, flow.rows[low:high] - first)
    return ptr, flow.ids[low:high][order]


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What went into a trace file. `flows_backward` counts arrows left out because they would point back in time."""

    path: Path
    slices: int
    flows: int
    processes: int
    tracks: int
    extra_tracks: int
    counter_steps: int
    flows_backward: int
    size_bytes: int


def variants_of(timeline: Timeline, measured: Measured | None, projected: Timeline | None) -> list[Variant]:
    """The timelines to draw side by side; a projected one is moved so that it begins where the replayed one does."""
    everything = np.ones(len(timeline.graph), np.bool_)
    out = [Variant("", timeline.graph, timeline.start_ns, timeline.end_ns, everything)]
    if measured is not None:
        out.append(Variant("measured", timeline.graph, measured.start_ns, measured.end_ns, measured.known))
    if projected is not None:
        shift = timeline.origin_ns - projected.origin_ns
        start, end = projected.start_ns + shift, projected.end_ns + shift
        out.append(Variant("projected", projected.graph, start, end, np.ones(len(projected.graph), np.bool_)))
    return out


def write_timeline(
    path: str | Path,
    timeline: Timeline,
    *,
    measured: Measured | None = None,
    critical_path: CriticalPath | None = None,
    ranks: Sequence[int] | None = None,
    projected: Timeline | None = None,
    counters: bool = True,
) -> WriteReport:
    """Write `timeline` to a .pftrace (gzip where the name ends in .gz); the file appears complete or not at all.

    `measured` and `projected` are drawn beside it, lane by lane; `ranks` selects some ranks of a big job. The critical
    path may be that of `timeline` or of `projected`.
    """
    variants = variants_of(timeline, measured, projected)
    starts = [int(v.start_ns[v.known].min()) for v in variants if v.known.any()]
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with _open(partial, target.suffix == ".gz") as out:
            sink = PerfettoSink(out, min(starts, default=0))
            ahead = critical_path is not None and critical_path.timeline is projected
            shift_ns = timeline.origin_ns - projected.origin_ns if projected is not None and ahead else 0
            chain = path_of(critical_path, shift_ns) if critical_path is not None else None
            drawn = Scene(sink, counters).draw(variants, chain, ranks, len(variants) - 1 if ahead else 0)
            sink.close()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return WriteReport(
        target,
        drawn.slices,
        drawn.flows,
        drawn.processes,
        drawn.tracks,
        drawn.extra_tracks,
        drawn.counter_steps,
        drawn.flows_backward,
        target.stat().st_size,
    )


def _open(path: Path, compress: bool) -> BinaryIO:
    """A file to write to, in large pieces."""
    return cast(BinaryIO, gzip.open(path, "wb", 6)) if compress else path.open("wb", buffering=1 << 20)
