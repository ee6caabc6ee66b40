"""Turns batches of scanned rows into whole columns, while the scanner's own tables stay small."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.parse import scan_state as state
from scaletrace.parse.events import BoolArray, ByteArray, Int32Array, IntArray
from scaletrace.parse.limits import Limits
from scaletrace.parse.scan import TAG_UINT, scan_events
from scaletrace.parse.scan_keys import KINDS, LABEL, NAMES, TEXT
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


_VALUES = {TEXT: np.int32, LABEL: np.int32}
COLUMNS = tuple(name for name, _, _ in _EVENT_COLUMNS)


class Growing:
    """A column that grows in place: pieces joined at the end would stand in memory twice.

    Its memory is mapped, not allocated, so that it can be enlarged without a copy, costs nothing where it is not yet
    written, and goes back to the system at once.
    """

    __slots__ = ("_count", "_dtype", "_map", "_room", "_width")

    def __init__(self, dtype: Any, width: int = 1) -> None:
        self._dtype, self._width = np.dtype(dtype), width
        self._map: mmap.mmap | None = None
        self._count, self._room = 0, 0

    def __len__(self) -> int:
        return self._count

    def append(self, values: npt.NDArray[Any]) -> None:
        """Copy `values` to the end."""
        end = self._count + len(values)
        if end > self._room:
            self._enlarge(max(2 * self._room, end, 4096))
        if len(values):
            self._view(end)[self._count :] = values
            self._count = end

    def view(self) -> npt.NDArray[Any]:
        """The column as it is now; it must be dropped before more is appended."""
        return self._view(self._count)

    def take(self) -> npt.NDArray[Any]:
        """The column; it is empty afterwards."""
        array = self._view(self._count)
        self._map, self._count, self._room = None, 0, 0
        return array

    def _view(self, count: int) -> npt.NDArray[Any]:
        shape = (count, self._width) if self._width > 1 else (count,)
        if self._map is None:
            return np.empty(shape, self._dtype)
        return np.frombuffer(self._map, self._dtype, count * self._width).reshape(shape)

    def _enlarge(self, room: int) -> None:
        size = room * self._width * self._dtype.itemsize
        if self._map is None:
            self._map = _mapped(size)
        else:
            try:
                self._map.resize(size)
            except (SystemError, OSError):  # systems without mremap
                old, self._map = self._map, _mapped(size)
                self._map[: len(old)] = old[:]
        self._room = room


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass(slots=True)
class RawArg:
    """One argument in file order: event rows, values (texts as int32 codes), and which values are beyond int64."""

    rows: Growing
    values: Growing
    unsigned: list[IntArray]

    def __len__(self) -> int:
        return len(self.rows)


class RawTable:
    """The growing columns of one file. `st` and `mem` are what the scanner writes into."""

    __slots__ = ("_args", "_columns", "_others", "_size", "events", "mem", "records", "st")

    def __init__(self, limits: Limits) -> None:
        events = min(max(limits.piece_bytes // 32, 256), 1 << 15)
        self._size = state.Sizes(
            events=events, args=8 * events, scratch_bytes=limits.piece_bytes + (1 << 17), max_depth=limits.max_depth
        )
        self.st: IntArray
        self.mem: ByteArray
        self.st, self.mem = state.new_state(self._size)
        self._columns = {name: Growing(dtype) for name, _, dtype in _EVENT_COLUMNS}
        self._args = [RawArg(Growing(np.int32), Growing(_VALUES.get(KINDS[name], np.int64)), []) for name in NAMES]
        self._others = Growing(np.int64, state.OTHER_WIDTH)
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
        for name, at, _ in _EVENT_COLUMNS:
            self._columns[name].append(events[:, at])
        self._others.append(state.region(st, state.OTHER_AT, state.OTHER_WIDTH, int(st[state.OTHERS])))
        self._drain_args(state.region(st, state.ARG_AT, state.ARG_WIDTH, int(st[state.ARGUMENTS])))
        self.events += len(events)
        self.records += int(st[state.RECORDS])
        for counter in (state.EVENTS, state.OTHERS, state.ARGUMENTS, state.RECORDS):
            st[counter] = 0

    def finish(self) -> None:
        """Drain the last batch and give up the room for more."""
        self._resize(events=1, args=1, scratch_bytes=1)

    def _drain_args(self, batch: IntArray) -> None:
        key = (batch[:, 0] >> 8).astype(np.uint8)
        order = np.argsort(key, kind="stable")
        bounds = np.searchsorted(key[order], np.arange(len(NAMES) + 1))
        batch = batch[order]
        unsigned = batch[:, 0].astype(np.uint8) == TAG_UINT
        any_unsigned = bool(unsigned.any())
        for number in np.flatnonzero(np.diff(bounds)):
            part, arg = slice(bounds[number], bounds[number + 1]), self._args[number]
            if any_unsigned:
                arg.unsigned.append(np.flatnonzero(unsigned[part]) + len(arg))
            arg.rows.append((batch[part, 0] >> 16) + self.events)
            arg.values.append(batch[part, 1])

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
        """One whole column of the events, which is given up here."""
        return self._columns[name].take()

    def take_others(self) -> IntArray:
        """int64[k, 5], given up here: flows as (ph, lane, cat, id, ts), metadata as ("M", lane, name, value, -)."""
        return self._others.take()

    def take_arg(self, number: int) -> tuple[Int32Array, npt.NDArray[Any], BoolArray]:
        """(event rows, values, which values are beyond int64) of one argument in file order; given up here."""
        arg = self._args[number]
        unsigned = np.zeros(len(arg), np.bool_)
        for positions in arg.unsigned:
            unsigned[positions] = True
        arg.unsigned.clear()
        return arg.rows.take(), arg.values.take(), unsigned

    def text_codes(self) -> list[Int32Array]:
        """The codes that the text arguments hold so far, one array an argument."""
        texts = [arg for name, arg in zip(NAMES, self._args, strict=True) if KINDS[name] == TEXT and len(arg)]
        return [arg.values.view() for arg in texts]

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
