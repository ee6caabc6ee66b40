"""The real program, run in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest


class Run(Protocol):
    """Runs `scaletrace` with these arguments, in `cwd` if given."""

    def __call__(self, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def run() -> Run:
    """`run("replay", folder, "--json")` gives exit code, stdout and stderr."""

    def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "scaletrace.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)

    return start
