"""Turns a trace file and SQL into rows, through Perfetto's trace processor: a binary where there is one, else WebAssembly.

Views for our own traces stand ready: `st_slice` (rank, lane, timeline and arguments as columns), `st_comm` (one row a
collective member), `st_counter` (counters with durations) and `st_path` (the pieces of the critical path).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scaletrace.errors import InputError, UsageError
from scaletrace.view.wasm import Cell, WasmProcessor, sql_complaint
from scaletrace.view.webui import trace_file, trace_processor_wasm

VIEWS = """
CREATE VIEW st_slice AS
SELECT s.id, s.ts, s.dur, s.name, s.category, s.depth, s.arg_set_id, s.track_id,
       CAST(SUBSTR(g.name, 6) AS INT) AS rank,
       REPLACE(REPLACE(t.name, ' (measured)', ''), ' (projected)', '') AS lane,
       CASE WHEN t.name GLOB '* (measured)' THEN 'measured'
            WHEN t.name GLOB '* (projected)' THEN 'projected' ELSE 'replayed' END AS timeline,
       EXTRACT_ARG(s.arg_set_id, 'debug.step') AS step,
       EXTRACT_ARG(s.arg_set_id, 'debug.node') AS node
FROM slice s JOIN track t ON s.track_id = t.id JOIN track g ON t.parent_id = g.id
WHERE g.name GLOB 'rank [0-9]*';
CREATE VIEW st_comm AS
SELECT *, EXTRACT_ARG(arg_set_id, 'debug.collective') AS collective, EXTRACT_ARG(arg_set_id, 'debug.axis') AS axis,
       EXTRACT_ARG(arg_set_id, 'debug.ranks') AS ranks, EXTRACT_ARG(arg_set_id, 'debug.bytes') AS bytes,
       EXTRACT_ARG(arg_set_id, 'debug.instance') AS instance,
       EXTRACT_ARG(arg_set_id, 'debug.wait_ns') AS wait_ns, EXTRACT_ARG(arg_set_id, 'debug.transfer_ns') AS transfer_ns
FROM st_slice WHERE category = 'comm';
CREATE VIEW st_counter AS
SELECT CAST(SUBSTR(g.name, 6) AS INT) AS rank,
       REPLACE(REPLACE(t.name, ' (measured)', ''), ' (projected)', '') AS name,
       CASE WHEN t.name GLOB '* (measured)' THEN 'measured'
            WHEN t.name GLOB '* (projected)' THEN 'projected' ELSE 'replayed' END AS timeline,
       c.ts, LEAD(c.ts) OVER (PARTITION BY c.track_id ORDER BY c.ts) - c.ts AS dur, c.value
FROM counter c JOIN track t ON c.track_id = t.id JOIN track g ON t.parent_id = g.id
WHERE g.name GLOB 'rank [0-9]*';
CREATE VIEW st_path AS
SELECT s.ts, s.dur, s.name, EXTRACT_ARG(s.arg_set_id, 'debug.what') AS what, EXTRACT_ARG(s.arg_set_id, 'debug.why') AS why,
       EXTRACT_ARG(s.arg_set_id, 'debug.rank') AS rank, EXTRACT_ARG(s.arg_set_id, 'debug.lane') AS lane
FROM slice s JOIN track t ON s.track_id = t.id WHERE t.name = 'Critical path' AND t.parent_id IS NULL;
"""
"""Views over a scaletrace trace; on other traces they are empty."""

PREPARED = {
    "critical path": "SELECT what, COUNT(*) AS pieces, SUM(dur) / 1e6 AS ms FROM st_path GROUP BY what ORDER BY ms DESC",
    "exposed communication": (
        "SELECT rank, timeline, SUM(IIF(name = 'exposed communication', dur * value, 0)) / 1e6 AS exposed_ms, "
        "SUM(IIF(name = 'overlap', dur * value, 0)) / 1e6 AS overlapped_ms FROM st_counter "
        "WHERE name IN ('exposed communication', 'overlap') GROUP BY 1, 2 ORDER BY exposed_ms DESC"
    ),
    "stragglers": (
        "WITH last AS (SELECT instance, timeline, MIN(wait_ns) AS least, SUM(wait_ns) AS caused FROM st_comm "
        "GROUP BY 1, 2) SELECT rank, timeline, COUNT(*) AS was_last, SUM(caused) / 1e6 AS caused_wait_ms FROM st_comm "
        "JOIN last USING (instance, timeline) WHERE wait_ns = least AND caused > 0 GROUP BY 1, 2 ORDER BY 4 DESC"
    ),
}
"""Questions that most readers have; the UI's query tab and `scaletrace query --ask` offer them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Columns and rows of the last statement."""

    columns: Sequence[str]
    rows: Sequence[tuple[Cell, ...]]


class Processor(Protocol):
    """What answers SQL."""

    def query(self, sql: str) -> tuple[list[str], list[tuple[Cell, ...]]]: ...

    def stop(self) -> None: ...


class _Native:
    """The `perfetto` package with a trace_processor_shell binary that is already on this machine."""

    def __init__(self, binary: Path, trace: Path) -> None:
        from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

        self._processor = TraceProcessor(trace=str(trace), config=TraceProcessorConfig(bin_path=str(binary)))

    def query(self, sql: str) -> tuple[list[str], list[tuple[Cell, ...]]]:
        from perfetto.trace_processor.api import TraceProcessorException

        try:
            result: Any = self._processor.query(sql)
        except TraceProcessorException as error:
            raise UsageError(f"SQL: {sql_complaint(str(error))}") from error
        columns = list(result.column_names)
        frame = result.as_pandas_dataframe()  # unlike the rows as objects, it keeps columns of the same name apart
        return columns, list(frame.itertuples(index=False, name=None))

    def stop(self) -> None:
        """End the binary, and a query with it."""
        self._processor.close()


def native_binary() -> Path | None:
    """A `trace_processor_shell` on PATH, or the one that the perfetto package has fetched before. Nothing is downloaded."""
    found = shutil.which("trace_processor_shell")
    if found:
        return Path(found)
    kept = Path.home() / ".local" / "share" / "perfetto" / "prebuilts"
    binaries = sorted(kept.glob("trace_processor_shell-*"), key=lambda p: p.stat().st_mtime) if kept.is_dir() else []
    return binaries[-1] if binaries else None


def open_trace(path: str | Path, binary: str | Path | None = None) -> Processor:
    """A trace (any format that Perfetto reads), ready for SQL.

    `binary` names a trace_processor_shell; without one, what is on this machine is used, else the WebAssembly build.
    Raises InputError for a file that can't be read, MissingExtraError where neither engine is installed.
    """
    file = trace_file(path)
    if file.stat().st_size == 0:
        raise InputError(f"{file}: the file is empty")
    if binary is not None and not Path(binary).is_file():
        raise UsageError(f"{binary}: no such trace processor binary")
    native = Path(binary) if binary is not None else native_binary()
    if native is not None:
        return _prepared(_Native(native, file))
    processor = WasmProcessor(trace_processor_wasm())
    with file.open("rb") as stream:
        processor.load(stream)
    return _prepared(processor)


def _prepared(processor: Processor) -> Processor:
    processor.query(VIEWS)
    return processor


def query(path: str | Path, sql: str, binary: str | Path | None = None, limit_s: float | None = None) -> Answer:
    """Ask one question of a trace file. Raises UsageError with Perfetto's words for SQL that it refuses.

    limit_s: longest time that the question may take once the file is read; None: any. It runs in a thread of its own,
    so that an interrupt ends it too.
    """
    processor = open_trace(path, binary)
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(processor.query, sql)
    try:
        return Answer(*asked.result(limit_s))
    except KeyboardInterrupt:
        processor.stop()
        raise
    except TimeoutError as error:
        processor.stop()
        raise UsageError(
            f"SQL: no answer after {limit_s:g} s; ask for less, or see whether a recursion ends (WITH RECURSIVE … LIMIT)"
        ) from error
    finally:
        pool.shutdown(wait=False)
