"""Turns the questions of Erdil & Schneider-Joseph (arXiv 2411.01137) into tables, plots and a page: docs/papers/erdil.md.

python -P benchmarks/papers/erdil.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.common import environment, table
from benchmarks.validation.rows import read_table, tables_folder
from benchmarks.validation.svg import plot
from scaletrace.extrapolate.catalog import names
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.graph import program_graph
from scaletrace.extrapolate.described.pipeline import Pipeline, pipeline_program
from scaletrace.extrapolate.limits import (
    A100,
    H100,
    Machine,
    Training,
    batch_seconds,
    layer_seconds,
    linear_until_flop,
    machine_of,
    utilization,
    wall_flop,
    what_ifs,
)
from scaletrace.replay.engine import replay

SIZES = (1e25, 1e26, 1e27, 1e28, 1e29, 1e30)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One training size at degrees in powers of two: a batch's seconds by closed form and by two replayed schedules."""

    flop: float
    stages: int
    micro_batches: int
    closed_s: float
    whole_stages_s: float
    interleaved_s: float


def bandwidth_exponent() -> float:
    """Growth of the end of linear scaling with the bandwidth of a flat network, without latency: about 4.5."""
    ends = []
    for rate in (50e9, 200e9):
        flat = replace(H100, inside_Bps=rate, beyond_Bps=rate, domain=0, latency_s=0.0, launch_s=0.0)
        ends.append(math.log10(linear_until_flop(flat)))
    return (ends[1] - ends[0]) / math.log10(4)


def by_replay(machine: Machine, training: Training, flop: float) -> Comparison:
    """The same batch, once by the closed form and twice as a graph that the engine sweeps.

    Degrees are rounded to powers of two so that a schedule exists. One pipeline stands for all. `whole_stages_s`: 1F1B,
    a stage passes a micro batch through all of its layers, gradients are reduced at the end. `interleaved_s`: each
    layer is a chunk of its own, its gradients reduced beside compute, which is what the closed form assumes.
    """
    point = utilization(machine, flop, training, powers_of_two=True).degrees
    stages, micro = round(point.pp), round(point.micro_batches)
    degrees = np.array([[stages], [point.dp], [point.tp_hidden], [point.tp_residual], [micro]], np.float64)
    step_s, reduction_s = layer_seconds(machine, training, flop, degrees)
    layers = 2 * training.blocks(flop) / stages
    # A layer's step is forward and backward together, so its latency is that of two collectives.
    work = layers * (step_s + 2 * machine.latency_s)
    chunks = max(1, round(layers)) if stages > 1 else 1
    seconds = [
        _replayed_s(stages, micro, count, work, layers * reduction_s, overlapped)
        for count, overlapped in ((1, False), (chunks, True))
    ]
    closed_s = float(batch_seconds(machine, training, flop, degrees)[0])
    return Comparison(flop, stages, micro, closed_s, *seconds)


def _replayed_s(stages: int, micro: int, chunks: int, work_s: float, reduction_s: float, overlapped: bool) -> float:
    """Makespan of one pipeline whose stages do `work_s` a micro batch in `chunks` equal pieces."""
    pipeline = Pipeline(
        stages=stages,
        chunks=chunks,
        micro_batches=micro,
        forward=((work_s / chunks / 3,) * chunks,) * stages,
        backward=((2 * work_s / chunks / 3,) * chunks,) * stages,
        reduce_s=reduction_s / chunks,
        overlapped=overlapped,
    )
    return replay(program_graph(pipeline_program(pipeline).freeze(), 1.0)).makespan_ns / 1e9


def _curves(reference: dict[float, float]) -> tuple[str, str]:
    logs = sorted(reference) or [25 + i / 4 for i in range(27)]
    ours = {log: 100 * utilization(H100, 10**log).utilization for log in logs}
    fast = {log: 100 * utilization(replace(H100, beyond_Bps=4 * H100.beyond_Bps), 10**log).utilization for log in logs}
    series = {"this model": list(ours.items()), "network × 4": list(fast.items())}
    if reference:
        series = {"digitised": list(reference.items()), **series}
    rows = [
        [f"1e{log:.2f}", f"{reference[log]:.1f}" if log in reference else "", f"{ours[log]:.1f}", f"{fast[log]:.1f}"]
        for log in logs[:: max(1, len(logs) // 14)]
    ]
    picture = plot("Utilization over training FLOP, H100, three months", "log10 FLOP", "utilization, %", series)
    return table(["training FLOP", "digitised, %", "this model, %", "network × 4, %"], rows), picture


CURVES = (
    "as it is",
    "network × 4 beyond the domain",
    "latency / 2",
    "domain of 72",
    "batch ∝ C^1/3",
    "wider, quarter of the depth",
    "sparse, 8 × the parameters",
)
"""What-ifs that are drawn."""


def _what_if_curves() -> tuple[str, str]:
    """Utilization over training FLOP of the drawn what-ifs."""
    logs = [25.0, 26.0, 27.0, 28.0, 28.5, 29.0, 29.5, 30.0, 30.5, 31.0, 32.0]
    cases = what_ifs(H100)
    series = {
        name: [(log, 100 * utilization(cases[name][0], 10**log, cases[name][1]).utilization) for log in logs]
        for name in CURVES
    }
    rows = [[name, *(f"{value:.0f}" for _, value in points)] for name, points in series.items()]
    heads = ["utilization, %", *(f"1e{log:g}" for log in logs)]
    return table(heads, rows), plot("What-ifs, H100, three months", "log10 FLOP", "utilization, %", series)


def claims() -> list[tuple[str, str, str]]:
    """(headline, what this model says, verdict)."""
    end, wall = linear_until_flop(H100), wall_flop(H100)
    unlimited = replace(H100, inside_Bps=1e6 * H100.inside_Bps, beyond_Bps=1e6 * H100.beyond_Bps)
    gained = math.log10(linear_until_flop(unlimited) / end)
    flat = math.log10(linear_until_flop(replace(H100, domain=0)) / end)
    dip = 100 * utilization(H100, 2e28).utilization
    last = 100 * utilization(H100, 2e31).utilization
    walls = [wall_flop(H100, step_latency_s=alpha) for alpha in (8.5e-6, 2e-6)]
    return [
        (
            "linear scaling ends near 2e28 FLOP in three months (57 %, 0.8 of the plateau)",
            f"{end:.1e}; {dip:.0f} % at 2e28. The digitised curve itself crosses 0.8 of its plateau at 6.5e28, after a dip",
            "within a factor of 4 of the headline, of 1.1 of the curve",
        ),
        (
            "a latency wall near 2e31 FLOP",
            f"{wall:.2e} with {1e6 * H100.step_latency_s:.1f} µs a serial step; utilization there {last:.1f} % (digitised 7.4 %)",
            "exact by construction of the latency",
        ),
        (
            "the wall moves as latency⁻²",
            f"{walls[0]:.2e} at 8.5 µs, {walls[1]:.2e} at 2 µs",
            "exact",
        ),
        (
            "better interconnects alone buy at most two orders of magnitude",
            f"NVLink's rate everywhere buys {flat:.1f} orders, an unlimited network {gained:.1f}: latency ends it",
            "reproduced" if gained <= 2.5 else "not reproduced",
        ),
    ]


def _what_if_table() -> str:
    rows = [
        [case, _flop(linear_until_flop(machine, training)), _flop(wall_flop(machine, training))]
        for case, (machine, training) in what_ifs(H100).items()
    ]
    return table(["case", "linear until", "wall"], rows)


def _device_table() -> str:
    machines = [H100, A100]
    machines += [machine_of(Cluster.load(name)) for name in names("clusters") if Cluster.load(name).backend == "nccl"]
    seen, rows = set(), []
    for machine in machines:
        key = (machine.name, machine.domain, machine.beyond_Bps)
        if key in seen:
            continue
        seen.add(key)
        rows.append(
            [
                machine.name,
                machine.domain,
                f"{machine.beyond_Bps / 1e9:.1f}",
                _flop(linear_until_flop(machine)),
                _flop(linear_until_flop(machine, Training(sparsity=8))),
                _flop(wall_flop(machine)),
            ]
        )
    return table(["device", "domain", "GB/s beyond", "linear until, dense", "8 × sparse", "wall"], rows)


def _replay_table() -> str:
    rows = []
    for flop in SIZES:
        found = by_replay(H100, Training(), flop)
        rows.append(
            [
                f"{flop:.0e}",
                found.stages,
                found.micro_batches,
                f"{found.closed_s:.4g}",
                f"{found.interleaved_s:.4g} ({found.interleaved_s / found.closed_s - 1:+.1%})",
                f"{found.whole_stages_s:.4g} ({found.whole_stages_s / found.closed_s - 1:+.1%})",
            ]
        )
    heads = [
        "FLOP",
        "stages",
        "micro batches",
        "closed form, s",
        "replay, a layer a chunk, s",
        "replay, whole stages, s",
    ]
    return table(heads, rows)


def _flop(value: float) -> str:
    return "none below 1e36" if math.isinf(value) else f"{value:.1e}"


def page() -> dict[str, str]:
    """File name → text of the page and its plot."""
    folder = tables_folder()
    rows = read_table(folder, "erdil_epoch_h100_default_utilization_curve.csv") if folder else []
    reference = {float(row["log10_training_flop"]): float(row["theoretical_utilization_pct"]) for row in rows}
    curve_text, curve_plot = _curves(reference)
    what_if_text, what_if_plot = _what_if_curves()
    made = ", ".join(f"{key} {value}" for key, value in environment().items())
    end, exponent = linear_until_flop(H100), bandwidth_exponent()
    walls = [wall_flop(H100, step_latency_s=alpha) for alpha in (8.5e-6, 2e-6)]
    text = f"""# Erdil & Schneider-Joseph: data movement limits to frontier model training

What `scaletrace limits` says of the questions of arXiv 2411.01137.
Written by `python -P benchmarks/papers/erdil.py` ({made}).

The formulas are the public ones with three additions that they need to have a limit at all near 2e28 FLOP:
a second tier of network (900 GB/s inside 8 GPUs, 50 GB/s a GPU beyond, times adding up), a latency of 2.7 µs for each
collective, and u = 0.70 for every resource. Dense and sparse models, and every device of the catalog, are below. Degrees are continuous; the smallest cluster that finishes in three months counts.

## Headline claims

{table(["claim", "this model", "verdict"], claims())}

## The curve

{curve_text}

![utilization](erdil-curve.svg)

Linear scaling (0.8 of the plateau) ends at {end:.1e} FLOP.
The wall `(D/B) · L · 4 · α = T` stands at {walls[0]:.2e} for α = 8.5 µs and at {walls[1]:.2e} for 2 µs: C ∝ (T/α)².
The end of linear scaling on a flat network grows as bandwidth to the power {exponent:.2f}.

## What-ifs, H100

{_what_if_table()}

{what_if_text}

![what-ifs](erdil-what-ifs.svg)

Interconnects alone buy about two orders of magnitude; a larger batch or a shallower, wider model moves both limits.

## Devices of the catalog

{_device_table()}

## Closed form and replay engine at the same sizes

{_replay_table()}

Where they differ, and why: the closed form's bubble is 2 (p - 1) *layer* steps, so it assumes that a micro batch leaves
a stage after one layer; replayed with a layer a chunk, the engine fills and drains in as little time.
Towards large sizes, where micro batches are as few as stages, the closed form is the longer of the two: it counts the bubble
as 2 (p - 1) steps of forward and backward together, the engine needs p - 1 of them.
With whole stages (1F1B) filling and draining costs (p - 1) times the work of a stage, and with about as many micro batches
as stages that nearly doubles the batch: the closed form's utilization needs a schedule that sends messages after each layer.
The rest is the end of the batch: the closed form hides each layer's gradient reduction behind compute of the same layer,
while in a replay only what other chunks still compute can hide it, and the last reductions stand alone
(all of it at 1e25, where the search takes one micro batch on one stage).
"""
    return {"erdil.md": text, "erdil-curve.svg": curve_plot, "erdil-what-ifs.svg": what_if_plot}


def main(argv: Sequence[str] = ()) -> None:
    folder = ROOT / "docs" / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in page().items():
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {folder.relative_to(ROOT) / name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
