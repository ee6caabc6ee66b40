"""Runs jobs plain and under `scaletrace collect`, as a user does: real processes, real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = ROOT / "traces" / "jobs" / "transformer.py"
COLLECT = (
    "import typer; from scaletrace.cli import collect as c; app = typer.Typer(); "
    "app.command(context_settings=c.CONTEXT_SETTINGS)(c.collect); app(prog_name='collect')"
)
"""The command's own module alone, so that these tests don't load the analysis commands in each process."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a process ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run(command: Sequence[str], timeout_s: float = 120, **environment: str) -> Ran:
    """Run `command` with one thread a process and no leftover of a recorder around it."""
    dropped = (
        "SCALETRACE_COLLECT",
        "KINETO_LOG_LEVEL",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    done = subprocess.run(
        command,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def collected(out: Path, options: Sequence[str], command: Sequence[str], **environment: str) -> Ran:
    """Run `command` under `collect` into `out`, saying nothing of its own."""
    own = [sys.executable, "-P", "-c", COLLECT, "--quiet", "--out", str(out), *options, "--", *command]
    return run(own, **environment)


def torchrun(ranks: int, *script: str) -> list[str]:
    """The command of a job of `ranks` ranks on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *script]


def files_of(folder: Path) -> list[str]:
    """All files below `folder`, by relative name."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def ddp_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran, Path]:
    """A DDP job of two ranks, run plain and run collected, and the capture."""
    out = tmp_path_factory.mktemp("ddp") / "capture"
    command = torchrun(2, str(JOB), "--strategy", "ddp", "--steps", "9", "--layers", "1")
    return run(command), collected(out, ["--tokens-per-step", "512"], command), out


Start = Callable[..., Ran]
