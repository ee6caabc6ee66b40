"""Runs Perfetto's trace processor (WebAssembly, wasmtime) in this process: trace bytes in, SQL answers out.

A minimal emscripten host: clock, stderr and heap growth are real, every file-system call answers "no such file".
Protocol: `trace_processor_rpc_init(callback, size)` returns the address of the request buffer;
`trace_processor_on_rpc_request(n)` consumes n bytes of a TraceProcessorRpcStream and answers through the callback.
"""

from __future__ import annotations

import contextlib
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scaletrace.errors import InputError, MissingExtraError, UsageError
from scaletrace.view import wire

try:
    import wasmtime
except ImportError:  # the extra `view` is not installed
    wasmtime = None

Cell = int | float | str | bytes | None

_REQUEST_BYTES = 4 << 20
_PAGE = 65536
_MOST_BYTES = 0xFFFF0000
_NO_SUCH_FILE = -44
_APPEND, _FINALIZE, _QUERY = 1, 2, 3
_U32 = 0xFFFFFFFF


class WasmProcessor:
    """One trace processor instance. Not thread-safe; closing is left to the garbage collector."""

    def __init__(self, module_file: Path) -> None:
        if wasmtime is None:
            raise MissingExtraError("SQL needs wasmtime: pip install 'scaletrace[view]'")
        engine = wasmtime.Engine(_config())
        self._engine = engine
        self._store = wasmtime.Store(engine)
        self._store.set_epoch_deadline(1)  # which comes with the first `stop`
        module = wasmtime.Module.from_file(engine, str(module_file))
        self._stderr = bytearray()
        self._answers: list[bytes] = []
        self._messages = 0
        host = self._host()
        functions = [
            wasmtime.Func(self._store, item.type, host.get(item.name) or _stub(item.name, bool(item.type.results)))
            for item in module.imports
        ]
        self._exports = wasmtime.Instance(self._store, module, functions).exports(self._store)
        self._memory = self._exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        signature = wasmtime.FuncType([wasmtime.ValType.i32()] * 2, [])
        callback = wasmtime.Func(self._store, signature, lambda at, n: self._answers.append(self._read(at, n)))
        slot = self._exports["__indirect_function_table"].grow(self._store, 1, callback)
        self._buffer = self._call("trace_processor_rpc_init", slot, _REQUEST_BYTES) & _U32

    def load(self, file: BinaryIO) -> None:
        """Read a whole trace (any format that Perfetto knows, gzip too)."""
        while chunk := file.read(_REQUEST_BYTES):
            for answer in self._request(_APPEND, wire.block(101, chunk)):
                _refuse(answer, 201, 2)
        for answer in self._request(_FINALIZE, b""):
            _refuse(answer, 209, 1)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Cell, ...]]]:
        """Column names and rows of the last statement of `sql`. Raises UsageError with Perfetto's words for bad SQL."""
        columns: list[str] = []
        cells: list[Cell] = []
        for answer in self._request(_QUERY, wire.block(103, wire.text(1, sql))):
            for field, value in wire.fields(answer.get(203, b"")):
                if field == 1:
                    columns.append(bytes(value).decode("utf-8", "replace"))
                elif field == 2 and value:
                    raise UsageError(f"SQL: {sql_complaint(bytes(value).decode('utf-8', 'replace'))}")
                elif field == 3:
                    cells.extend(_batch(value))
        width = len(columns)
        return columns, [tuple(cells[at : at + width]) for at in range(0, len(cells), width)] if width else []

    def stop(self) -> None:
        """End a query that another thread runs, at once; what was loaded can't be used afterwards."""
        self._engine.increment_epoch()

    def _request(self, kind: int, extra: bytes) -> list[dict[int, Any]]:
        message = wire.block(1, wire.number(1, self._messages) + wire.number(2, kind) + extra)
        self._messages += 1
        self._answers.clear()
        for at in range(0, len(message), _REQUEST_BYTES):
            part = message[at : at + _REQUEST_BYTES]
            self._memory.write(self._store, part, self._buffer)
            self._call("trace_processor_on_rpc_request", len(part))
        answers = [dict(wire.fields(body)) for _, body in wire.fields(b"".join(self._answers))]
        for answer in answers:
            if 5 in answer:
                raise InputError(f"trace processor: {bytes(answer[5]).decode('utf-8', 'replace')}")
        return answers

    def _call(self, name: str, *values: int) -> int:
        try:
            return int(self._exports[name](self._store, *values) or 0)
        except (wasmtime.WasmtimeError, wasmtime.Trap) as error:
            words = self._stderr.decode("utf-8", "replace").strip()[-500:]
            raise InputError(
                f"the trace processor gave up ({words or error}): is the trace larger than 4 GiB?"
            ) from error

    def _read(self, at: int, n: int) -> bytes:
        at &= _U32
        return bytes(self._memory.read(self._store, at, at + n))

    def _host(self) -> dict[str, Callable[..., Any]]:
        """The host functions that do something, by name."""

        def clock_time_get(_clock: int, _precision: int, at: int) -> int:
            self._memory.write(self._store, struct.pack("<q", time.time_ns()), at & _U32)
            return 0

        def fd_write(_file: int, vectors: int, count: int, written: int) -> int:
            total = 0
            for i in range(count):
                at, size = struct.unpack("<II", self._read(vectors + 8 * i, 8))
                self._stderr += self._read(at, size)
                total += size
            self._memory.write(self._store, struct.pack("<I", total), written & _U32)
            return 0

        def resize_heap(wanted: int) -> int:
            have = self._memory.data_len(self._store)
            target = max(wanted & _U32, min(int(have * 1.2), _MOST_BYTES))
            try:
                self._memory.grow(self._store, (target - have + _PAGE - 1) // _PAGE)
            except wasmtime.WasmtimeError:
                return 0
            return 1

        return {
            "emscripten_get_now": lambda: time.perf_counter() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: _MOST_BYTES - 2**32,
            "emscripten_resize_heap": resize_heap,
            "clock_time_get": clock_time_get,
            "fd_write": fd_write,
        }


def _config() -> Any:
    """Compiling takes 5 s; wasmtime's own cache (in the user's cache folder) makes it 0.2 s where it can be used."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    with contextlib.suppress(wasmtime.WasmtimeError):
        config.cache = True
    return config


def sql_complaint(words: str) -> str:
    """Perfetto's message for bad SQL as one line: its last line, with the place that it names."""
    lines = [line.strip() for line in words.strip().splitlines() if line.strip()]
    place = re.search(r"line (\d+) col (\d+)", words)
    where = f" (line {place[1]}, column {place[2]})" if place else ""
    return (lines[-1] if lines else "unknown error") + where


def _stub(name: str, answers: bool) -> Callable[..., int | None]:
    """A host function that does nothing: file-system calls find no file, the rest answers 0."""
    answer = (_NO_SUCH_FILE if name.startswith("__syscall") else 0) if answers else None
    return lambda *_: answer


def _refuse(answer: dict[int, Any], field: int, error_field: int) -> None:
    """Raise the error that an append or finalize result carries."""
    words = dict(wire.fields(answer.get(field, b""))).get(error_field)
    if words:
        raise InputError(f"Perfetto can't read this file: {bytes(words).decode('utf-8', 'replace').strip()}")


def _batch(data: memoryview) -> Iterator[Cell]:
    """The cells of a QueryResult.CellsBatch, row by row: kinds in one list, values by kind in four others."""
    kinds: list[int] = []
    integers: list[int] = []
    doubles: list[float] = []
    blobs: list[bytes] = []
    strings: list[str] = []
    for field, value in wire.fields(data):
        if field == 1:
            kinds = wire.packed(value)
        elif field == 2:
            integers = wire.packed(value)
        elif field == 3:
            doubles = [item[0] for item in struct.iter_unpack("<d", value)]
        elif field == 4:
            blobs.append(bytes(value))
        elif field == 5:
            strings = bytes(value).decode("utf-8", "replace").split("\0")
    sources: dict[int, Iterator[Cell]] = {2: iter(integers), 3: iter(doubles), 4: iter(strings), 5: iter(blobs)}
    for kind in kinds:
        yield next(sources[kind]) if kind in sources else None
