"""Times the search over all layouts of a size and checks its winner by brute force on small sizes.

python -P benchmarks/search.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.search import Space, search
from scaletrace.extrapolate.workload import Workload

SIZES = ((4096, 2048), (1024, 1024), (256, 512), (64, 256))
SMALL = (8, 16, 32)
GATE_S = 30.0


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
    sys.stdout.write(write_result("search", "Search over all layouts, one process", table(columns, rows), "numpy"))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
