"""Predicts jobs under one layout from a capture of another, really runs both on an emulated cluster, and compares.

    python -P benchmarks/layouts.py             all cases, about 10 minutes, root, on a quiet machine
    python -P benchmarks/layouts.py --quick     two cases, one run each
    python -P benchmarks/layouts.py --keep DIR  the same, and keep what was recorded and measured
    python -P benchmarks/layouts.py --again DIR predict anew from what an earlier run kept; runs nothing, needs no root

A layer is two matrices with a delay between them that stands for a GPU kernel: it holds the rank for a time in
proportion to its elements without using the CPU, so that four ranks fit on two cores. Ranks run in real time, as each
stands for a host with cores of its own; how long they still waited for a core is measured and shown. The network's costs come from all-reduces between two ranks
on the same links, measured beforehand; no constant is fitted to a predicted run.
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
from typing import Any

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster.network import Network as Namespaces
from benchmarks.cluster.network import Spec, why_not
from benchmarks.cluster.priority import urgent
from benchmarks.common import table, write_result
from scaletrace.extrapolate.calibrate import Evidence

WIDTH, LAYERS = 256, 8
WARM_UP, STEPS, RECORDED = 4, 20, 5
RATE_MBIT, BURST = 200.0, "10kb"
GATE = 0.08
SWEEP_BYTES, SWEEPS = (4096, 16384, 65536, 262144, 1048576), 20
NETWORK = "network"
"""Folder of the all-reduces between two ranks."""
PATIENCE_S, TRIES = 120.0, 3
"""A job that has not ended by then hangs (1F1B over gloo does, now and then, both ranks in a batch of send and receive);
it is run again, and what still hangs is reported as such."""


@dataclass(frozen=True, slots=True)
class Job:
    """One layout as the job's options: mode tp (DTensor), megatron, pp, fsdp_tp or net; tokens of one micro batch and how many of them.

    ns     delay of a forward kernel by element of its input; backward takes twice as long
    inner  width between the two matrices of a layer, in widths outside; less of it leaves less work for the CPU
    """

    mode: str
    ranks: int
    tp: int = 1
    micro_batches: int = 1
    tokens: int = 256
    ns: int = 40
    inner: int = 4

    def arguments(self) -> list[str]:
        return [self.mode, *map(str, (self.tp, self.micro_batches, self.tokens, self.ns, self.inner))]

    def layout(self) -> str:
        """As scaletrace writes it; one sample of `tokens` tokens is one micro batch."""
        rest = f"mbs=1,seq={self.tokens},microbatches={self.micro_batches}"
        axes = {
            "tp": f"tp={self.tp}",
            "megatron": f"tp={self.tp}",
            "pp": f"pp={self.ranks}",
            "fsdp_tp": f"fsdp={self.ranks // self.tp},tp={self.tp}",
        }
        return f"{axes[self.mode]},{rest}"


CASES = (
    (Job("tp", 2, tp=2), Job("tp", 4, tp=4)),
    (Job("megatron", 2, tp=2, tokens=64, ns=1280, inner=1), Job("megatron", 4, tp=4, tokens=64, ns=1280, inner=1)),
    (Job("tp", 2, tp=2, tokens=64), Job("tp", 4, tp=4, tokens=64)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 4, 1, 4, 64, 150)),
    (Job("pp", 2, 1, 4, 64, 150), Job("pp", 2, 1, 8, 64, 150)),
    (Job("fsdp_tp", 2), Job("fsdp_tp", 4, tp=2)),
    (Job("tp", 2, tp=2), Job("tp", 2, tp=2, tokens=512)),
    (Job("pp", 2, 1, 4), Job("pp", 4, 1, 4)),
)
"""Recorded and predicted. The second and third pair move 64 kB at a time; the third leaves the CPU so much to do
between two collectives that four ranks queue for two cores. The last pair spends a fifth of its time on messages."""
QUEUED = 0.05
"""A run whose ranks waited longer than this share of a step for a core says little about hosts with their own."""


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
    urgent()
    dist.barrier()
    times = []
    waited_ns = -waited_for_a_core_ns()
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    waited_ns += waited_for_a_core_ns()
    dist.barrier()
    with record(str(out / "capture"), start_step=2, steps=RECORDED) as session:
        for _ in range(RECORDED + 3):
            step()
            session.step()
    (out / f"steps_{rank}.json").write_text(json.dumps(times))
    (out / f"waited_{rank}.json").write_text(json.dumps(waited_ns * 1e-9 / STEPS))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def waited_for_a_core_ns() -> int:
    """How long the thread that trains was ready to run and no core was free."""
    return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1])


def network_main(out: Path) -> None:
    """One of two ranks that time all-reduces of some sizes: what is known of the network beforehand."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    urgent()
    seconds: dict[int, list[float]] = {}
    for size in SWEEP_BYTES:
        tensor = torch.zeros(size // 4)
        for _ in range(SWEEPS):
            dist.barrier()
            time.sleep(0.005)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.setdefault(size, []).append(time.perf_counter() - began)
    (out / f"network_{dist.get_rank()}.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)


def _layer(ns: int, inner: int) -> Any:
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
            self.up = nn.Linear(WIDTH, inner * WIDTH, bias=False)
            self.down = nn.Linear(inner * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(Delay.apply(self.up(x)))
            return out

    return Layer


def _split_by_hand(block: Any) -> None:
    """Tensor parallelism over all ranks as Megatron writes it: a slice of each matrix and one all-reduce a direction,
    without the wrappers of DTensor and the work for the CPU that they bring."""
    import torch
    import torch.distributed as dist

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            out = grads[0].contiguous()
            dist.all_reduce(out)
            return out

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    rank, world = dist.get_rank(), dist.get_world_size()
    for linear, dimension in ((block.up, 0), (block.down, 1)):
        mine = linear.weight.detach().chunk(world, dimension)[rank].contiguous()
        linear.weight = torch.nn.Parameter(mine)
    block.up.register_forward_pre_hook(lambda _, inputs: (Copied.apply(inputs[0]),))
    block.down.register_forward_hook(lambda _, inputs, out: Summed.apply(out))


def _step(arguments: list[str]) -> Any:
    """A function that trains one step of the job on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mode, (tp, micro_batches, tokens, ns, inner) = arguments[0], map(int, arguments[1:])
    rank, world, layer = dist.get_rank(), dist.get_world_size(), _layer(ns, inner)
    count = LAYERS // world if mode == "pp" else LAYERS
    model = nn.Sequential(*[layer() for _ in range(count)])
    x = torch.randn(tokens * micro_batches, WIDTH, requires_grad=True)
    if mode == "pp":
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=lambda out, _: out.square().mean())
    elif mode == "megatron":
        for block in model:
            _split_by_hand(block)
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


class Hung(RuntimeError):
    """A job that did not end in time, with what each rank last wrote."""


def run(job: Job, out: Path) -> None:
    """Run a job on its own small cluster; raises Hung where it does not end in time."""
    (out / "capture").mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    with Namespaces(Spec(job.ranks, RATE_MBIT, burst=BURST)) as network:
        try:
            for rank in range(job.ranks):
                env = dict(
                    os.environ, RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK="0", MASTER_ADDR="10.77.0.1",
                    MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99",
                )  # fmt: skip
                command = [sys.executable, "-P", __file__, "--rank", str(out), *job.arguments()]
                with (out / f"rank{rank}.log").open("wb") as log:
                    processes.append(subprocess.Popen(network.command(rank, command), env=env, stdout=log, stderr=log))
            _await(processes, out)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


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
    """Run a job, again where it hangs; raises Hung after the last try."""
    for number in range(1, TRIES + 1):
        try:
            run(job, out)
            return
        except Hung as error:
            sys.stderr.write(f"{job.layout()}, try {number} of {TRIES}: {error}\n")
            if number == TRIES:
                raise
            shutil.rmtree(out)


def compared(
    base: Job, target: Job, done: dict[Job, Kept | str], evidence: Sequence[Evidence]
) -> tuple[list[str], bool]:
    """One row of the table, and whether its gate holds."""
    ground, truth = done[base], done[target]
    if isinstance(ground, str) or isinstance(truth, str):
        why = [f"{job.layout()} {what}" for job, what in ((base, ground), (target, truth)) if isinstance(what, str)]
        return [base.layout(), "", "", target.layout(), *[""] * 7, "; ".join(why)], False
    replayed, predicted = predict(base, ground.capture, target, evidence)
    error = predicted / truth.step_s - 1
    holds = abs(error) <= GATE
    waited = (truth.waited_s or 0.0) / truth.step_s
    apart = f"{predicted / (truth.step_s * (1 - waited)) - 1:+.1%}" if truth.waited_s is not None else ""
    verdict = "holds" if holds else "MISSED" + ("; its ranks queued for cores" if waited > QUEUED else "")
    recorded, _ = predict(target, truth.capture, target, evidence)
    return [
        base.layout(), f"{ground.step_s:.4f}", f"{replayed:.4f}", target.layout(), f"{truth.step_s:.4f}",
        f"{truth.spread:.1%}", "" if truth.waited_s is None else f"{truth.waited_s / truth.step_s:.1%}", f"{recorded:.4f}",
        f"{predicted:.4f}", f"{error:+.1%}", apart, verdict,
    ], holds  # fmt: skip


def main() -> int:
    """Run the cases and write benchmarks/results/layouts.md; 1 if a prediction is off by more than 8 % or a job hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help="keep captures, steps and logs here")
    parser.add_argument("--again", type=Path, help="predict anew from the folder that --keep filled")
    parser.add_argument("job", nargs="*")
    args = parser.parse_args()
    if args.rank:
        network_main(args.rank) if args.job[0] == "net" else rank_main(args.job, args.rank)
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
