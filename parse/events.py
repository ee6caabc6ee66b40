"""The event table: one rank's trace as columns, which every later stage reads and none changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
CodeArray = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

MISSING = -1
"""Code or id of a value that the trace does not carry. Missing is never zero."""

TIME_UNKNOWN = np.iinfo(np.int64).min
"""`ts_ns` of a record that carries no usable time (Kineto writes ts 0, dur 0 for some GPU records)."""


_COLUMNS = ("ph", "cat", "name", "lane", "ts_ns", "dur_ns", "correlation", "external_id", "stream", "device")
_DENSE = {"correlation": "correlation", "External id": "external_id", "stream": "stream", "device": "device"}


def _categorical(codes: CodeArray, labels: Sequence[str]) -> pd.Categorical[str]:
    import pandas as pd

    return pd.Categorical.from_codes(codes, categories=pd.Index(list(labels), dtype=object))


@dataclass(frozen=True, slots=True)
class Lane:
    """One track of the trace: a thread, or a stream of a device. `pid` and `tid` stay as written (int or str).

    Where the trace gives none they are "". `process` is the process's name and label ("python CPU", "python GPU 0").
    """

    pid: int | str
    tid: int | str
    name: str = ""
    process: str = ""


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument key as a sparse column: which event rows carry it, and with what value.

    `rows` is ascending. `values` holds int64 (uint64 where a value needs it), float64 for quantities such as
    "blocks per SM", or int32 codes into `Events.strings` where `is_text`; lists such as "Input Dims" are texts holding
    the JSON as written, without white space.
    """

    rows: Int32Array
    values: npt.NDArray[Any]
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Flows:
    """Flow arrows (`ph` s, t, f). Ids are only comparable within one category of one rank."""

    cat: CodeArray
    id: IntArray
    lane: CodeArray
    ts_ns: IntArray
    is_start: BoolArray

    def __len__(self) -> int:
        return len(self.id)

    @staticmethod
    def empty() -> Flows:
        i32, i64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return Flows(i32, i64, i32, i64, np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True)
class Events:
    """All events of one rank that have a place in time, sorted by (`ts_ns`, longest first, lane, name).

    Every column has length n. Metadata records (`ph` M) become lane names, flows stand in `flows`.
    Times are integer nanoseconds since the Unix epoch (base already added); legacy traces count from profiler start.
    Codes index `strings` (names, text arguments), `cats` and `lanes`.
    """

    ph: ByteArray
    cat: CodeArray
    name: CodeArray
    lane: CodeArray
    ts_ns: IntArray
    dur_ns: IntArray
    correlation: IntArray
    external_id: IntArray
    stream: IntArray
    device: IntArray
    strings: tuple[str, ...]
    cats: tuple[str, ...]
    lanes: tuple[Lane, ...]
    args: Mapping[str, Arg] = field(default_factory=dict)
    flows: Flows = field(default_factory=Flows.empty)

    def __len__(self) -> int:
        return len(self.ts_ns)

    @property
    def end_ns(self) -> IntArray:
        """ts + dur, int64[n]; meaningless where `ts_ns` is TIME_UNKNOWN."""
        return self.ts_ns + self.dur_ns

    def name_of(self, row: int) -> str:
        return self.strings[int(self.name[row])]

    def in_cats(self, *cats: str) -> BoolArray:
        """Mask of the events whose category is one of `cats`."""
        wanted = np.array([cat in cats for cat in self.cats], np.bool_)
        mask: BoolArray = wanted[self.cat]
        return mask

    def named(self, *names: str) -> BoolArray:
        """Mask of the events with exactly one of these names."""
        codes = [i for i, text in enumerate(self.strings) if text in names]
        wanted = np.zeros(len(self.strings), np.bool_)
        wanted[codes] = True
        mask: BoolArray = wanted[self.name]
        return mask

    def ints(self, key: str, missing: int = MISSING) -> IntArray:
        """Argument `key` as a dense int64[n], `missing` where an event lacks it; other than integers count as lacking.

        uint64 values wrap around; take them from `args[key].values` where they are ids to show.
        """
        column = _DENSE.get(key)
        if column is not None:
            dense: IntArray = getattr(self, column)
            return dense.copy() if missing == MISSING else np.where(dense == MISSING, missing, dense)
        out = np.full(len(self), missing, np.int64)
        arg = self.args.get(key)
        if arg is not None and not arg.is_text and arg.values.dtype.kind in "iu":
            out[arg.rows] = arg.values.astype(np.int64)
        return out

    def reals(self, key: str) -> npt.NDArray[np.float64]:
        """Numeric argument `key` as a dense float64[n], NaN where an event lacks it."""
        out = np.full(len(self), np.nan)
        arg = self.args.get(key)
        if arg is not None and not arg.is_text:
            out[arg.rows] = arg.values
        return out

    def texts(self, key: str) -> CodeArray:
        """Argument `key` as dense int32[n] codes into `strings`, MISSING where an event lacks it."""
        out = np.full(len(self), MISSING, np.int32)
        arg = self.args.get(key)
        if arg is not None and arg.is_text:
            out[arg.rows] = arg.values
        return out

    def text(self, key: str, row: int) -> str | None:
        """Text argument of one event, or None."""
        arg = self.args.get(key)
        if arg is None or not arg.is_text:
            return None
        at = int(np.searchsorted(arg.rows, row))
        if at == len(arg.rows) or arg.rows[at] != row:
            return None
        return self.strings[int(arg.values[at])]

    def select(self, rows: IntArray) -> Events:
        """The table of these rows only (ascending int64[k]), with the flows of their lanes; codes stay."""
        place = np.full(len(self), MISSING, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        args = {}
        for key, arg in self.args.items():
            keep = place[arg.rows] != MISSING
            if keep.any():
                args[key] = Arg(place[arg.rows[keep]], arg.values[keep], arg.is_text)
        flows = self.flows
        kept = np.isin(flows.lane, np.unique(self.lane[rows]))
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
            args=args,
            flows=Flows(flows.cat[kept], flows.id[kept], flows.lane[kept], flows.ts_ns[kept], flows.is_start[kept]),
        )

    def to_frame(self, keys: Sequence[str] = ()) -> pd.DataFrame:
        """The table as pandas, with names and categories as categoricals and `keys` as further columns."""
        import pandas as pd  # costs a third of the memory of a small process, and reading needs none of it

        pid = [lane.pid for lane in self.lanes]
        tid = [lane.tid for lane in self.lanes]
        columns: dict[str, Any] = {
            "ph": [chr(code) for code in self.ph],
            "cat": _categorical(self.cat, self.cats),
            "name": _categorical(self.name, self.strings),
            "pid": [pid[i] for i in self.lane],
            "tid": [tid[i] for i in self.lane],
            "ts_ns": self.ts_ns,
            "dur_ns": self.dur_ns,
            "correlation": self.correlation,
            "stream": self.stream,
        }
        for key in keys:
            arg = self.args.get(key)
            if arg is not None and arg.is_text:
                columns[key] = _categorical(self.texts(key), self.strings)
            else:
                columns[key] = self.ints(key)
        return pd.DataFrame(columns)
