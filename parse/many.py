"""Turns many files into event tables on all cores, with the memory in use bounded by a setting.

Threads suffice: the scanner and the decompressors release the interpreter's lock, and no table has to be copied
between processes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import Any

from scaletrace.errors import MissingExtraError, UsageError
from scaletrace.parse.kernels import Rules
from scaletrace.parse.limits import DEFAULT, Limits
from scaletrace.parse.pieces import GZIP, ZSTD
from scaletrace.parse.reader import TraceFile, read_file
from scaletrace.parse.store import map_events, save_events

COST = 1.2
"""Peak memory of reading one file, per byte of its JSON (benchmarks/read.py)."""

_GUESSED_RATIO = 16


def json_bytes(path: str | Path) -> int:
    """Size of a file's JSON: from the gzip trailer, a guess for zstd, 0 where the file can't be looked at."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            size = file.seek(0, os.SEEK_END)
            if head[:2] == GZIP and size >= 18:
                file.seek(-4, os.SEEK_END)
                (told,) = struct.unpack("<I", file.read(4))
                return max(int(told), size)  # modulo 2^32, so never trusted below the size itself
            return size * _GUESSED_RATIO if head == ZSTD else size
    except OSError:
        return 0


class _Budget:
    """Bytes that may be in use at once; one job larger than all of it runs alone."""

    __slots__ = ("_changed", "_free", "_total")

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = Condition()

    def take(self, amount: int) -> int:
        amount = min(amount, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        return amount

    def give_back(self, amount: int) -> None:
        with self._changed:
            self._free += amount
            self._changed.notify_all()


def read_many(
    sources: Sequence[str | Path],
    *,
    workers: int | None = None,
    memory_bytes: int | None = None,
    spool: str | Path | None = None,
    strict: bool = False,
    limits: Limits = DEFAULT,
    rules: Rules | None = None,
    scheduler: str | None = None,
) -> list[TraceFile]:
    """The traces in the order of `sources`; any error of `read_file` is raised.

    workers       threads (default: one a core)
    memory_bytes  what the files being read at one time may cost together (default: no bound)
    spool         folder to which finished tables are written and from which they are mapped, so that they take no
                  memory of the process either; made if needed, and left to the caller
    scheduler     address of a Dask cluster whose workers read instead, where they see the same files
    """
    if scheduler is not None:
        return _read_on(scheduler, sources, {"strict": strict, "limits": limits, "rules": rules})
    count = min(workers or os.cpu_count() or 1, max(len(sources), 1))
    budget = _Budget(memory_bytes) if memory_bytes else None

    def one(number: int) -> TraceFile:
        taken = budget.take(int(COST * json_bytes(sources[number]))) if budget else 0
        try:
            trace = read_file(sources[number], strict=strict, limits=limits, rules=rules)
            if spool is None:
                return trace
            folder = Path(spool) / f"file_{number:05d}"
            save_events(trace.events, folder)
            return replace(trace, events=map_events(folder))
        finally:
            if budget:
                budget.give_back(taken)

    if count == 1:
        return [one(number) for number in range(len(sources))]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(len(sources))))


def _read_on(scheduler: str, sources: Sequence[str | Path], options: dict[str, Any]) -> list[TraceFile]:
    """The traces as read by the workers of a Dask cluster, in the order of `sources`."""
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtraError("a Dask cluster needs the extra: pip install 'scaletrace[dask]'") from error
    try:
        client = Client(scheduler, timeout="10s")
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler answers at {scheduler!r} ({error}); give it as tcp://host:8786") from error
    with client:
        futures = client.map(read_file, [str(source) for source in sources], pure=False, **options)
        return list(client.gather(futures))
