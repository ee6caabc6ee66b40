"""Predicts jobs under one layout from a capture of another, really runs both on an emulated cluster, and compares.

    python -P benchmarks/layouts.py             all cases, about 10 minutes, root, on a quiet machine
    python -P benchmarks/layouts.py --quick     two cases, one run each

A layer is two matrices with a delay between them that stands for a GPU kernel: it holds the rank for a time in
proportion to its elements without using the CPU, so that four ranks fit on two cores. No constant is fitted to a
predicted run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster.network import Network as Namespaces
from benchmarks.cluster.network import Spec, why_not
from benchmarks.common import table, write_result

WIDTH, LAYERS = 256, 8
WARM_UP, STEPS, RECORDED = 4, 20, 5
RATE_MBIT = 200.0
GATE = 0.08


@dataclass(frozen=True, slots=True)
class Job:
    """One layout as the job's options: mode tp, pp or fsdp_tp; tokens of one micro batch and how many of them.

    ns  delay of a forward kernel by element of its input; backward takes twice as long
    """

    mode: str
    ranks: int
    tp: int = 1
    micro_batches: int = 1
    tokens: int = 256
    ns: int = 40

    def arguments(self) -> list[str]:
        return [self.mode, str(self.tp), str(self.micro_batches), str(self.tokens), str(self.ns)]

    def layout(self) -> str:
        """As scaletrace writes it; one sample of `tokens` tokens is one micro batch."""
        rest = f"mbs=1,seq={self.tokens},microbatches={self.micro_batches}"
        axes = {
            "tp": f"tp={self.tp}",
            "pp": f"pp={self.ranks}",
            "fsdp_tp": f"fsdp={self.ranks // self.tp},tp={self.tp}",
        }
        return f"{axes[self.mode]},{rest}"


CASES = (
    (Job("tp", 2, tp=2), Job("tp", 4, tp=4)),
    (Job("tp", 2, tp=2, tokens=64), Job("tp", 4, tp=4, tokens=64)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 4, 1, 4, 64, 150)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 2, 1, 8, 64, 150)),
    (Job("fsdp_tp", 2), Job("fsdp_tp", 4, tp=2)),
    (Job("tp", 2, tp=2), Job("tp", 2, tp=2, tokens=512)),
    (Job("pp", 2, 1, 4), Job("pp", 4, 1, 4)),
)
"""Recorded and predicted. The last pair spends a fifth of its time on messages, which PyTorch's 1F1B waits for."""


def rank_main(arguments: list[str], out: Path) -> None:
    """One rank: train, time steps without a profiler, then record some."""
    import torch
    import torch.distributed as dist

    from scaletrace.collect import record

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    step = _step(arguments)
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    dist.barrier()
    with record(str(out / "capture"), start_step=2, steps=RECORDED) as session:
        for _ in range(RECORDED + 3):
            step()
            session.step()
    (out / f"steps_{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _layer(ns: int) -> Any:
    """The layer's class, made here since only ranks import torch."""
    import torch
    from torch import nn

    class Delay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.seconds = x.numel() * ns * 1e-9
            time.sleep(ctx.seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * ctx.seconds)
            return grads[0].clone()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(Delay.apply(self.up(x)))
            return out

    return Layer


def _step(arguments: list[str]) -> Any:
    """A function that trains one step of the job on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mode, (tp, micro_batches, tokens, ns) = arguments[0], map(int, arguments[1:])
    rank, world, layer = dist.get_rank(), dist.get_world_size(), _layer(ns)
    count = LAYERS // world if mode == "pp" else LAYERS
    model = nn.Sequential(*[layer() for _ in range(count)])
    x = torch.randn(tokens * micro_batches, WIDTH, requires_grad=True)
    if mode == "pp":
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=lambda out, _: out.square().mean())
    elif tp > 1:
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mode == "fsdp_tp" and world > tp:
        shard = mesh["dp_shard"] if tp > 1 else init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        for block in model:
            fully_shard(block, mesh=shard)
        fully_shard(model, mesh=shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        if mode == "pp":
            schedule.step(*((x,) if rank == 0 else ()), target=x if rank == world - 1 else None)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def run(job: Job, out: Path) -> tuple[float, float, Path]:
    """Run a job on its own small cluster: (median step in seconds, its variation, capture)."""
    (out / "capture").mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    with Namespaces(Spec(job.ranks, RATE_MBIT)) as network:
        try:
            for rank in range(job.ranks):
                env = dict(
                    os.environ, RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK="0", MASTER_ADDR="10.77.0.1",
                    MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                )  # fmt: skip
                command = [sys.executable, "-P", __file__, "--rank", str(out), *job.arguments()]
                log = (out / f"rank{rank}.log").open("wb")
                processes.append(subprocess.Popen(network.command(rank, command), env=env, stdout=log, stderr=log))
            for rank, process in enumerate(processes):
                if process.wait(timeout=300):
                    raise RuntimeError((out / f"rank{rank}.log").read_text(errors="replace")[-2000:])
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    by_rank = [json.loads((out / f"steps_{rank}.json").read_text()) for rank in range(job.ranks)]
    steps = [max(step) for step in zip(*by_rank, strict=True)]
    return statistics.median(steps), statistics.pstdev(steps) / statistics.mean(steps), out / "capture"


def predict(base: Job, capture: Path, target: Job) -> tuple[float, float]:
    """Step in seconds of (the base, as its own graph replays; the target, rewritten from it)."""
    from scaletrace.extrapolate.catalog import load_device
    from scaletrace.extrapolate.cluster import Cluster, Link, Tier
    from scaletrace.extrapolate.layout import Layout
    from scaletrace.extrapolate.relayout import predict as rewrite
    from scaletrace.parse.build import build
    from scaletrace.parse.load import load

    tier = Tier("link", Link.TCP, 0, RATE_MBIT / 8 * 1e6, 0.985, 30e-6)
    cluster = Cluster("emulated", load_device("CPU host"), (tier,), backend="gloo")
    found = rewrite(build(load(capture)), Layout.parse(target.layout()), cluster, Layout.parse(base.layout()))
    return found.measured_s, found.step_s


def main() -> int:
    """Run the cases and write benchmarks/results/layouts.md; 1 if any prediction is off by more than 8 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=Path)
    parser.add_argument("--keep", type=Path, help="keep captures and logs here")
    parser.add_argument("job", nargs="*")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.job, args.rank)
    reason = why_not()
    if reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return 0
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        done: dict[Job, tuple[float, float, Path]] = {}
        for base, target in CASES[:2] if args.quick else CASES:
            for job in (base, target):
                if job not in done:
                    done[job] = run(job, folder / "_".join([*job.arguments(), str(job.ranks)]))
            replayed, predicted = predict(base, done[base][2], target)
            measured, spread, _ = done[target]
            error = predicted / measured - 1
            failed |= abs(error) > GATE
            rows.append([
                base.layout(), f"{done[base][0]:.4f}", f"{replayed:.4f}", target.layout(), f"{measured:.4f}",
                f"{spread:.1%}", f"{predicted:.4f}", f"{error:+.1%}", "holds" if abs(error) <= GATE else "MISSED",
            ])  # fmt: skip
            sys.stderr.write(" | ".join(rows[-1]) + "\n")
    columns = ["recorded", "measured s", "its replay s", "predicted", "measured s", "cv", "predicted s", "error", "8 %"]
    title = "Another layout predicted from one recorded on an emulated cluster"
    sys.stdout.write(write_result("layouts_quick" if args.quick else "layouts", title, table(columns, rows), "torch"))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
