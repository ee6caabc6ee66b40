"""Turns batches of scanned rows into whole columns, while the scanner's own buffers stay small."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import IntArray
from scaletrace.parse.limits import Limits
from scaletrace.parse.scan import MISSING, Work, scan_events
from scaletrace.parse.scan_keys import NAMES, key_table
from scaletrace.parse.scan_tables import grown_lanes, grown_strings, new_lanes, new_rows, new_strings
from scaletrace.parse.scan_text import FULL, GROW, SENTINEL

_EVENT_COLUMNS = ("ph", "cat", "name", "lane", "ts", "dur", "offset", "content")
_FLOW_COLUMNS = ("flow_ph", "flow_cat", "flow_lane", "flow_id", "flow_ts")
_META_COLUMNS = ("meta_name", "meta_lane", "meta_value")


class RawTable:
    """The growing columns of one file. `work` is what the scanner writes into."""

    __slots__ = ("_args", "_chunks", "events", "records", "repaired", "work")

    def __init__(self, limits: Limits) -> None:
        events = max(limits.piece_bytes // 64, 256)
        self._chunks: dict[str, list[npt.NDArray[Any]]] = {}
        self._args: list[list[tuple[npt.NDArray[Any], ...]]] = [[] for _ in NAMES]
        self.events, self.records, self.repaired = 0, 0, 0
        self.work = Work(
            new_strings(),
            new_lanes(),
            new_rows(events, 8 * events),
            key_table(),
            np.zeros(limits.max_depth, np.uint8),
            np.zeros(limits.piece_bytes + (1 << 16), np.uint8),
            np.zeros(15, np.int64),
            np.zeros(8, np.int64),
            np.zeros(1, np.uint64),
            np.zeros(8, np.int64),
            np.zeros(2, np.int64),
        )

    def fit(self, buffer_bytes: int) -> None:
        """Make sure that a value as long as the buffer fits into the scratch space."""
        if len(self.work.scratch) < buffer_bytes:
            self.work = self.work._replace(scratch=np.zeros(buffer_bytes, np.uint8))

    def grow(self, buffer_bytes: int) -> None:
        """Make room in whichever table is full; `buffer_bytes` bounds the longest text that may come."""
        strings, lanes = self.work.strings, self.work.lanes
        if lanes.used[0] == len(lanes.pair):
            self.work = self.work._replace(lanes=grown_lanes(lanes))
            return
        self.work = self.work._replace(strings=grown_strings(strings, min(buffer_bytes, 1 << 20) + buffer_bytes // 8))

    def drain(self) -> None:
        """Move the batch to the columns; where it was empty, one event needs more room than there is."""
        rows = self.work.rows
        events, args, flows, metas, records = (int(n) for n in rows.count)
        if records == 0:
            self.work = self.work._replace(rows=new_rows(2 * len(rows.ph), 2 * len(rows.arg_row)))
            return
        for names, count in ((_EVENT_COLUMNS, events), (_FLOW_COLUMNS, flows), (_META_COLUMNS, metas)):
            for name in names if count else ():
                self._chunks.setdefault(name, []).append(getattr(rows, name)[:count].copy())
        if events:
            self._chunks.setdefault("dense", []).append(rows.dense[:events].copy())
        self._drain_args(args)
        self.events += events
        self.records += records
        rows.count[:] = 0

    def _drain_args(self, count: int) -> None:
        rows = self.work.rows
        key = rows.arg_key[:count]
        order = np.argsort(key, kind="stable")
        bounds = np.searchsorted(key[order], np.arange(len(NAMES) + 1))
        row = rows.arg_row[:count][order] + np.int32(self.events)
        tag, value = rows.arg_tag[:count][order], rows.arg_value[:count][order]
        for number in np.flatnonzero(np.diff(bounds)):
            part = slice(bounds[number], bounds[number + 1])
            tags = tag[part]
            narrow = value[part].astype(np.int32) if (tags == 3).all() else value[part].copy()
            self._args[number].append((row[part].copy(), tags.copy(), narrow))

    def add(self, text: bytes, offset: int) -> bool:
        """Scan one event that stands as `text`; `offset` is where the original stood. False where it is not taken."""
        data = np.zeros(len(text) + 16 + SENTINEL, np.uint8)
        data[: len(text) + 16] = np.frombuffer(text + b"]" + b" " * 15, np.uint8)
        self.fit(len(data))
        before = self._total()
        while True:
            stop, _ = scan_events(data, 0, len(text) + 16, offset, False, True, self.work)
            if stop == GROW:
                self.grow(len(data))
            elif stop == FULL:
                self.drain()
            else:
                return self._total() > before

    def _total(self) -> int:
        return self.records + int(self.work.rows.count[4])

    def take(self, name: str, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """One whole column; the pieces it was made of are freed."""
        chunks = self._chunks.pop(name, [])
        if not chunks:
            return np.zeros((0, 4) if name == "dense" else 0, dtype)
        return np.concatenate(chunks)

    def take_arg(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[Any]] | None:
        """(rows, tags, values) of one argument in file order; freed here."""
        chunks, self._args[number] = self._args[number], []
        if not chunks:
            return None
        rows, tags, values = (np.concatenate([chunk[k] for chunk in chunks]) for k in range(3))
        return rows, tags, values

    def texts(self, used: npt.NDArray[np.bool_]) -> tuple[list[bytes], IntArray]:
        """(byte strings of the `used` codes, their codes)."""
        strings = self.work.strings
        codes = np.flatnonzero(used)
        raw = strings.arena[: int(strings.used[1])].tobytes()
        starts = strings.start[codes]
        ends = starts + strings.length[codes]
        return [raw[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)], codes

    def text(self, code: int) -> bytes:
        """One interned byte string; b"" for MISSING."""
        if code == MISSING:
            return b""
        strings = self.work.strings
        start = int(strings.start[code])
        return strings.arena[start : start + int(strings.length[code])].tobytes()
