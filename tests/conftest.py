"""Fixtures that more than one room needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public traces and tables for reading and testing; they stay outside the repository."""
    folder = Path(os.environ.get("SCALETRACE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"public traces not found: {folder} (set SCALETRACE_DATA)")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    """The captures that ship with the project."""
    return ROOT / "traces" / "samples"
