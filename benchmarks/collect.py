"""Turns runs with and without the collector into its cost: at start, at each step outside a window, and inside one.

`python -P benchmarks/collect.py`. Times are CPU seconds, which other load on the machine disturbs little; the two sides
of each comparison alternate. Inside a window, the other side is torch.profiler with the same
options, driven by hand.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, `python -P benchmarks/collect.py`
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.collect.launch import hook_folder
from scaletrace.collect.settings import VARIABLE, Settings

LIMIT_START_MS, LIMIT_OUTSIDE, LIMIT_INSIDE = 60.0, 0.002, 0.02
STEP_MS = 2.0
"""A step shorter than any of a real job: the cost outside a window is stated as a share of it."""


def child_cpu_s(code: str, hooked: bool, folder: str) -> float:
    """CPU seconds of a new interpreter that runs `code`."""
    environment = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "PYTHONPATH")}
    if hooked:
        environment |= {"PYTHONPATH": hook_folder(), VARIABLE: Settings(folder=folder, launched=True).to_json()}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def start_cost_ms(code: str, rounds: int, folder: str) -> tuple[float, float]:
    """Median CPU ms of a start without the hook, and what the hook adds (median of the pairs)."""
    pairs = [(child_cpu_s(code, False, folder), child_cpu_s(code, True, folder)) for _ in range(rounds)]
    plain = statistics.median(without for without, _ in pairs)
    return plain * 1e3, statistics.median(hooked - without for without, hooked in pairs) * 1e3


ARMING = """import torch, time
import torch.optim.optimizer as module
began = time.process_time()
from scaletrace.collect.hook.boundary import install
install(module)
print(time.process_time() - began)"""


def arming_cost_ms(rounds: int, folder: str) -> float:
    """CPU ms that arming adds to the import of torch: our modules, and wrapping. The import itself varies by far more."""
    environment = {**os.environ, VARIABLE: Settings(folder=folder, launched=True).to_json()}
    command = [sys.executable, "-c", ARMING]
    said = [subprocess.run(command, env=environment, check=True, capture_output=True).stdout for _ in range(rounds)]
    return statistics.median(map(float, said)) * 1e3


def boundary_cost_ns(folder: str, calls: int = 200_000) -> float:
    """ns of one boundary while no window is due: the check of the owner, the count, one comparison."""
    import torch  # noqa: F401  (the first boundary asks it whether all is safe)

    from scaletrace.collect.hook.boundary import Boundary
    from scaletrace.collect.session import Recorder

    class Optimizer:
        param_groups: tuple[Any, ...] = ()

    recorder = Recorder(Settings(folder=folder, launched=True, start_step=10**9))
    boundary, optimizer = Boundary(recorder), Optimizer()
    boundary(optimizer)
    if recorder.disabled or recorder.completed != 1:
        raise RuntimeError(f"the recorder gave up; see {folder}/collect.log")
    best = float("inf")
    for _ in range(5):
        began = time.process_time_ns()
        for _ in range(calls):
            boundary(optimizer)
        best = min(best, (time.process_time_ns() - began) / calls)
    return best


def training_step() -> Callable[[], None]:
    """One step of a small network: about 20 ms and 300 operators."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(128, 512)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(step: Callable[[], None], steps: int, path: Path) -> tuple[float, float]:
    """CPU seconds of `steps` steps inside torch.profiler's own window, and of its export."""
    from torch.profiler import ProfilerActivity, profile, schedule

    exported: list[float] = []

    def export(profiler: Any) -> None:
        began = time.process_time()
        profiler.export_chrome_trace(str(path))
        exported.append(time.process_time() - began)

    marks = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=export,
        record_shapes=True,
    ) as profiler:
        for number in range(1 + steps):
            step()
            marks.append(time.process_time())
            if number < steps:
                profiler.step()
        profiler.step()
    return marks[-1] - marks[0], exported[0]


def collected(step: Callable[[], None], steps: int, folder: str) -> tuple[float, float]:
    """The same for the collector: its boundaries in place of the calls by hand, and all that it writes at the end."""
    from scaletrace.collect.session import Recorder

    recorder = Recorder(Settings(folder=folder, launched=True, start_step=2, steps=steps))
    recorder.watch.install()
    step()
    recorder.step()
    marks = []
    for number in range(1 + steps):
        step()
        marks.append(time.process_time())
        if number < steps:
            recorder.step()
    began = time.process_time()
    recorder.step()
    if recorder.disabled:
        raise RuntimeError(f"the recorder gave up; see {folder}/collect.log")
    return marks[-1] - marks[0], time.process_time() - began


def inside(rounds: int, steps: int, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """CPU seconds of each round: without a profiler, by hand, collected."""
    step = training_step()
    for _ in range(5):
        step()
    plain, hand, ours = [], [], []
    for number in range(rounds):
        began = time.process_time()
        for _ in range(steps):
            step()
        plain.append(time.process_time() - began)
        hand.append(by_hand(step, steps, folder / f"{number}.json")[0])
        ours.append(collected(step, steps, str(folder / str(number)))[0])
    return plain, hand, ours


def main() -> None:
    """Measure, print and write the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--steps", type=int, default=10)
    arguments = options.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "6"
    with tempfile.TemporaryDirectory() as scratch:
        empty, empty_added = start_cost_ms("pass", 2 * arguments.rounds, scratch)
        arming = arming_cost_ms(max(3, arguments.rounds // 2), scratch)
        boundary = boundary_cost_ns(scratch)
        plain, hand, ours = inside(arguments.rounds, arguments.steps, Path(scratch))
    # other load only ever adds CPU time (cold caches), so the least of the rounds is nearest to the truth
    against_hand, against_none = min(ours) / min(hand) - 1, min(hand) / min(plain) - 1
    step_ms = min(plain) / arguments.steps * 1e3
    rows = [
        ["start of an interpreter, ms", f"{empty:.1f}", f"+{empty_added:.1f}", f"{LIMIT_START_MS:.0f}"],
        ["… that imports torch, ms", "", f"+{empty_added + arming:.1f}", f"{LIMIT_START_MS:.0f}"],
        ["a boundary outside a window, µs", "0", f"+{boundary / 1e3:.2f}", ""],
        [f"… as a share of a {STEP_MS:.0f} ms step", "", f"{boundary / STEP_MS / 1e6:.4%}", f"{LIMIT_OUTSIDE:.1%}"],
        [
            f"a {step_ms:.0f} ms step in a window, to torch.profiler's own",
            "1",
            f"{against_hand:+.2%}",
            f"{LIMIT_INSIDE:.0%}",
        ],
        ["torch.profiler's own window, to no profiler", "1", f"{against_none:+.1%}", ""],
    ]
    body = table(["what", "without", "the collector adds", "at most"], rows)
    body += f"\n\nCPU time; {arguments.rounds} alternating rounds of {arguments.steps} steps: medians at start, the least of all rounds in a window."
    sys.stdout.write(write_result("collect", "Overhead of the collector", body, "torch"))
    within = empty_added + arming < LIMIT_START_MS and boundary / STEP_MS / 1e6 < LIMIT_OUTSIDE
    raise SystemExit(0 if within and against_hand < LIMIT_INSIDE else 1)


if __name__ == "__main__":
    main()
