"""Turns public traces of whole jobs into two gates on the replay: strict identity, and each step from the other steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.validation.result import Gate, Result
from benchmarks.validation.rows import Config, HeldOutRow, Scored
from scaletrace.parse.build import Built, build
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import across_steps, step_errors, without_stalls
from scaletrace.replay.engine import replay

JOBS = {
    "nanogpt, 8 H100": "nanogpt8_h100",
    "dlrm, 8 V100": "dlrm8_v100/kineto",
    "torchrec, 2 V100": "torchrec2_v100",
    "torchrec 5, 4 V100": "torchrec4_v100-sst_long_a2a_optimizer_5-run1",
    "torchrec 5 qcomm, 4 V100": "torchrec4_v100-sst_long_a2a_optimizer_5_qcomm-run1",
    "torchrec 2, 4 V100": "torchrec4_v100-sst_long_a2a_optimizer_2-run1",
    "lightllm, 8 H200": "lightllm8_h200-logs-run1",
    "lightllm overlap, 8 H200": "lightllm8_h200-logs_decode_overlap-run1",
}
LEFT_OUT = "megatron_tp2_v100, whose two ranks take turns on one GPU: time-slicing leaves no dependency to replay"
MS = 1e6


def results(tables: Path) -> list[Result]:
    """Both gates over the public jobs beside the tables; jobs that are absent are left out."""
    folder = tables.parent / "traces"
    jobs = {name: build(load(folder / place)) for name, place in JOBS.items() if (folder / place).is_dir()}
    return [_identity(jobs), _across(jobs)] if jobs else []


def _identity(jobs: dict[str, Built]) -> Result:
    """Replay without any start time and with stalls at zero: no number fitted to a step."""
    scored, means, stalls = [], [], []
    for name, built in jobs.items():
        timeline = replay(built.graph, without_stalls(built.graph))
        errors = step_errors(built.graph, built.measured, timeline)
        for step in errors:
            held = HeldOutRow(Config((("job", name),)), step.measured_ns / MS)
            scored.append(held.scored(f"{name}, step {step.step}", step.replayed_ns / MS))
        means.append(100 * float(np.mean([abs(step.error) for step in errors])))
        stalls.append(100 * built.quality.worst_stall_fraction)
    worst = max(100 * abs(row.error) for row in scored)
    gates = (
        Gate("replay", "strict identity, worst job's mean", max(means), 1, 0.3, baseline="best published 3.3 %"),
        Gate("replay", "strict identity, worst step", worst, 3, 1, baseline="best published 3.3 %"),
        Gate("replay", "unexplained stall of the window, worst rank", max(stalls), 1, 0.5),
    )
    notes = (
        f"Left out: {LEFT_OUT}.",
        "One constant a rank each for launch latency, stream gap and tail of blocking calls.",
    )
    return Result("replay", "Replay of public jobs, strict identity", "step, ms", (), tuple(scored), gates, notes)


def _across(jobs: dict[str, Built]) -> Result:
    """Each step on its own structure with the durations of the others."""
    scored: list[Scored] = []
    over, lines = [], []
    for name, built in jobs.items():
        found = across_steps(built.graph, built.measured)
        if not found:
            continue
        for step in found:
            held = HeldOutRow(Config((("job", name),)), step.measured_ns / MS)
            scored.append(held.scored(f"{name}, step {step.step}", step.predicted_ns / MS, step.naive_ns / MS))
        mean = 100 * float(np.mean([abs(step.error) for step in found]))
        naive = 100 * float(np.mean([abs(step.naive_error) for step in found]))
        host = 100 * float(np.mean([abs(step.host_variation) for step in found]))
        over.append(mean / max(3.0, host))
        lines.append((name, f"{mean:.1f} %", f"{naive:.1f} %", f"{host:.0f} %", "yes" if mean < naive else "no"))
    better = 100 * float(np.mean([line[-1] == "yes" for line in lines]))
    reason = (
        "nanogpt's host times vary by a fifth from step to step, and its device times with them; with each step's own "
    )
    reason += "host times the same prediction is within 0.1 %"
    gates = (
        Gate(
            "replay_across",
            "mean error over the larger of 3 % and the host's variation, worst job",
            max(over),
            1,
            2 / 3,
            "×",
        ),
        Gate(
            "replay_across",
            "jobs better than the mean of the other steps",
            better,
            100,
            100,
            at_least=True,
            reason=reason,
        ),
    )
    heads = ("job", "mean error", "mean of the others' error", "host variation", "better")
    table_ = ("By job", heads, tuple(lines))
    title = "Replay of public jobs, each step from the others"
    return Result("replay_across", title, "step, ms", (), tuple(scored), gates, tables=(table_,))
