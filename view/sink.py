"""The five functions that a timeline is drawn with, so that one drawing serves a Perfetto file and a text golden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Argument:
    """One debug argument of some slices: `rows` int64[k] ascending, `values` int64[k], float64[k] or text codes.

    Where `texts` is not empty, `values` index it. Rows that are not named lack the argument: missing is never zero.
    """

    key: str
    rows: IntArray
    values: IntArray | FloatArray
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """Arrows: slice `rows[i]` (int64[k], ascending) carries `ids[i]` (int64[k]); slices of one id are joined in time order."""

    rows: IntArray
    ids: IntArray


@dataclass(frozen=True, slots=True)
class Slices:
    """A batch of n slices, sorted by (track, start, longest first) and properly nested on each track.

    track int64[n] as returned by `Sink.track`; start_ns, end_ns int64[n]; name, category int64[n] index `names`.
    """

    track: IntArray
    start_ns: IntArray
    end_ns: IntArray
    name: IntArray
    category: IntArray
    names: Sequence[str]
    arguments: Sequence[Argument] = ()
    flow: Flow | None = None

    def __len__(self) -> int:
        return len(self.track)


class Sink(Protocol):
    """What a drawing needs. Times are integer nanoseconds on one clock; a sink may shift them all by one base."""

    def process(self, pid: int, name: str) -> None:
        """Name a process (a rank), for those who count or join by process."""

    def track(self, name: str, parent: int = 0, order: int = 0, unit: str = "", description: str = "") -> int:
        """A track under `parent` (0: top level), at place `order` among its siblings; with a unit it is a counter."""

    def slices(self, batch: Slices) -> None:
        """Draw a batch of slices."""

    def counter(self, track: int, at_ns: IntArray, values: IntArray | FloatArray) -> None:
        """Draw a step function: `values[i]` holds from `at_ns[i]` on."""

    def close(self) -> None:
        """Nothing more will come."""


def rows_where(mask: BoolArray) -> IntArray:
    """Row numbers where `mask` is true, int64."""
    return np.flatnonzero(mask).astype(np.int64)
