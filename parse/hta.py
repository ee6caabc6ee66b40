"""Turns a loaded Job into the Trace of Holistic Trace Analysis, for those who use its notebooks.

Works with holistictraceanalysis 0.5.0 and with its successor traceinsight (both import as `hta`). Times are float
microseconds from the job's first event, exact to the nanosecond: HTA's own reader rounds starts up and ends down to
whole microseconds unless HTA_DISABLE_NS_ROUNDING=1, so compare with that set.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from scaletrace.errors import MissingExtraError
from scaletrace.parse.events import MISSING, TIME_UNKNOWN, Events, IntArray
from scaletrace.parse.job import Job

if TYPE_CHECKING:
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

_INT_ARGS = {
    "bytes": "bytes",
    "wait_on_stream": "wait_on_stream",
    "wait_on_cuda_event_record_corr_id": "wait_on_cuda_event_record_corr_id",
}
_LIST_ARGS = {"input_dims": "Input Dims", "input_type": "Input type"}
_NO_LIST = "-1"


def to_hta(job: Job, *, include_last_profiler_step: bool = False) -> Trace:
    """`hta.common.trace.Trace` of the job, parsed, aligned and filtered as HTA does it.

    Raises MissingExtraError where HTA is not installed.
    """
    try:
        from hta.common.trace import Trace
        from hta.common.trace_symbol_table import TraceSymbolTable
        from hta.configs.parser_config import ParserConfig
    except ImportError as error:
        raise MissingExtraError("HTA is not installed; pip install 'scaletrace[hta]'") from error
    trace: Any = Trace.__new__(Trace)
    trace.trace_path, trace.parser_config = job.source, ParserConfig.get_default_cfg()
    trace.trace_files = {rank.rank: rank.source for rank in job.ranks}
    trace.meta_data = {rank.rank: dict(rank.header) for rank in job.ranks}
    trace.symbol_table, trace.min_ts = TraceSymbolTable(), 0
    rows = {rank.rank: _rows(rank.events) for rank in job.ranks}
    starts = [int(rank.events.ts_ns[rows[rank.rank]].min()) for rank in job.ranks if len(rows[rank.rank])]
    origin_ns = min(starts, default=0)
    trace.traces = {
        rank.rank: frame_of(rank.events, rows[rank.rank], trace.symbol_table, origin_ns)
        for rank in job.ranks
        if len(rows[rank.rank])
    }
    if trace.traces:
        trace.align_and_filter_trace(include_last_profiler_step)
    for rank, frame in trace.traces.items():
        indexed = frame.set_index("index", drop=False)
        indexed.index.names = [None]
        trace.traces[rank] = indexed
    trace.is_parsed = True
    return trace


def analysis(job: Job, *, include_last_profiler_step: bool = False) -> TraceAnalysis:
    """`hta.trace_analysis.TraceAnalysis` of the job, with all of HTA's methods."""
    trace = to_hta(job, include_last_profiler_step=include_last_profiler_step)
    from hta.trace_analysis import TraceAnalysis

    made: Any = TraceAnalysis.__new__(TraceAnalysis)
    made.t = trace
    return made


def _rows(events: Events) -> IntArray:
    """What HTA keeps: spans with a category, without the profiler's own; and only those with a known time."""
    unwanted = events.in_cats("", "Trace")
    return np.flatnonzero((events.ph == ord("X")) & ~unwanted & (events.ts_ns != TIME_UNKNOWN))


def frame_of(events: Events, rows: IntArray, symbols: Any, origin_ns: int) -> pd.DataFrame:
    """HTA's table of one rank; names and categories are added to `symbols` and stand in the table by their ids."""
    from hta.common.trace import transform_correlation_to_index

    frame = pd.DataFrame(
        {
            "index": np.arange(1, len(rows) + 1),
            "cat": _symbol_ids(events.cat[rows], events.cats, symbols),
            "name": _symbol_ids(events.name[rows], events.strings, symbols),
            "pid": _lane_ids([lane.pid for lane in events.lanes], events.lane[rows]),
            "tid": _lane_ids([lane.tid for lane in events.lanes], events.lane[rows]),
            "ts": (events.ts_ns[rows] - origin_ns) / 1000,
            "dur": events.dur_ns[rows] / 1000,
            "stream": events.stream[rows],
            "correlation": events.correlation[rows],
            "external_id": events.external_id[rows],
            "memory_bw_gbps": np.nan_to_num(events.reals("memory bandwidth (GB/s)")[rows]),
        }
    ).set_index("index", drop=False)
    frame.index.names = [None]
    for column, key in _INT_ARGS.items():
        frame[column] = events.ints(key)[rows]
    for column, key in _LIST_ARGS.items():
        frame[column] = _lists(events.texts(key)[rows], events.strings)
    frame["input_strides"] = _NO_LIST
    frame["end"] = (events.end_ns[rows] - origin_ns) / 1000
    frame = pd.DataFrame(transform_correlation_to_index(frame, symbols))
    frame["iteration"] = _iterations(events, rows, frame["index_correlation"].to_numpy(np.int64))
    return frame


def _symbol_ids(codes: npt.NDArray[np.int32], texts: tuple[str, ...], symbols: Any) -> IntArray:
    used = np.unique(codes)
    symbols.add_symbols([texts[code] for code in used.tolist()])
    index = symbols.get_sym_id_map()
    ids = np.zeros(len(texts), np.int64)
    ids[used] = [index[texts[code]] for code in used.tolist()]
    out: IntArray = ids[codes]
    return out


def _lane_ids(values: list[int | str], lanes: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """pid or tid of each row: integers where all are, else objects as HTA has them."""
    if all(isinstance(value, int) for value in values):
        return np.array(values, np.int64)[lanes] if values else np.zeros(len(lanes), np.int64)
    out = np.empty(len(values), object)
    out[:] = values
    return out[lanes]


def _lists(codes: npt.NDArray[np.int32], texts: tuple[str, ...]) -> npt.NDArray[Any]:
    """Lists decoded once per distinct text; HTA's "-1" where there is none."""
    decoded = np.empty(len(texts) + 1, object)
    decoded[-1] = _NO_LIST
    for code in np.unique(codes[codes != MISSING]).tolist():
        decoded[code] = json.loads(texts[code])
    return decoded[codes]


def _iterations(events: Events, rows: IntArray, partner: IntArray) -> IntArray:
    """Number of the ProfilerStep that a host row starts in; a device row has its launch's."""
    number = np.full(len(events.strings), MISSING, np.int64)
    for code in np.unique(events.name[rows]).tolist():
        text = events.strings[code]
        if text.startswith("ProfilerStep"):
            digits = text.removeprefix("ProfilerStep").strip().removeprefix("#").strip()
            number[code] = int(digits) if digits.isdecimal() else MISSING
    start, end = events.ts_ns[rows], events.end_ns[rows]
    out = np.full(len(rows), MISSING, np.int64)
    for step in np.flatnonzero(number[events.name[rows]] != MISSING):
        out[(start >= start[step]) & (start < end[step])] = number[events.name[rows[step]]]
    device = events.stream[rows] > 0
    out[device] = np.where(partner[device] > 0, out[np.maximum(partner[device] - 1, 0)], MISSING)
    return out
