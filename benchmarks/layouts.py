"""Predicts jobs under one layout from a capture of another, really runs both on an emulated cluster, and compares.

    python -P benchmarks/layouts.py             all cases, about 10 minutes, root, on a quiet machine
    python -P benchmarks/layouts.py --quick     two cases, one run each
    python -P benchmarks/layouts.py --keep DIR  the same, and keep what was recorded and measured
    python -P benchmarks/layouts.py --again DIR predict anew from what an earlier run kept; runs nothing, needs no root

A layer is two matrices with a delay between them that stands for a GPU kernel: it holds the rank for a time in
proportion to its elements without using the CPU. A host is half a core: every two ranks are pinned to one, and
a job of two ranks has a copy of itself beside it on the other core, so that the ranks of a job of four find
the same host as those of a job of two. How long they waited for it is measured and shown. The network's costs come from
all-reduces between two ranks on the same links, measured beforehand; no constant is fitted to a predicted run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster.network import Network as Namespaces
from benchmarks.cluster.network import Spec, why_not
from benchmarks.common import table, write_result
from scaletrace.extrapolate.calibrate import Evidence

RATE_MBIT, BURST = 200.0, "10kb"
CORES, RANKS_A_CORE = 2, 2
RANK = Path(__file__).resolve().with_name("layout_rank.py")
GATE = 0.08
NETWORK = "network"
"""Folder of the all-reduces between two ranks."""
PATIENCE_S, TRIES = 120.0, 3
"""A job that has not ended by then hangs (1F1B over gloo does, now and then, both ranks in a batch of send and receive);
it is run again, and what still hangs is reported as such."""


@dataclass(frozen=True, slots=True)
class Job:
    """One layout as the options of benchmarks/layout_rank.py; tokens of one micro batch and how many of them.

    mode        tp (DTensor), megatron, pp, fsdp_tp, ddp (with TP as megatron has it), ep, cp or net
    ns          delay of a forward kernel by element of its input; backward takes twice as long
    inner       width between the two matrices of a layer, in widths outside; less of it leaves less work for the CPU
    checkpoint  1: every layer is run again in backward
    """

    mode: str
    ranks: int
    tp: int = 1
    micro_batches: int = 1
    tokens: int = 256
    ns: int = 40
    inner: int = 4
    checkpoint: int = 0

    def arguments(self) -> list[str]:
        options = (self.tp, self.micro_batches, self.tokens, self.ns, self.inner, self.checkpoint)
        return [self.mode, *map(str, options)]

    def layout(self) -> str:
        """As scaletrace writes it; one sample of `tokens` tokens is one micro batch."""
        seq = self.tokens * (self.ranks if self.mode == "cp" else 1)
        rest = f"mbs=1,seq={seq},microbatches={self.micro_batches}"
        rest += f",recompute={'full' if self.checkpoint else 'none'}"
        axes = {
            "tp": f"tp={self.tp}",
            "megatron": f"tp={self.tp}",
            "pp": f"pp={self.ranks}",
            "fsdp_tp": f"fsdp={self.ranks // self.tp},tp={self.tp}",
            "ddp": f"dp={self.ranks // self.tp},tp={self.tp}",
            "ep": f"dp={self.ranks},ep={self.ranks}",
            "cp": f"cp={self.ranks}",
        }
        return f"{axes[self.mode]},{rest}"

    def label(self) -> str:
        """For the table: the mode, the layout without what all have, and the width inside a layer in widths outside."""
        text = self.layout().replace(",recompute=none", "").replace(",tp=1", "").replace(",microbatches=1", "")
        return f"{self.mode}: {text.replace('mbs=1,', '')}, {self.inner}x"


SMALL, WIDE = {"tokens": 64, "ns": 1280, "inner": 1}, {"tokens": 64, "ns": 320, "inner": 4}
CASES = (
    (Job("tp", 2, tp=2), Job("tp", 4, tp=4)),
    (Job("megatron", 2, tp=2, **SMALL), Job("megatron", 4, tp=4, **SMALL)),
    (Job("tp", 2, tp=2, tokens=64), Job("tp", 4, tp=4, tokens=64)),
    (Job("tp", 2, tp=2, **SMALL), Job("tp", 4, tp=4, **SMALL)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 4, 1, 4, 64, 150)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 2, 1, 8, 64, 150)),
    (Job("fsdp_tp", 2), Job("fsdp_tp", 4, tp=2)),
    (Job("tp", 2, tp=2), Job("tp", 2, tp=2, tokens=512)),
    (Job("pp", 2, 1, 4), Job("pp", 4, 1, 4)),
    (Job("ddp", 2, **WIDE), Job("ddp", 4, tp=2, **WIDE)),
    (Job("ddp", 2, **WIDE), Job("ddp", 2, micro_batches=2, **WIDE)),
    (Job("ddp", 2, **WIDE), Job("ddp", 2, checkpoint=1, **WIDE)),
    (Job("ddp", 2, checkpoint=1, **WIDE), Job("ddp", 2, **WIDE)),
    (Job("ep", 2, **SMALL), Job("ep", 4, **SMALL)),
    (Job("cp", 2, **SMALL), Job("cp", 4, tokens=32, ns=1280, inner=1)),
)
"""Recorded and predicted. SMALL tensors, and the third pair's, move 64 kB at a time; the third leaves the CPU much to do
between two collectives. The last pair of pipelines spends a fifth of its time on messages."""
DISTURBED = 0.10
"""A job whose recorded steps take longer than those before them by more than this shared its host with something else
meanwhile (a recorder costs 2 to 4 %); it is run again."""
QUEUED = 0.05
"""A run whose ranks waited longer than this share of a step for a core says little about hosts with their own."""


class Hung(RuntimeError):
    """A job that did not end in time, with what each rank last wrote."""


def run(job: Job, out: Path) -> None:
    """Run a job on its own small cluster, with copies beside it on the cores that it leaves; raises Hung where it does not end in time."""
    (out / "capture").mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    places = CORES * RANKS_A_CORE
    with Namespaces(Spec(places, RATE_MBIT, burst=BURST)) as network:
        try:
            # What is known of the network beforehand is measured between hosts that do nothing else.
            for first in range(0, places if job.mode != "net" else 1, job.ranks):
                folder = out if first == 0 else out / "beside"
                folder.mkdir(exist_ok=True)
                ranks += [_start(job, network, first, rank, folder) for rank in range(job.ranks)]
            _await(ranks[: job.ranks], out)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _start(job: Job, network: Namespaces, first: int, rank: int, out: Path) -> subprocess.Popen[bytes]:
    """A rank of the copy of the job whose first rank lies at place `first`."""
    env = dict(
        os.environ, RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK="0", MASTER_ADDR=f"10.77.0.{first + 1}",
        MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
        CORE=str((first + rank) // RANKS_A_CORE % (os.cpu_count() or 1)), **({"BESIDE": "1"} if first else {}),
    )  # fmt: skip
    command = [sys.executable, "-P", str(RANK), str(out), *job.arguments()]
    with (out / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(network.command(first + rank, command), env=env, stdout=log, stderr=log)


def _await(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    """Wait for all ranks together, so that one that fails or hangs is told from those that wait for it."""
    deadline = time.monotonic() + PATIENCE_S
    left = dict(enumerate(processes))
    while left:
        for rank, process in list(left.items()):
            code = process.poll()
            if code:
                raise RuntimeError((out / f"rank{rank}.log").read_text(errors="replace")[-2000:])
            if code == 0:
                del left[rank]
        if left and time.monotonic() > deadline:
            raise Hung(f"ranks {', '.join(map(str, left))} still ran after {PATIENCE_S:.0f} s")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run of a job left: its median step in seconds, the variation of its steps, its capture, and the day.

    waited_s  how long the training thread waited for a core in a step, where longest; None: not measured
    """

    step_s: float
    spread: float
    capture: Path
    day: str
    waited_s: float | None


def kept(job: Job, out: Path) -> Kept:
    """What an earlier run of the job left in `out`; raises FileNotFoundError where it did not end."""
    files = [out / f"steps_{rank}.json" for rank in range(job.ranks)]
    by_rank = [json.loads(file.read_text()) for file in files]
    steps = [max(step) for step in zip(*by_rank, strict=True)]
    day = datetime.datetime.fromtimestamp(files[0].stat().st_mtime, datetime.UTC).date().isoformat()
    waits = [out / f"waited_{rank}.json" for rank in range(job.ranks)]
    waited_s = max(float(file.read_text()) for file in waits) if all(file.exists() for file in waits) else None
    spread = statistics.pstdev(steps) / statistics.mean(steps)
    return Kept(statistics.median(steps), spread, out / "capture", day, waited_s)


def swept(folder: Path) -> list[Evidence]:
    """The all-reduces of two ranks as evidence; a time is that of the rank that came last. Empty where none were kept."""
    files = [folder / NETWORK / f"network_{rank}.json" for rank in range(2)]
    if not all(file.exists() for file in files):
        return []
    first, second = (json.loads(file.read_text()) for file in files)
    return [
        Evidence("all_reduce", int(size), 2, statistics.median(map(min, first[size], second[size]))) for size in first
    ]


def predict(base: Job, capture: Path, target: Job, evidence: Sequence[Evidence] = ()) -> tuple[float, float]:
    """Step in seconds of (the base, as its own graph replays; the target, rewritten from it)."""
    from scaletrace.extrapolate.catalog import load_device
    from scaletrace.extrapolate.cluster import Cluster, Link, Tier
    from scaletrace.extrapolate.layout import Layout
    from scaletrace.extrapolate.relayout import predict as rewrite
    from scaletrace.parse.build import build
    from scaletrace.parse.load import load

    tier = Tier("link", Link.TCP, 0, RATE_MBIT / 8 * 1e6, 0.985, 30e-6)
    cluster = Cluster("emulated", load_device("CPU host"), (tier,), backend="gloo")
    found = rewrite(build(load(capture)), Layout.parse(target.layout()), cluster, Layout.parse(base.layout()), evidence)
    return found.measured_s, found.step_s


def measure(cases: tuple[tuple[Job, Job], ...], folder: Path, again: bool) -> dict[Job, Kept | str]:
    """What each job of the cases left in `folder`, or why it left nothing; run first unless `again`."""
    done: dict[Job, Kept | str] = {}
    for job in dict.fromkeys(job for case in cases for job in case):
        out = folder / "_".join([*job.arguments(), str(job.ranks)])
        try:
            if not again:
                _patiently(job, out)
            done[job] = kept(job, out)
        except Hung as error:
            done[job] = f"hung {TRIES} times: {error}"
        except FileNotFoundError:
            done[job] = "not recorded"
    return done


def _patiently(job: Job, out: Path) -> None:
    """Run a job, again where it hangs or something else ran beside what was recorded; raises Hung after the last try."""
    for number in range(1, TRIES + 1):
        try:
            run(job, out)
        except Hung as error:
            why = str(error)
            if number == TRIES:
                raise
        else:
            longer = recorded_s(out / "capture") / kept(job, out).step_s - 1 if job.mode != "net" else 0.0
            why = f"its recorded steps took {longer:+.0%} longer"
            if longer <= DISTURBED or number == TRIES:
                return
        sys.stderr.write(f"{job.layout()}, try {number} of {TRIES}: {why}\n")
        shutil.rmtree(out)


def recorded_s(capture: Path) -> float:
    """Median recorded step of the slowest rank."""
    from scaletrace.parse.load import load

    steps = [[step.end_ns - step.start_ns for step in rank.steps if step.complete] for rank in load(capture).ranks]
    return max(statistics.median(each) for each in steps) * 1e-9


def compared(
    base: Job, target: Job, done: dict[Job, Kept | str], evidence: Sequence[Evidence]
) -> tuple[list[str], bool]:
    """One row of the table, and whether its gate holds."""
    ground, truth = done[base], done[target]
    if isinstance(ground, str) or isinstance(truth, str):
        why = [f"{job.label()} {what}" for job, what in ((base, ground), (target, truth)) if isinstance(what, str)]
        return [base.label(), "", "", target.label(), *[""] * 7, "; ".join(why)], False
    replayed, predicted = predict(base, ground.capture, target, evidence)
    error = predicted / truth.step_s - 1
    holds = abs(error) <= GATE
    waited = (truth.waited_s or 0.0) / truth.step_s
    apart = f"{predicted / (truth.step_s * (1 - waited)) - 1:+.1%}" if truth.waited_s is not None else ""
    verdict = "holds" if holds else "MISSED" + ("; its ranks queued for cores" if waited > QUEUED else "")
    recorded, _ = predict(target, truth.capture, target, evidence)
    return [
        base.label(), f"{ground.step_s:.4f}", f"{replayed:.4f}", target.label(), f"{truth.step_s:.4f}",
        f"{truth.spread:.1%}", "" if truth.waited_s is None else f"{truth.waited_s / truth.step_s:.1%}", f"{recorded:.4f}",
        f"{predicted:.4f}", f"{error:+.1%}", apart, verdict,
    ], holds  # fmt: skip


def main() -> int:
    """Run the cases and write benchmarks/results/layouts.md; 1 if a prediction is off by more than 8 % or a job hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep captures, steps and logs here")
    parser.add_argument("--again", type=Path, help="predict anew from the folder that --keep filled")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and links are taken down
    reason = "" if args.again else why_not()
    if reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return 0
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        cases = CASES[:2] if args.quick else CASES
        folder = args.again or args.keep or Path(temporary)
        if not args.again:
            run(Job("net", 2), folder / NETWORK)
        evidence = swept(folder)
        done = measure(cases, folder, bool(args.again))
        if args.again and not any(isinstance(what, Kept) for what in done.values()):
            sys.stderr.write(f"{folder}: holds none of the jobs; nothing is written\n")
            return 2
        for base, target in cases:
            row, holds = compared(base, target, done, evidence)
            failed |= not holds
            rows.append(row)
            sys.stderr.write(" | ".join(row) + "\n")
    days = sorted({what.day for what in done.values() if isinstance(what, Kept)})
    body = table(COLUMNS, rows)
    if args.again:
        body += f"\n\nMeasured and recorded on {', '.join(days) or 'no day'}; predicted anew from that.\n"
    title = "Another layout predicted from one recorded on an emulated cluster"
    sys.stdout.write(write_result("layouts_quick" if args.quick else "layouts", title, body, "torch"))
    return int(failed)


COLUMNS = (
    "recorded",
    "measured s",
    "its replay s",
    "predicted",
    "measured s",
    "cv",
    "waited for a core",
    "its replay s",
    "predicted s",
    "error",
    "without that wait",
    "8 %",
)


if __name__ == "__main__":
    raise SystemExit(main())
