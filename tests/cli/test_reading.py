"""Every command that reads captures takes the same reading options and passes them on."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrace.cli.reading import OPTIONS


@pytest.mark.parametrize("command", ["inspect", "replay", "whatif", "diff", "extrapolate", "search", "report"])
def test_reading_commands_share_their_options(command: str) -> None:
    """None of the commands forgot the decorator, and none shadows one of its options."""
    function = getattr(importlib.import_module(f"scaletrace.cli.{command}"), command)

    assert list(OPTIONS) == list(inspect.signature(function).parameters)[-len(OPTIONS) :]


def test_a_limit_is_named_and_can_be_raised(run: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """Too small a limit ends with exit code 1 and the option that raises it; a larger one lets the file through."""
    capture = samples / "ddp_w1"
    small = run("inspect", capture, "--max-bytes", "1000", cwd=tmp_path)
    large = run("inspect", capture, "--max-bytes", "100000000", "--quiet", cwd=tmp_path)

    assert (1, True) == (small.returncode, "--max-bytes" in small.stderr)
    assert (0, "", "") == (large.returncode, large.stdout, large.stderr)


def test_a_saved_job_answers_like_its_traces(run: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """`inspect --save` writes a folder that replay reads; both answers agree but for the input's name."""
    saved = tmp_path / "saved"
    run("inspect", samples / "ddp_w2", "--save", saved, "--quiet")
    first = run("replay", samples / "ddp_w2", "--json", "--no-trace").stdout.replace(str(samples / "ddp_w2"), "")
    second = run("replay", saved, "--json", "--no-trace").stdout.replace(str(saved), "")

    assert first == second
