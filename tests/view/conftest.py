"""What the tests of the drawing share: Perfetto's own trace processor as the judge of our files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrace.errors import MissingExtraError
from scaletrace.view.wasm import Cell, WasmProcessor
from scaletrace.view.webui import trace_processor_wasm

Ask = Callable[[str], list[tuple[Cell, ...]]]


@pytest.fixture
def oracle() -> Callable[[Path], Ask]:
    """`oracle(file)` loads a trace into Perfetto's trace processor and returns a function from SQL to rows.

    Loading fails the test where Perfetto reports an import error or lost data.
    """
    try:
        module = trace_processor_wasm()
        processor = WasmProcessor(module)
    except MissingExtraError as error:
        pytest.skip(str(error))

    def load(file: Path) -> Ask:
        with file.open("rb") as stream:
            processor.load(stream)
        faults = processor.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        assert faults[1] == []
        return lambda sql: processor.query(sql)[1]

    return load
