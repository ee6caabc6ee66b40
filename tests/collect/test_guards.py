"""Other profilers are noticed and given way to, and the log says each thing once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scaletrace.collect.guards import Log, ProfilerWatch, unsafe_reason


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A stand-in for torch.autograd.profiler that lists the calls it gets."""
    calls: list[str] = []
    module: Any = ModuleType("torch.autograd.profiler")
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        setattr(module, name, lambda name=name: calls.append(name))
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    return module, calls


def test_another_profiler_is_noticed(profiler: tuple[Any, list[str]]) -> None:
    """It counts as busy from its preparation to its end, and its calls get through."""
    module, calls = profiler
    watch = ProfilerWatch()
    watch.install()
    seen = []
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        getattr(module, name)()
        seen.append(watch.busy)
    assert [True, True, False] == seen
    assert ["_prepare_profiler", "_enable_profiler", "_disable_profiler"] == calls


def test_ours_is_not_another_one(profiler: tuple[Any, list[str]]) -> None:
    """Our own calls neither count as busy nor make us give way."""
    watch = ProfilerWatch()
    watch.install()
    watch.give_way = lambda: pytest.fail("gave way to ourselves")
    watch.ours = True
    profiler[0]._prepare_profiler()
    assert not watch.busy


def test_giving_way_comes_first(profiler: tuple[Any, list[str]]) -> None:
    """Ours is stopped before the other one is prepared."""
    module, calls = profiler
    watch = ProfilerWatch()
    watch.install()
    watch.give_way = lambda: calls.append("ours stopped")
    module._prepare_profiler()
    assert ["ours stopped", "_prepare_profiler"] == calls


def test_installing_twice_wraps_once(profiler: tuple[Any, list[str]]) -> None:
    """A second recorder in the process does not wrap the wrapper."""
    module, _ = profiler
    ProfilerWatch().install()
    once = module._prepare_profiler
    ProfilerWatch().install()
    assert once is module._prepare_profiler


def test_without_torch_nothing_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never imported torch has nothing to profile."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    expected = "torch is not imported"
    assert expected == unsafe_reason()


def test_each_thing_is_said_once(tmp_path: Path) -> None:
    """The same text twice is one line, and a log that can't be written is given up without a word."""
    log = Log(str(tmp_path / "collect.log"))
    for text in ("one", "two", "one"):
        log.once(text)
    expected = ["one", "two"]
    assert expected == [line.rpartition(": ")[2] for line in (tmp_path / "collect.log").read_text().splitlines()]
    assert expected == log.lines
    Log("/proc/nowhere/collect.log").once("lost")


def test_a_log_that_cannot_be_written_speaks_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The first reason goes to stderr on one line, of a traceback its last line; the others are kept for the manifest."""
    log = Log("/dev/null/collect.log")
    log.once("disabled by a failure:\nTraceback\n  File\nOSError: no space\n")
    log.once("another")
    expected = "scaletrace: disabled by a failure: OSError: no space (/dev/null/collect.log can't be written: Not a directory)\n"
    assert expected == capsys.readouterr().err
    assert 2 == len(log.lines)
