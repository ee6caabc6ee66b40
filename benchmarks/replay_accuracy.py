"""Turns public jobs into the table of gates that identity replay alone can't show; see docs/method.

Run from the root: python benchmarks/replay_accuracy.py [FOLDER OF THE PUBLIC DATA]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result
from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import NO_RELEASE, EdgeKind, Graph, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import AcrossSteps, StepError, across_steps, step_errors, without_stalls
from scaletrace.replay.engine import replay
from scaletrace.replay.stragglers import stragglers
from scaletrace.replay.whatif import whatif

T4 = "torchrec4_v100-sst_long_a2a_optimizer_"
JOBS = {
    "nanogpt8_h100": "nanogpt8_h100",
    "dlrm8_v100": "dlrm8_v100/kineto",
    "torchrec2_v100": "torchrec2_v100",
    "torchrec4_5": f"{T4}5-run1",
    "torchrec4_5_qcomm": f"{T4}5_qcomm-run1",
    "torchrec4_2": f"{T4}2-run1",
    "lightllm8": "lightllm8_h200-logs-run1",
    "lightllm8_overlap": "lightllm8_h200-logs_decode_overlap-run1",
    "megatron_tp2_v100": "megatron_tp2_v100",
    "nanogpt_ab (rank 0 alone)": "nanogpt_ab_v1/alt1__modded-nanogpt-current-gpu-rank-00-chrome-trace.json.gz",
}
WHATIFS = (("comm=3",), ("compute=2",), ("host=0.25",))
DROPPED = (
    EdgeKind.RENDEZVOUS,
    EdgeKind.EVENT_WAIT,
    EdgeKind.HOST_SYNC,
    EdgeKind.OCCUPANCY,
    EdgeKind.LAUNCH,
    EdgeKind.STREAM,
    EdgeKind.PROGRAM,
    EdgeKind.HAND_OVER,
)


def _percent(values: list[float], digits: int = 2) -> str:
    return " ".join(f"{100 * v:+.{digits}f}" for v in values) or "-"


def _errors(steps: list[StepError]) -> list[float]:
    return [step.error for step in steps]


def _starts(built: Built, strict: bool) -> str:
    graph = built.graph
    start = replay(graph, without_stalls(graph) if strict else None).start_ns
    device = graph.nodes(NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE)
    late = np.abs(start - built.measured.start_ns)[device] / 1000
    return " / ".join(f"{v:.0f}" for v in np.percentile(late, [50, 95, 100])) if len(late) else "-"


def _given(graph: Graph) -> float:
    """Share of the device nodes whose start is an input: work that was launched before the window."""
    device = graph.nodes(NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE, NodeKind.STALL)
    return float((graph.release_ns[device] != NO_RELEASE).mean())


def _identity(jobs: dict[str, Built]) -> str:
    rows = []
    for name, built in jobs.items():
        graph, quality = built.graph, built.quality
        strict = step_errors(graph, built.measured, replay(graph, without_stalls(graph)))
        full = step_errors(graph, built.measured, replay(graph))
        worst = max(((n / quality.offered[s], s) for s, n in quality.contradicted.items()), default=(0.0, "none"))
        rows.append(
            (
                name + (" (time-sliced GPU)" if quality.time_sliced_ranks else ""),
                len(built.job.ranks),
                f"{quality.window_ns / 1e6:.1f}",
                _percent(_errors(strict)),
                _percent(_errors(full)),
                _starts(built, True),
                f"{100 * quality.explained_tight:.1f} / {100 * quality.explained_starts:.1f}",
                f"{100 * quality.worst_stall_fraction:.2f}",
                f"{100 * worst[0]:.1f} ({worst[1]})",
                sum(n for what, n in built.health.guessed.items() if "first candidate" in what),
                f"{100 * _given(graph):.2f}",
            )
        )
    columns = (
        "job",
        "ranks",
        "window ms",
        "strict error per step %",
        "with stalls %",
        "strict start error p50/p95/max µs",
    )
    columns += (
        "starts within 5 / 20 µs %",
        "worst rank's stall %",
        "worst contradicted %",
        "second choices",
        "given starts %",
    )
    return table(columns, rows)


def _across(jobs: dict[str, Built]) -> str:
    rows = []
    for name, built in jobs.items():
        found: list[AcrossSteps] = across_steps(built.graph, built.measured)
        if not found:
            continue
        rows.append(
            (
                name,
                " ".join(str(a.step) for a in found),
                _percent([a.error for a in found], 1),
                f"{100 * np.mean([abs(a.error) for a in found]):.1f}",
                _percent([a.low_ns / a.measured_ns - 1 for a in found], 0),
                _percent([a.high_ns / a.measured_ns - 1 for a in found], 0),
                _percent([a.device_only_error for a in found]),
                _percent([a.naive_error for a in found], 0),
                f"{100 * np.mean([abs(a.naive_error) for a in found]):.1f}",
                _percent([a.host_variation for a in found], 0),
                f"{100 * min(a.mapped for a in found):.0f}",
            )
        )
    columns = ("job", "steps", "error %", "mean", "shortest donor %", "longest donor %", "own host times: error %")
    columns += ("mean of others: error %", "mean")
    return table((*columns, "host variation %", "mapped %"), rows)


def _classes(jobs: dict[str, Built]) -> str:
    rows = []
    for name in ("nanogpt8_h100", "torchrec4_5", "dlrm8_v100"):
        if name not in jobs:
            continue
        graph = jobs[name].graph
        for rules in WHATIFS:
            full = whatif(graph, rules, arbitrate=False).after.makespan_ns / 1e6
            without = [
                whatif(graph.without(kinds=[k]), rules, arbitrate=False).after.makespan_ns / 1e6 for k in DROPPED
            ]
            rows.append((name, " ".join(rules), f"{full:.2f}", *(f"{v:.2f}" for v in without)))
    return table(("job", "what if", "all edges ms", *(f"- {k.name.lower()}" for k in DROPPED)), rows)


def _gloo(folder: Path) -> tuple[str, float]:
    rows, every = [], []
    for job in sorted(p for p in folder.iterdir() if p.is_dir()):
        built = build(load(job))
        graph = built.graph
        strict = _errors(step_errors(graph, built.measured, replay(graph, without_stalls(graph))))
        every += [abs(e) for e in strict]
        found = stragglers(replay(graph))
        named = f"rank {found[0].rank}, {found[0].shorter_by_ns / 1e6:.1f} ms" if found else "-"
        rows.append((job.name, _percent(strict), f"{100 * built.quality.worst_stall_fraction:.1f}", named))
    columns = (
        "gloo job",
        "constants only: error per step %",
        "worst rank's stall %",
        "first straggler, step shorter by",
    )
    return table(columns, rows), float(np.median(every))


def _pairs(data: Path, jobs: dict[str, Built]) -> str:
    ab = data / "traces" / "nanogpt_ab_v1"
    current, hook = (
        build(load(ab / f"alt1__modded-nanogpt-{v}-gpu-rank-00-chrome-trace.json.gz")) for v in ("current", "hook")
    )
    pairs = [("nanogpt_ab: communication in hooks", current, hook, "overlap=ideal")]
    if "torchrec4_5" in jobs:
        pairs.append(("torchrec4_5: half the bytes", jobs["torchrec4_5"], jobs["torchrec4_5_qcomm"], "bandwidth=2x"))
    if "lightllm8" in jobs:
        pairs.append(("lightllm8: decode overlap", jobs["lightllm8"], jobs["lightllm8_overlap"], "overlap=ideal"))
    rows = []
    for what, a, b, rule in pairs:
        before, after = replay(a.graph).makespan_ns, replay(b.graph).makespan_ns
        plain, slowed = (whatif(a.graph, [rule], slowdown=on) for on in (False, True))
        rows.append(
            (
                what,
                rule + (" (an upper bound)" if plain.is_bound else ""),
                *(f"{ns / 1e6:.1f}" for ns in (before, after)),
                *(f"{one.change_ns / 1e6:+.2f}" for one in (plain, slowed)),
                f"{(after - before) / 1e6:+.2f}",
            )
        )
    columns = ("pair", "what if", "measured ms", "measured after ms", "predicted change ms")
    return table((*columns, "with slowdown by overlap ms", "measured change ms"), rows)


def main() -> None:
    """Print the tables and write them to results/replay_accuracy.md."""
    default = os.environ.get("SCALETRACE_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    data = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    jobs = {name: build(load(data / "traces" / path)) for name, path in JOBS.items()}
    gloo, median = _gloo(data / "gloo")
    body = "\n\n".join(
        (
            "## Strict identity, stalls, contradictions\n\nOne constant a rank for launch latency, stream gap and tail of "
            "blocking calls; stalls at zero.\n\n" + _identity(jobs),
            "## Across steps\n\nEach step from the durations of the others on its own structure, stalls at zero.\n\n"
            + _across(jobs),
            "## What each class of edges is worth\n\nMakespan after a change, with all edges and without one class.\n\n"
            + _classes(jobs),
            f"## Jobs on gloo\n\nMedian error over all steps: {100 * median:.2f} %.\n\n" + gloo,
            "## Pairs of real runs\n\n" + _pairs(data, jobs),
        )
    )
    print(write_result("replay_accuracy", "Accuracy of the replay", body, "numpy", "numba"))


if __name__ == "__main__":
    main()
