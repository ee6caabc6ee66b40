"""Turns batches of scanned rows into whole columns, while the scanner's own tables stay small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse import scan_state as state
from scaletrace.parse.events import ByteArray, Int32Array, IntArray
from scaletrace.parse.limits import Limits
from scaletrace.parse.scan import TAG_TEXT, scan_events
from scaletrace.parse.scan_keys import NAMES
from scaletrace.parse.scan_text import FULL, GROW, SENTINEL

_EVENT_COLUMNS = (
    ("ph", 0, np.uint8),
    ("cat", 1, np.int32),
    ("name", 2, np.int32),
    ("lane", 3, np.int32),
    ("ts", 4, np.int64),
    ("dur", 5, np.int64),
    ("offset", 6, np.int64),
    ("content", 7, np.int64),
    ("correlation", 8, np.int64),
    ("external_id", 9, np.int64),
    ("stream", 10, np.int64),
    ("device", 11, np.int64),
)


class RawTable:
    """The growing columns of one file. `st` and `mem` are what the scanner writes into."""

    __slots__ = ("_args", "_chunks", "_others", "_size", "events", "mem", "records", "st")

    def __init__(self, limits: Limits) -> None:
        events = max(limits.piece_bytes // 64, 256)
        self._size = state.Sizes(
            events=events, args=8 * events, scratch_bytes=limits.piece_bytes + (1 << 17), max_depth=limits.max_depth
        )
        self.st: IntArray
        self.mem: ByteArray
        self.st, self.mem = state.new_state(self._size)
        self._chunks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name, _, _ in _EVENT_COLUMNS}
        self._args: list[list[tuple[npt.NDArray[Any], ...]]] = [[] for _ in NAMES]
        self._others: list[IntArray] = []
        self.events, self.records = 0, 0

    def fit(self, buffer_bytes: int) -> None:
        """Make sure that a value as long as the buffer fits into the scratch space."""
        if self._size.scratch_bytes < buffer_bytes:
            self._resize(scratch_bytes=buffer_bytes)

    def grow(self) -> None:
        """Make room in whichever of the tables of lanes and texts is full."""
        st, size = self.st, self._size
        if st[state.LANES] == size.lanes:
            self._resize(lanes=2 * size.lanes)
        elif st[state.TEXTS] == size.texts:
            self._resize(texts=2 * size.texts)
        else:
            self._resize(arena_bytes=size.arena_bytes + size.arena_bytes // 2 + size.scratch_bytes // 8)

    def _resize(self, **sizes: int) -> None:
        self.drain()
        self._size = replace(self._size, **sizes)
        self.st, self.mem = state.enlarged(self.st, self.mem, self._size)

    def make_room(self) -> None:
        """Empty the batch; where it is empty already, one event has more arguments than there is room for."""
        if self.st[state.RECORDS]:
            self.drain()
        else:
            self._resize(events=2 * self._size.events, args=2 * self._size.args)

    def drain(self) -> None:
        """Move the batch to the columns."""
        st = self.st
        events = state.region(st, state.EVENT_AT, state.EVENT_WIDTH, int(st[state.EVENTS]))
        if len(events):
            for name, at, dtype in _EVENT_COLUMNS:
                self._chunks[name].append(events[:, at].astype(dtype))
        others = state.region(st, state.OTHER_AT, state.OTHER_WIDTH, int(st[state.OTHERS]))
        if len(others):
            self._others.append(others.copy())
        self._drain_args(state.region(st, state.ARG_AT, state.ARG_WIDTH, int(st[state.ARGUMENTS])))
        self.events += len(events)
        self.records += int(st[state.RECORDS])
        for counter in (state.EVENTS, state.OTHERS, state.ARGUMENTS, state.RECORDS):
            st[counter] = 0

    def _drain_args(self, batch: IntArray) -> None:
        key = (batch[:, 0] >> 8).astype(np.uint8)
        order = np.argsort(key, kind="stable")
        bounds = np.searchsorted(key[order], np.arange(len(NAMES) + 1))
        row = (batch[order, 0] >> 16).astype(np.int32) + np.int32(self.events)
        tag = batch[order, 0].astype(np.uint8)
        value = batch[order, 1]
        for number in np.flatnonzero(np.diff(bounds)):
            part = slice(bounds[number], bounds[number + 1])
            tags = tag[part]
            narrow = value[part].astype(np.int32) if (tags == TAG_TEXT).all() else value[part].copy()
            self._args[number].append((row[part].copy(), tags.copy(), narrow))

    def add(self, text: bytes, offset: int) -> bool:
        """Scan one event given as `text`; `offset` is where the original stood. False where it is not taken."""
        end = len(text) + 16
        data = np.zeros(end + SENTINEL, np.uint8)
        data[:end] = np.frombuffer(text + b"]" + b" " * 15, np.uint8)
        self.fit(end)
        before = self._total()
        while True:
            stop, _ = scan_events(data, 0, end, offset, False, True, self.st, self.mem)
            if stop == GROW:
                self.grow()
            elif stop == FULL:
                self.make_room()
            else:
                return self._total() > before

    def _total(self) -> int:
        return self.records + int(self.st[state.RECORDS])

    def take(self, name: str) -> npt.NDArray[Any]:
        """One whole column of the events; the pieces it was made of are freed."""
        chunks, self._chunks[name] = self._chunks[name], []
        dtype = next(dtype for column, _, dtype in _EVENT_COLUMNS if column == name)
        return np.concatenate(chunks) if chunks else np.zeros(0, dtype)

    def take_others(self) -> IntArray:
        """int64[k, 5], freed here: flows as (ph, lane, cat, id, ts), metadata as ("M", lane, name, value, -)."""
        others, self._others = self._others, []
        return np.concatenate(others) if others else np.zeros((0, state.OTHER_WIDTH), np.int64)

    def take_arg(self, number: int) -> tuple[Int32Array, ByteArray, npt.NDArray[Any]] | None:
        """(rows, tags, values) of one argument in file order, freed here."""
        chunks, self._args[number] = self._args[number], []
        if not chunks:
            return None
        rows, tags, values = (np.concatenate([chunk[k] for chunk in chunks]) for k in range(3))
        return rows, tags, values

    def text(self, code: int) -> bytes:
        """One interned byte string; b"" for a negative code."""
        return state.text_bytes(self.st, self.mem, code)

    def lane_pair(self, lane: int) -> tuple[int, int]:
        """(pid code, tid code) of a lane; -1 where absent."""
        pair = int(self.st[self.st[state.LANE_AT] + lane])
        low = pair & 0xFFFFFFFF
        return pair >> 32, -1 if low == 0xFFFFFFFF else low

    @property
    def lanes(self) -> int:
        return int(self.st[state.LANES])

    @property
    def text_count(self) -> int:
        return int(self.st[state.TEXTS])
