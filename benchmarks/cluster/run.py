"""Predicts 4 and 8 ranks of a really training emulated cluster from captures of at most 2, and compares.

    python -P benchmarks/cluster/run.py            everything, about 20 minutes, root, on a quiet machine
    python -P benchmarks/cluster/run.py --quick    DDP on one link rate, sizes 2 and 4
    python -P benchmarks/cluster/run.py --again DIR  predicts anew from what --keep DIR left: no network, no root

The captures are made by the product's own collector and read by its own loader; step times are measured without it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.cluster.job import Run, reopen, run
from benchmarks.cluster.network import Spec, why_not
from benchmarks.common import table, write_result
from scaletrace.extrapolate.catalog import load_device
from scaletrace.extrapolate.cluster import Cluster, Link, Tier
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.layout import Layout
from scaletrace.parse.build import build
from scaletrace.parse.load import load

HOP_S = 30e-6
PAYLOAD = 0.985
"""Share of a link's rate left by Ethernet, IP and TCP headers at an MTU of 9,000."""


NOTES = """Measured without a profiler, each step as its slowest rank's; captures of 2 ranks hold 5 steps, of which 4 count.
Ranks run in real time, links let 10 kB through at once where they were idle.

No number is fitted to 4 or 8 ranks. That the last rank of a gather takes half a shard longer, since gloo's announcement
stands behind what the rank itself sends, was found in the captures of 4 and 8 (gathers of two ranks take 20 or 30 ms,
by whether the two arrive together; of four, 31 to 35). On links that let 32 kB through, with ranks in time slices, the same
model predicts an earlier run of all ten within 5 %, but FSDP2 at 8 ranks, which comes out 5.3 and 7.9 % short."""


@dataclass(frozen=True, slots=True)
class Case:
    """One job on one network: mode, link rates in Mbit/s, racks; shard group of HSDP."""

    mode: str
    rate_mbit: float
    uplink_mbit: float = 0.0
    shard: int = 1

    @property
    def racks(self) -> int:
        return 2 if self.uplink_mbit else 1

    def folder(self, ranks: int) -> str:
        """Where the runs of a size are kept, before the number of the run."""
        return f"{self.mode}_{self.rate_mbit:g}_{ranks}"

    @property
    def name(self) -> str:
        tiers = f"{self.rate_mbit:g} Mbit/s" + (f", {self.uplink_mbit:g} between two racks" if self.uplink_mbit else "")
        return f"{self.mode.upper()}{f' x{self.shard}' if self.shard > 1 else ''}, {tiers}"

    def spec(self, ranks: int) -> Spec:
        """The network for a number of ranks; a job of one shard group stays in one rack."""
        racks = self.racks if ranks > max(2, self.shard) else 1
        return Spec(ranks, self.rate_mbit, racks, self.uplink_mbit if racks > 1 else 0.0)

    def cluster(self, ranks: int) -> Cluster:
        """What a user would write of this network: link rates, racks, nothing that was measured."""
        inside = ranks // self.racks if self.racks > 1 else 0
        tiers = [Tier("link", Link.TCP, inside, self.rate_mbit / 8 * 1e6, PAYLOAD, HOP_S)]
        if self.racks > 1:
            tiers.append(Tier("uplink", Link.TCP, 0, self.uplink_mbit / 8 * 1e6 / inside, PAYLOAD, HOP_S))
        return Cluster("emulated", load_device("CPU host"), tuple(tiers), backend="gloo")


CASES = (
    Case("ddp", 50),
    Case("ddp", 100),
    Case("fsdp2", 50),
    Case("fsdp2", 100),
    Case("hsdp", 50, uplink_mbit=40, shard=2),
)


def measure(case: Case, ranks: int, repeats: int, folder: Path) -> list[Run]:
    """Run the job `repeats` times."""
    options = {"shard": case.shard} if case.mode == "hsdp" else {}
    return [run(case.spec(ranks), case.mode, folder / f"{case.folder(ranks)}_{i}", **options) for i in range(repeats)]


def kept(case: Case, ranks: int, folder: Path) -> list[Run]:
    """What an earlier run left of a case; empty where it has none."""
    found = sorted(each for each in folder.glob(f"{case.folder(ranks)}_*") if list(each.glob("steps_*.json")))
    return [reopen(case.spec(ranks), case.mode, each) for each in found]


def predict(case: Case, base: Run, ranks: int) -> tuple[float, float, float]:
    """p5, p50 and p95 of the step in seconds, from the capture of `base`."""
    layout = Layout(fsdp=case.shard) if case.mode == "hsdp" else None
    curve = extrapolate(build(load(base.capture)), cluster=case.cluster(ranks), sizes=[ranks], layout=layout)
    point = curve.points[0]
    return point.low_s, point.p50_s, point.high_s


def rows_of(case: Case, sizes: tuple[int, ...], runs_of: Callable[[Case, int], list[Run]]) -> list[list[str]]:
    """One row a size: measured medians, their spread, the prediction from two ranks and its error."""
    base = runs_of(case, 2)
    if not base:
        return []
    smallest = base[0]
    out = [[case.name, "2", f"{smallest.median_s:.4f}", "", f"{smallest.cv:.1%}", "", "", "base"]]
    for ranks in sizes:
        runs = runs_of(case, ranks)
        if not runs:
            continue
        medians = sorted(each.median_s for each in runs)
        middle = medians[len(medians) // 2]
        low, p50, high = predict(case, smallest, ranks)
        spread = (medians[-1] - medians[0]) / middle
        error = p50 / middle - 1
        out.append(
            [
                case.name, str(ranks), " ".join(f"{value:.4f}" for value in medians), f"{spread:.1%}",
                f"{max(each.cv for each in runs):.1%}", f"{p50:.4f} ({low:.4f} to {high:.4f})", f"{error:+.1%}",
                "holds" if abs(error) <= 0.05 else "MISSED",
            ]
        )  # fmt: skip
        sys.stderr.write(" | ".join(out[-1]) + "\n")
    return out


def made(folder: Path) -> str:
    """When and on what the kept captures were made, as their manifests tell."""
    manifests = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/capture/manifest.json")]
    if not manifests:
        return "nothing kept"
    times = sorted(datetime.datetime.fromtimestamp(each["created_ns"] * 1e-9, datetime.UTC) for each in manifests)
    machines = {
        f"{host['cpu']}, {host['cpus']} cores, {each['versions']['system']}, torch {each['versions']['torch']}"
        for each in manifests
        for host in each["hosts"]
    }
    return (
        f"Measured {times[0]:%Y-%m-%d %H:%M} to {times[-1]:%H:%M} UTC on {'; '.join(sorted(machines))}, "
        f"scaletrace {manifests[0]['scaletrace_version']}; predicted with what the line above names."
    )


def main() -> int:
    """Run the cases and write benchmarks/results/cluster.md; 1 if any prediction is off by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="keep captures and logs here")
    parser.add_argument("--again", type=Path, help="predict from captures and step times that were kept here")
    args = parser.parse_args()
    reason = "" if args.again else why_not()
    if reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.again or args.keep or Path(temporary)
        cases, sizes = (CASES[:1], (4,)) if args.quick else (CASES, (4, 8))
        repeats = 1 if args.quick else args.repeats

        def runs_of(case: Case, ranks: int) -> list[Run]:
            if args.again:
                return kept(case, ranks, folder)
            return measure(case, ranks, repeats if ranks > 2 else 1, folder)

        rows = [row for case in cases for row in rows_of(case, sizes, runs_of)]
        when = made(folder)
    columns = ["job and network", "ranks", "measured s (medians of runs)", "between runs", "cv within a run"]
    columns += ["predicted s (p5 to p95)", "error", "5 %"]
    title = "Emulated cluster: step time of 4 and 8 ranks predicted from a capture of 2"
    name = "cluster_quick" if args.quick else "cluster"
    sys.stdout.write(write_result(name, title, f"{when}\n\n{table(columns, rows)}\n\n{NOTES}", "torch", "numpy"))
    return int(any("MISSED" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
