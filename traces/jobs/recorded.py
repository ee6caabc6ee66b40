"""Runs `transformer.py` with torch.profiler around three of its steps, and writes one trace and one sidecar a rank.

This is what a user writes by hand: warm-up steps outside, then a window, then an export on every rank.
The shipped samples are made with it, so that they don't depend on this project's own collector.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from scaletrace.traces.jobs import transformer

WARM_STEPS = 3
RECORDED_STEPS = 3


def flight_record() -> dict[str, object]:
    """PyTorch's own ring of collectives of this rank; the fields that gloo leaves at zero are null, not zero."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    record: dict[str, object] = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    entries = record.setdefault("entries", [])  # a job without collectives has none
    for entry in entries if isinstance(entries, list) else []:
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry.get(key) or None
    return record


def main() -> None:
    """Train with the profiler on for steps WARM_STEPS+1 … WARM_STEPS+RECORDED_STEPS."""
    options = transformer.parser()
    options.add_argument("--record", type=Path, required=True, help="folder for rank{R}.json.gz and fr_rank{R}.json.gz")
    arguments = options.parse_args()
    arguments.steps = WARM_STEPS + 1 + RECORDED_STEPS
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def export(profiler: profile) -> None:
        profiler.export_chrome_trace(str(arguments.record / f"rank{rank}.json.gz"))
        sidecar = json.dumps(flight_record()).encode()
        (arguments.record / f"fr_rank{rank}.json.gz").write_bytes(gzip.compress(sidecar, mtime=0))

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WARM_STEPS, warmup=1, active=RECORDED_STEPS, repeat=1),
        on_trace_ready=export,
        record_shapes=True,
    ) as profiler:
        transformer.train(arguments, after_step=profiler.step)
    dist.barrier()  # gloo's threads let go of the last tensors before the interpreter ends (pytorch issue 190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
