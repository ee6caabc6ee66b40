"""Runs recorded_models.py, which needs torch, as a program of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def recorded(folder: Path, *cases: str) -> Path:
    """The folder with CASE.json for every case; skips where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("recording needs torch")
    script = Path(__file__).with_name("recorded_models.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(folder), *cases],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert 0 == done.returncode, done.stderr
    return folder
