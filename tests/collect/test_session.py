"""Recording from inside the training code, and what the recorder does at boundaries."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scaletrace.collect import mark_step
from scaletrace.collect.hook.boundary import PATIENCE, Boundary
from scaletrace.collect.session import Recorder, active, set_active
from scaletrace.collect.settings import Settings
from tests.collect.conftest import files_of, run

SCRIPT = """
import sys, torch
from scaletrace.collect import record
model = torch.nn.Linear(8, 8)
with record(sys.argv[1], start_step=2, steps=2, samples_per_step=4) as session:
    for number in range(6):
        model(torch.randn(4, 8)).sum().backward()
        session.step()
"""


def test_a_with_block_records_without_a_launcher(tmp_path: Path) -> None:
    """The capture of a job that records itself is packed beside it, and is complete soon after."""
    out = tmp_path / "capture"
    ran = run([sys.executable, "-c", SCRIPT, str(out)])
    assert (0, "", "") == (ran.returncode, ran.stdout, ran.stderr)
    deadline = time.monotonic() + 60
    expected = ["fr_rank00000.json.gz", "manifest.json", "rank00000_of00001.json.zst"]
    while expected != files_of(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert expected == files_of(out)
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert {"first": 2, "last": 3, "count": 2, "partial": []} == manifest["steps"]
    assert ("mark_step", {"samples_per_step": 4}) == (manifest["job"]["boundary"], manifest["model"])
    assert "unwatched" not in manifest["members"][0]  # step 0 and the warm-up are all that was before


class Optimizer:
    """As much of an optimizer as a boundary looks at."""

    param_groups: tuple[Any, ...] = ()


def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Settings(folder=str(tmp_path), start_step=10**9, launched=True))


def test_the_first_optimizer_counts(tmp_path: Path) -> None:
    """With two optimizers a step, there is one boundary a step."""
    made = recorder(tmp_path)
    boundary, first, second = Boundary(made), Optimizer(), Optimizer()
    for _ in range(5):
        boundary(first)
        boundary(second)
    expected = 5
    assert expected == made.completed


def test_the_next_optimizer_takes_over(tmp_path: Path) -> None:
    """When the counting optimizer is gone, or is not used any more, another one counts."""
    made = recorder(tmp_path)
    boundary, kept = Boundary(made), Optimizer()
    boundary(Optimizer())  # dies at once
    boundary(kept)
    unused = Optimizer()
    for _ in range(PATIENCE):
        boundary(unused)
    expected = 3
    assert expected == made.completed


def test_marked_steps_replace_optimizers(tmp_path: Path) -> None:
    """Once the job marks its steps, optimizers don't count."""
    made = recorder(tmp_path)
    boundary, optimizer = Boundary(made), Optimizer()
    set_active(made)
    try:
        boundary(optimizer)
        mark_step()
        boundary(optimizer)
    finally:
        set_active(None)
    expected = 2
    assert expected == made.completed


def test_marking_without_a_recording_does_nothing() -> None:
    """mark_step in a job that nobody records is harmless."""
    mark_step()
    assert active() is None


def test_a_failure_disables_and_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong inside never comes out; one entry in collect.log says what it was."""
    made = recorder(tmp_path)
    monkeypatch.setattr(made, "_boundary", lambda: 1 / 0)
    for _ in range(3):
        made.step()
    assert made.disabled
    log = (tmp_path / "collect.log").read_text()
    expected = 1
    assert expected == log.count("ZeroDivisionError: division by zero")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/nowhere/capture", "/dev/null/capture", "long"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, folder: str) -> None:
    """A job that records itself goes on, and says on stderr why nothing is recorded."""
    where = str(tmp_path / ("x" * 300)) if folder == "long" else folder
    ran = run([sys.executable, "-c", SCRIPT, where])
    start = "scaletrace: disabled by a failure: "
    assert (0, "", 1, start) == (ran.returncode, ran.stdout, ran.stderr.count("\n"), ran.stderr[: len(start)])


@pytest.mark.slow
def test_a_linked_folder_is_written_through(tmp_path: Path) -> None:
    """A capture folder that is a symbolic link gets the files at its target."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    ran = run([sys.executable, "-c", SCRIPT, str(tmp_path / "link")])
    assert (0, "") == (ran.returncode, ran.stderr)
    deadline = time.monotonic() + 60
    while "manifest.json" not in files_of(tmp_path / "real") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "manifest.json" in files_of(tmp_path / "real")
