"""The cost of a trace: CPU time and bytes of a million slices."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest

from scaletrace.view.perfetto import write_timeline

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark script, whose jobs and limits are tested here."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.perfetto")


@pytest.mark.slow
def test_a_million_slices_take_two_seconds_and_eighty_bytes_each(tmp_path: Path, benchmark: ModuleType) -> None:
    """With names, arrows, arguments and counters; compiled code is on disk by then, as for a user's second trace."""
    write_timeline(tmp_path / "warm.pftrace", benchmark.job(1_000))
    timeline = benchmark.job(1_000_000)
    begin = time.process_time()
    report = write_timeline(tmp_path / "t.pftrace", timeline)
    cpu_s = time.process_time() - begin

    assert report.slices >= 1_000_000
    assert report.flows >= 500_000
    assert cpu_s <= benchmark.LIMIT_CPU_S
    assert report.size_bytes / report.slices <= benchmark.LIMIT_BYTES


def test_small_traces_stay_small(tmp_path: Path, benchmark: ModuleType) -> None:
    """The size gate holds for ten thousand slices too, where tracks and names weigh more."""
    report = write_timeline(tmp_path / "t.pftrace", benchmark.job(10_000))

    assert report.size_bytes / report.slices <= benchmark.LIMIT_BYTES
