"""Times the search over all layouts of a size, and checks its winner by brute force and by rewriting a capture.

python -P benchmarks/search.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.fit import fit_to
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import predict
from scaletrace.extrapolate.search import Space, search
from scaletrace.extrapolate.traced_memory import traced_memory
from scaletrace.extrapolate.workload import Workload, from_job
from scaletrace.parse.build import build
from scaletrace.parse.load import load

SIZES = ((4096, 2048), (1024, 1024), (256, 512), (64, 256))
SMALL = (8, 16, 32)
GATE_S = 30.0
MEASURED = (
    "triosim_vgg13/profiler_vgg13-iter41.json.gz",
    "hta_v100_2",
    "misc-sidnb13_torch-profiling-tutorial/dc3b0e7228dd_851.1752215573993169006.pt.trace.json.gz",
    "misc-flashinfer-ai_flashinfer",
)
"""Public traces with memory events of a device."""


def main() -> int:
    """Write benchmarks/results/search.md; 1 if the large search is slow or a pruned winner is not the exhaustive one."""
    cluster = Cluster.load("dgx_h100")
    limit = 0.95 * cluster.device.memory_bytes
    rows, failed = [], False
    work = Workload.described(load_model("llama3-70b"), cluster.device)
    for gpus, batch in SIZES:
        began = time.process_time()
        found = search(work, Network(cluster), Space(gpus, batch, 8192, limit))
        taken = time.process_time() - began
        failed |= gpus == 4096 and taken > GATE_S
        rows.append(["llama3-70b", gpus, found.candidates, found.evaluated, f"{taken:.1f}", str(found.best.layout),
                     f"{found.best.step_s:.3f}", ""])  # fmt: skip
    small = Workload.described(load_model("llama2-7b"), cluster.device)
    for gpus in SMALL:
        space = Space(gpus, 64, 4096, limit)
        began = time.process_time()
        found = search(small, Network(cluster), space)
        taken = time.process_time() - began
        brute = search(small, Network(cluster), space, exhaustive=True)
        same = brute.best == found.best and [x.estimate for x in brute.next] == [x.estimate for x in found.next]
        failed |= not same
        rows.append(["llama2-7b", gpus, found.candidates, found.evaluated, f"{taken:.1f}", str(found.best.layout),
                     f"{found.best.step_s:.3f}", "same ten" if same else "DIFFERS"])  # fmt: skip
    columns = ["model", "GPUs", "candidates", "costed", "CPU s", "best layout", "step s", "brute force"]
    parts = [table(columns, rows)]
    with tempfile.TemporaryDirectory() as folder:
        again, differs = confirmed(Path(folder))
    parts.append(
        "\nFrom a synthesized capture of llama2-7b as fsdp=8 on dgx_h100: the estimate, fitted to the step of that capture, "
        "beside the capture's graph rewritten for the layout and replayed.\n"
    )
    parts.append(table(["GPUs", "layout", "estimate ms", "rewritten ms", "difference", "brute force"], again))
    parts.append(
        "\nMemory, from shapes beside the peak that memory events report: all public traces that have such events.\n"
    )
    parts.append(table(["trace", "from shapes GB", "measured GB", "difference"], memory()))
    failed |= differs
    sys.stdout.write(write_result("search", "Search over all layouts, one process", "\n".join(parts), "numpy"))
    return int(failed)


def confirmed(folder: Path) -> tuple[list[list[object]], bool]:
    """(rows, whether pruning changed a result) of searches from a capture, the first three rewritten and replayed."""
    command = [sys.executable, "-P", "-m", "scaletrace.cli", "synth", "--model", "llama2-7b", "--layout", "fsdp=8",
               "--ranks", "all", "--steps", "2", "--out", str(folder), "--quiet"]  # fmt: skip
    subprocess.run(command, check=True)
    cluster, measured = Cluster.load("dgx_h100"), Layout(fsdp=8)
    built = build(load(folder))
    anatomy = dissect(built, measured)
    work = from_job(built, anatomy, measured, cluster.device)
    network = Network(cluster)
    fit = fit_to(work, built, network, anatomy)
    rows: list[list[object]] = []
    differs = False
    for gpus in (8, 16, 64):
        space = Space(gpus, gpus, work.model.seq, 0.95 * cluster.device.memory_bytes)
        found = search(work, network, space, fit=fit)
        brute = search(work, network, space, fit=fit, exhaustive=True)
        same = brute.best == found.best and [x.estimate for x in brute.next] == [x.estimate for x in found.next]
        differs |= not same
        for item in [found.best, *(lost.estimate for lost in found.next)][:3]:
            step_s = predict(built, item.layout, cluster, measured).step_s
            rows.append([gpus, str(item.layout), f"{item.step_s * 1e3:.1f}", f"{step_s * 1e3:.1f}",
                         f"{item.step_s / step_s - 1:+.1%}", "same ten" if same else "DIFFERS"])  # fmt: skip
    return rows, differs


def memory() -> list[list[object]]:
    """A row for each public trace with memory events of a device; none where the reference data is absent."""
    data = Path(os.environ.get("SCALETRACE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")) / "traces"
    rows: list[list[object]] = []
    for name in MEASURED:
        if not (data / name).exists():
            continue
        found = max((traced_memory(trace) for trace in load(data / name).ranks), key=lambda one: one.measured)
        told = found.to_json()["predicted_bytes"]
        rows.append([
            name, f"{told / 1e9:.2f}" if told else "no shapes, or no training", f"{found.measured / 1e9:.2f}",
            f"{told / found.measured - 1:+.1%}" if told else "",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
