"""Input that can't be used gets one clear sentence on stderr, exit code 1, and never a traceback."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _missing(folder: Path, samples: Path) -> Path:
    return folder / "nowhere"


def _empty(folder: Path, samples: Path) -> Path:
    return folder


def _text(folder: Path, samples: Path) -> Path:
    (folder / "notes.txt").write_text("just a text")
    return folder / "notes.txt"


def _half(folder: Path, samples: Path) -> Path:
    (folder / "rank0.json").write_text('{"schemaVersion": 1, "traceEv')
    return folder / "rank0.json"


def _two_jobs(folder: Path, samples: Path) -> Path:
    shutil.copy(samples / "ddp_w4" / "rank0.json.gz", folder / "rank0.json.gz")
    shutil.copy(samples / "fsdp2_w2" / "rank1.json.gz", folder / "rank1.json.gz")
    return folder


def _binary(folder: Path, samples: Path) -> Path:
    (folder / "rank0.json.gz").write_bytes(gzip.compress(b"\x00\x01\x02" * 1000))
    return folder


@pytest.mark.parametrize("command", ["replay", "inspect", "extrapolate"])
@pytest.mark.parametrize("make", [_missing, _empty, _text, _half, _two_jobs, _binary])
def test_one_sentence_and_exit_code_1(
    run: Callable[..., Any], command: str, make: Callable[[Path, Path], Path], tmp_path: Path, samples: Path
) -> None:
    """The sentence names what is wrong; nothing reaches stdout."""
    target = make(tmp_path, samples)
    done = run(command, target, cwd=tmp_path)

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: ")
    assert 1 == done.stderr.strip().count("\n") + 1
    assert "Traceback" not in done.stderr
