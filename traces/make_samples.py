"""Turns real torchrun runs over gloo on this machine into the captures that ship in `samples/`.

`python -P -m scaletrace.traces.make_samples` records all of them, `… make_samples ddp_w4` one of them.
Every trace is what torch.profiler wrote, but for `scrub`, which takes out what identifies the machine and what only costs
space: the host name, the temporary file's path, white space between tokens, and the running number "Ev Idx".
No time, name, id or shape is touched.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORDER = HERE / "jobs" / "recorded.py"
HOST = b"sample-host"
STRAGGLER_DELAY_MS = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One folder of `samples/`: a strategy at a world size, with so many layers of a width."""

    name: str
    strategy: str
    ranks: int
    delay_ms: int = 0
    layers: int = 1
    width: int = 192


SAMPLES = (
    *(Sample(f"{strategy}_w{ranks}", strategy, ranks) for strategy in ("ddp", "fsdp2") for ranks in (1, 2, 4)),
    Sample("ddp_straggler_w4", "ddp", 4, STRAGGLER_DELAY_MS),
    Sample("ddp_layers_w2", "ddp", 2, layers=4, width=256),
)
SIZE = ("--sequence", "64", "--batch", "4")


def scrub(text: bytes, name: str) -> bytes:
    """Kineto's JSON without host name, path, white space and "Ev Idx"; everything else byte for byte as written."""
    text = re.sub(rb'("host_name":\s*)"[^"]*"', rb'\1"' + HOST + b'"', text)
    text = re.sub(rb'("traceName":\s*)"[^"]*"', rb'\1"' + name.encode() + b'"', text)
    text = re.sub(rb',\s*"Ev Idx":\s*\d+', b"", text)
    return re.sub(rb'("(?:[^"\\]|\\.)*")|\s+', lambda token: token[1] or b"", text)


def record(sample: Sample, folder: Path) -> None:
    """Run the job and leave rank{R}.json.gz and fr_rank{R}.json.gz in `folder`, one thread a rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(sample.ranks), "--rdzv-backend"]
    command += ["c10d", "--rdzv-endpoint", "127.0.0.1:0", str(RECORDER), "--record", str(folder), *SIZE]
    command += ["--layers", str(sample.layers), "--width", str(sample.width)]
    command += ["--strategy", sample.strategy, "--delay-ms", str(sample.delay_ms)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def shipped(path: Path) -> bytes:
    """The gzip bytes that ship for one recorded file; the same input gives the same bytes."""
    text = gzip.decompress(path.read_bytes())
    if not path.name.startswith("fr_"):
        scrubbed = scrub(text, path.name)
        if len(json.loads(scrubbed)["traceEvents"]) != len(json.loads(text)["traceEvents"]):
            raise RuntimeError(f"{path}: scrubbing changed the number of events")
        text = scrubbed
    return gzip.compress(text, 9, mtime=0)


def make(sample: Sample, target: Path) -> int:
    """Record `sample` and put it under `target`; the bytes written."""
    with tempfile.TemporaryDirectory() as scratch:
        record(sample, Path(scratch))
        folder = target / sample.name
        folder.mkdir(parents=True, exist_ok=True)
        total = 0
        for path in sorted(Path(scratch).iterdir()):
            total += (folder / path.name).write_bytes(shipped(path))
    return total


def main() -> None:
    """Make the samples named on the command line, or all."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(s.name for s in SAMPLES)}")
    options.add_argument("--to", type=Path, default=HERE / "samples")
    arguments = options.parse_args()
    for sample in SAMPLES:
        if not arguments.names or sample.name in arguments.names:
            print(f"{sample.name:20} {make(sample, arguments.to):8} bytes")


if __name__ == "__main__":
    main()
