"""Many files are read at once, in order, within a budget of memory."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from scaletrace.errors import InputError
from scaletrace.parse import many
from scaletrace.parse.many import json_bytes, read_many
from scaletrace.parse.reader import TraceFile


def write(folder: Path, count: int) -> list[Path]:
    """`count` gzip traces; file k holds k + 1 events."""
    paths = []
    for k in range(count):
        rows = [
            {"ph": "X", "cat": "cpu_op", "name": f"op{k}", "pid": 1, "tid": 2, "ts": n, "dur": 1} for n in range(k + 1)
        ]
        path = folder / f"rank{k}.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))
        paths.append(path)
    return paths


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 3}, {"workers": 3, "memory_bytes": 1}])
def test_the_order_of_the_files_is_kept(tmp_path: Path, options: dict[str, int]) -> None:
    """Whatever the number of threads and however tight the budget."""
    traces = read_many(write(tmp_path, 7), **options)

    assert [(k + 1, f"op{k}") for k in range(7)] == [(len(t.events), t.events.name_of(0)) for t in traces]


def test_spooled_tables_are_mapped(tmp_path: Path) -> None:
    """The tables come from files, so that they take none of the process's own memory."""
    traces = read_many(write(tmp_path, 3), spool=tmp_path / "spool")

    assert [1, 2, 3] == [len(trace.events) for trace in traces]
    assert [False] * 3 == [trace.events.ts_ns.flags.owndata for trace in traces]
    assert ["file_00000", "file_00001", "file_00002"] == sorted(path.name for path in (tmp_path / "spool").iterdir())


def test_an_error_in_one_file_is_raised(tmp_path: Path) -> None:
    """Nothing is skipped in silence."""
    with pytest.raises(InputError, match=r"absent\.json"):
        read_many([*write(tmp_path, 2), tmp_path / "absent.json"], workers=2, memory_bytes=10_000)


def test_the_budget_bounds_what_is_read_at_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two files never more than two are open, although more threads are free."""
    paths = write(tmp_path, 8)
    for path in paths:
        path.write_bytes(paths[-1].read_bytes())
    lock, state = threading.Lock(), {"now": 0, "most": 0}
    real = many.read_file

    def watched(source: Any, **options: Any) -> TraceFile:
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        try:
            threading.Event().wait(0.02)
            return real(source, **options)
        finally:
            with lock:
                state["now"] -= 1

    monkeypatch.setattr(many, "read_file", watched)
    read_many(paths, workers=6, memory_bytes=int(2.5 * many.COST * json_bytes(paths[0])))

    assert 2 == state["most"]


def test_the_size_of_the_json_is_known_before_it_is_read(tmp_path: Path) -> None:
    """gzip says it at its end; a file that is not there costs nothing."""
    raw = json.dumps({"traceEvents": [], "x": "y" * 5000}).encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.json").write_bytes(raw)

    assert [len(raw), len(raw), 0] == [json_bytes(tmp_path / name) for name in ("a.json.gz", "a.json", "b.json")]
