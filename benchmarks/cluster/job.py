"""Turns a cluster description and a mode into measured step times and a capture, by really running the job there."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.network import Network, Spec

TIMEOUT_S = 300
PORT = 29500


@dataclass(frozen=True, slots=True)
class Run:
    """One run: step times in seconds (a step ends when its slowest rank does), and where its capture is."""

    spec: Spec
    mode: str
    steps_s: tuple[float, ...]
    capture: Path

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def cv(self) -> float:
        return statistics.pstdev(self.steps_s) / statistics.mean(self.steps_s)


def run(spec: Spec, mode: str, out: Path, **options: float) -> Run:
    """Build the network, run `mode` on it and take it down; raises RuntimeError with the log of a rank that failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "capture").mkdir(exist_ok=True)
    extra = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    processes: list[subprocess.Popen[bytes]] = []
    with Network(spec) as network:
        try:
            for rank in range(spec.ranks):
                env = dict(
                    os.environ, RANK=str(rank), WORLD_SIZE=str(spec.ranks), LOCAL_RANK="0", MASTER_ADDR="10.77.0.1",
                    MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                )  # fmt: skip
                group = network.cpu_group(rank)
                command = [
                    sys.executable,
                    "-P",
                    str(Path(__file__).with_name("rank.py")),
                    "--mode",
                    mode,
                    "--out",
                    str(out),
                ]
                command += extra + (["--cpu_group", str(group)] if group else [])
                with (out / f"rank{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(network.command(rank, command), env=env, stdout=log, stderr=subprocess.STDOUT)
                    )
            _wait(processes, out)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    return reopen(spec, mode, out)


def reopen(spec: Spec, mode: str, out: Path) -> Run:
    """What a run left in `out`; raises OSError or ValueError where a rank's step times are missing or unreadable."""
    by_rank = [json.loads((out / f"steps_{rank}.json").read_text()) for rank in range(spec.ranks)]
    return Run(spec, mode, tuple(max(step) for step in zip(*by_rank, strict=True)), out / "capture")


def _wait(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    for rank, process in enumerate(processes):
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        if code:
            tail = (out / f"rank{rank}.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"rank {rank} ended with code {code}:\n{tail}")
